"""Collects a step's record while the trainer computes it: see `observe.step_records`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_gvpo.observe.step_records import StepRecord, UpdateRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_gvpo.megatron.policy import Policy
    from megatron_gvpo.megatron.update import UpdateResult
    from megatron_gvpo.types import TrainBatch


def new_record(step: int, policy: Policy, mini_batches: Sequence[TrainBatch]) -> StepRecord:
    """The record of a step before its first update. A collective."""
    has_images = any(images for rows in mini_batches for images in rows.images or ())
    return StepRecord(
        step, policy.data_parallel_ranks, has_images, policy.tensor_sums.take("weights"), list(mini_batches)
    )


def add_update(record: StepRecord, policy: Policy, rows: TrainBatch, result: UpdateResult) -> None:
    """Add an update on `rows`, which it has just made, to the record of its step. A collective."""
    assert rows.place_n is not None, "the trainer numbers the rows of a step"
    record.updates.append(
        UpdateRecord(
            place_n=rows.place_n,
            old_logp_r=rows.old_logp_r,
            ref_logp_r=rows.ref_logp_r,
            logp_r=result.logp_r,
            weight_r=result.weight_r,
            metrics={name: float(value) for name, value in result.metrics.items()},
            grad_norm=result.update.grad_norm,
            lr=result.update.lr,
            is_skipped=result.update.skipped,
            gradients=result.gradients,
            weights=policy.tensor_sums.take("weights"),
        )
    )

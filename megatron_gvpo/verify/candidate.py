"""The side of this package: a model built by Megatron-Bridge in one layout, and what it computes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_gvpo.config.schema import Config, build_config
from megatron_gvpo.megatron.gradient_export import export_gradients
from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.types import TrainBatch
from megatron_gvpo.verify.layout import Layout
from megatron_gvpo.verify.measures import MICRO_BATCH, TEMPERATURE, UPDATE, Computed


def compute(directory: Path, layout: Layout, rows: TrainBatch) -> Computed:
    """Build the checkpoint in `directory` under `layout`, and compute on `rows`. A collective."""
    policy = Policy(config_of(directory, layout))
    exported = _copied(policy.weights())
    gradients: dict[str, Tensor] = {}
    apply = policy.optimizer.apply

    def export_first() -> Any:
        with megatron_device():
            policy.optimizer.megatron.prepare_grads()
        gradients.update(export_gradients(policy.model))
        return apply()

    policy.optimizer.apply = export_first  # type: ignore[method-assign]
    logp_r = policy.score(rows)
    update = policy.update(rows, at_step_start=True).update
    return Computed(
        logp_r=logp_r,
        gradients=gradients,
        norm=update.grad_norm,
        updated=_copied(policy.weights()),
        exported=exported,
    )


def config_of(directory: Path, layout: Layout) -> Config:
    """The configuration of a comparison under `layout`."""
    return build_config(
        {
            "output_dir": "unused",
            "model": {"path": str(directory), "dtype": "float32"},
            "data": {"train": {"path": "unused", "demonstration_key": "unused"}},
            "algorithm": {"recipe": "sft"},
            "rollout": {"temperature": TEMPERATURE},
            "rewards": {"components": [{"name": "math"}]},
            "train": {"steps": 1, "prompts_per_step": 1, "max_tokens_per_micro_batch": MICRO_BATCH},
            "optimizer": UPDATE,
            "parallel": layout.settings,
        }
    )


def _copied(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named}

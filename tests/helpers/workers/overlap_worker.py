"""Rank function of test_overlap.py: the same run with and without overlapped communication."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers.distributed import forget_layout, run_number
from helpers.small_constants import late_gathers, small_constants
from helpers.workers.gradient_worker import config_of
from megatron_gvpo.types import TrainBatch


def run(directory: str) -> None:
    """Run case number `run_number()` of work.pt twice; rank 0 writes {case}.pt."""
    folder, number = Path(directory), run_number()
    layout, case = torch.load(folder / "work.pt", weights_only=False)[number]

    results: dict[bool, dict[str, Any]] = {}
    for overlap in (False, True):
        config = config_of(case, replace(layout, overlap=overlap), folder)
        # The weights are far from a minimum, where a gradient is a small difference of large terms and shows
        # rounding.
        slow = config.optimizer.model_copy(update={"lr": 1e-3})
        config = config.model_copy(update={"optimizer": slow})
        with small_constants(), late_gathers():
            results[overlap] = _updates(config, case.rows, folder / f"checkpoint-{number}-{overlap}")
        forget_layout()
    if dist.get_rank() == 0:
        torch.save(results, folder / f"{case.name}.pt")


def _updates(config: Any, rows: TrainBatch, root: Path) -> dict[str, Any]:
    """Do updates, and between them run everything that reads weights; return {step: result}."""
    from megatron_gvpo.megatron.checkpoint.directory import complete_checkpoints
    from megatron_gvpo.megatron.checkpoint.load import load_policy
    from megatron_gvpo.megatron.checkpoint.save import save_policy
    from megatron_gvpo.megatron.policy import Policy

    policy = Policy.of(config)
    groups = sum(len(chunk.bucket_groups) for chunk in policy.model.chunks)
    results: dict[str, Any] = {"bucket groups": groups}

    def update(when: str, of: TrainBatch = rows) -> None:
        result = policy.update(of, at_step_start=False)
        results[f"{when}: loss"] = result.metrics["loss"]
        results[f"{when}: gradient norm"] = result.update.grad_norm

    def score(when: str) -> None:
        logp_r = policy.score(rows)
        results[f"{when}: log-prob sum"] = logp_r.sum().item()
        results[f"{when}: log-probs"] = logp_r

    def export(when: str) -> None:
        results.update({f"{when}: {name}": tensor.clone() for name, tensor in policy.weights()})

    for i in range(3):
        update(f"one after the other {i}")
    score("one after the other")
    update("after a score")
    score("after a score")
    for i in range(2):
        update(f"before an export {i}")
        export(f"export {i}")
    if policy.reference is not None:
        for i in range(2):
            anchor_r = policy.score_reference(rows)
            results[f"reference {i}"] = anchor_r
            update(f"with the reference {i}", rows.with_columns(ref_logp_r=anchor_r))
            policy.end_step()
    update("before memory is released")
    policy.memory.release("weights")
    policy.memory.restore("weights")
    score("after memory was released")
    update("before colocated servers get weights and memory")
    policy.memory.release("training")
    policy.memory.copy_weights_ahead()
    export("pushed to colocated servers")
    policy.memory.release("weights")
    policy.memory.restore("weights")
    policy.memory.restore("training")
    score("after colocated servers gave the memory back")
    update("after colocated servers")
    if config.parallel.pp > 1:  # in one case only, because it takes as long as all the rest
        update("before a save")
        save_policy(root, 1, policy, {}, keep=1)
        update("after a save")
        load_policy(complete_checkpoints(root)[-1], policy)
        export("loaded")
        update("after a load")
    score("in the end")
    export("in the end")
    return results

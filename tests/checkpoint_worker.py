"""What every rank does for test_resharding.py: train and save under one layout, go on under others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import run_number
from gradient_worker import Case, Layout, config_of
from torch import Tensor


@dataclass(frozen=True)
class Continuation:
    """What two updates after the checkpoint came to."""

    losses: list[float]
    grad_norms: list[float]
    lrs: list[float]
    weights: dict[str, Tensor]


def run(directory: str) -> None:
    """One run of work.pt: (layout, layout that saves, any_layout, case). The layout that saves goes on, too.

    Rank 0 writes run-{number}.pt: a Continuation, or the message of a ConfigError.
    """
    from megatron_gvpo.config import ConfigError
    from megatron_gvpo.megatron import checkpoint
    from megatron_gvpo.megatron.policy import Policy

    place, number = Path(directory), run_number()
    layout, source, any_layout, case = torch.load(place / "work.pt", weights_only=False)[number]
    root = place / f"{source}-{any_layout}-{case.model}"
    policy = Policy(config_of(case, layout, place))
    result: Continuation | str
    if layout == source:
        policy.update(case.rows, at_step_start=False)
        checkpoint.save(root, 1, policy, {"mine": 7}, keep=1, any_layout=any_layout)
        result = _go_on(policy, case)
    else:
        try:
            state = checkpoint.load(checkpoint.complete(root)[-1], policy)
            assert state["mine"] == 7
            result = _go_on(policy, case)
        except ConfigError as error:
            result = str(error)
    if dist.get_rank() == 0:
        torch.save(result, place / f"run-{number}.pt")


def _go_on(policy: object, case: Case) -> Continuation:
    results = [policy.update(case.rows, at_step_start=False) for _ in range(2)]  # type: ignore[attr-defined]
    return Continuation(
        losses=[result.metrics["loss"] for result in results],
        grad_norms=[result.update.grad_norm for result in results],
        lrs=[result.update.lr for result in results],
        weights={name: tensor.clone() for name, tensor in policy.weights()},  # type: ignore[attr-defined]
    )


SAVED = Layout(2, tp=2)
EXPERTS = Layout(4, ep=2, overlap=True)
PIPELINE = Layout(2, pp=2)
# (layout, the layout that saved, for any layout, model); the first of each checkpoint saves it.
RUNS: list[tuple[Layout, Layout, bool, str]] = [
    (SAVED, SAVED, True, "untied"),
    (Layout(2), SAVED, True, "untied"),
    (EXPERTS, EXPERTS, True, "qwen3_moe"),
    (Layout(2, tp=2, sequence_parallel=True), EXPERTS, True, "qwen3_moe"),
    (Layout(1), EXPERTS, True, "qwen3_moe"),
    (PIPELINE, PIPELINE, True, "untied"),
    (Layout(1), PIPELINE, True, "untied"),
    (Layout(2), Layout(2), False, "tied"),
    (Layout(1), Layout(2), False, "tied"),
]

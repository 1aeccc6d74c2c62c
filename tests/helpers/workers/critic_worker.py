"""Rank function of test_critic.py: a critic's values, gradients and updates under each layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.distributed import run_number
from helpers.workers.gradient_worker import _copy, config_of, sizes_of


@dataclass(frozen=True)
class CriticResult:
    """Results of one layout; gradients and weights have Hugging Face names, those of the head begin with
    `head.`.
    """

    at_first_r: Tensor  # values before any update
    value_r: Tensor
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    next_metrics: list[dict[str, float]]
    resumed_metrics: list[dict[str, float]]
    weights: dict[str, Tensor]
    resumed_weights: dict[str, Tensor]


def run(directory: str) -> None:
    """Run layout number `run_number()` of work.pt; rank 0 writes {layout}-{model}.pt."""
    from megatron_gvpo.megatron.checkpoint.directory import complete_checkpoints
    from megatron_gvpo.megatron.checkpoint.load import load_policy
    from megatron_gvpo.megatron.checkpoint.save import save_policy
    from megatron_gvpo.megatron.policy import Policy

    folder, number = Path(directory), run_number()
    runs, head_h, bias = torch.load(folder / "work.pt", weights_only=False)
    layout, case = runs[number]
    with sizes_of(layout):
        config = config_of(case, layout, folder)
        policy = Policy.of(config)
        critic: Any = policy.critic
        at_first_r = critic.values(case.rows)
        for module in _heads(critic):  # the head is not zero, so that the layers before it have gradients
            module.weight.data.copy_(head_h[None])
            module.bias.data.fill_(bias)
        critic.optimizer.megatron.reload_model_params()
        value_r = critic.values(case.rows)

        gradients: dict[str, Tensor] = {}
        apply = critic.optimizer.apply

        def no_update() -> Any:
            gradients.update(_named(critic, gradients=True))
            return SimpleNamespace(grad_norm=0.0, skipped=False)

        critic.optimizer.apply = no_update
        metrics = critic.update(case.rows)
        critic.optimizer.apply = apply

        critic.update(case.rows)
        root = folder / f"checkpoint-{number}"
        save_policy(root, 1, policy, {}, keep=1)
        next_metrics = [critic.update(case.rows) for _ in range(2)]
        weights = _named(critic)
        load_policy(complete_checkpoints(root)[-1], policy)
        resumed = [critic.update(case.rows) for _ in range(2)]
        result = CriticResult(
            at_first_r, value_r, metrics, gradients, next_metrics, resumed, weights, _named(critic)
        )
    if dist.get_rank() == 0:
        torch.save(result, folder / f"{layout}-{case.model}.pt")


def _heads(critic: Any) -> list[Any]:
    """The value head, which only the ranks of the last pipeline stage have."""
    from megatron_gvpo.megatron.checkpoint.state import bare_chunks

    return [chunk.output_layer for chunk in bare_chunks(critic.model).values() if chunk.post_process]


def _backbone(critic: Any) -> Iterator[tuple[str, Tensor]]:
    """All weights but the head's, for which Megatron-Bridge has no name."""
    from megatron_gvpo.megatron.checkpoint.state import bare_chunks

    critic.model.finish_param_gather()
    chunks = [chunk for chunk in bare_chunks(critic.model).values() if chunk.post_process]
    heads = [chunk.output_layer for chunk in chunks]
    for chunk in chunks:
        chunk.output_layer = torch.nn.Module()
    yield from critic.model.export()
    for chunk, head in zip(chunks, heads, strict=True):
        chunk.output_layer = head


def _named(critic: Any, gradients: bool = False) -> dict[str, Tensor]:
    """The critic's weights, or its gradients, on every rank."""
    from megatron_gvpo.megatron.gradient_export import export_gradients

    weights = partial(_backbone, critic)
    named = export_gradients(critic.model, weights) if gradients else _copy(weights())
    heads = _heads(critic)  # the gradients were summed over all ranks above
    local = {
        f"head.{name}": (parameter.main_grad if gradients else parameter.data).to("cpu", copy=True)
        for head in heads
        for name, parameter in head.named_parameters()
    }
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, local)
    of_heads = [head for head in everyones if head]
    for head in of_heads:  # whole and equal on every rank that has it
        assert all(torch.equal(head[name], of_heads[0][name]) for name in head)
    return named | of_heads[0]

"""Divides an optimizer step's rows among the ranks, and gathers the ranks' results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_gvpo.megatron.microbatch_plan import plan
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.pieces import Pieces
from megatron_gvpo.runtime.collectives import all_gather_msgpack
from megatron_gvpo.types import TrainBatch


@dataclass(frozen=True)
class Share:
    """This rank's share of an optimizer step's rows, in micro-batches.

    A conversation that has several segments and more tokens than the budget is divided by segment: each is a
    row of its own there.
    """

    micro_batches: list[list[int]]  # indices of `pieces`, or of the rows where no row is divided
    split_groups: bool  # a group is divided between micro-batches
    pieces: Pieces | None  # where a row is divided

    @property
    def split_rows(self) -> bool:
        return self.pieces is not None

    def packs(self, rows: TrainBatch) -> list[TrainBatch]:
        """The rows of each micro-batch, with the columns of `rows`."""
        if self.pieces is not None:
            rows = self.pieces.of(rows)
        return [rows.select(index) for index in self.micro_batches]

    def gather(self, rows: TrainBatch, results: list[Tensor]) -> Tensor:
        """Gather the ranks' values of their packs' tokens: fp32 [r] of all rows, on every rank's CPU."""
        if self.pieces is not None:
            whole_r = torch.zeros(rows.offsets[-1], dtype=torch.float32)
            whole_r[self.pieces.token_r] = gather(self.pieces.of(rows), self.micro_batches, results)
            return whole_r
        return gather(rows, self.micro_batches, results)


def my_share(model: Model, rows: TrainBatch, max_tokens: int, keep_groups: bool) -> Share:
    """Divide the rows, the same way on every rank, into micro-batches of at most `max_tokens` tokens."""
    dp_size = parallel_state.get_data_parallel_world_size()
    mcore = model.config
    multiple = mcore.pipeline_model_parallel_size if len(model.chunks) > 1 else 1
    pieces = Pieces.divide(rows, max_tokens)
    divided = rows if pieces is None else pieces.of(rows)
    shared = model.shares_prompts_of(rows)
    keep_groups = keep_groups or shared  # apart, they would share nothing
    whole = plan(divided, dp_size, max_tokens, mcore.hidden_size, keep_groups, multiple, shared)
    mine = whole.micro_batches[parallel_state.get_data_parallel_rank()]
    return Share(mine, whole.split_groups, pieces)


def gather(rows: TrainBatch, micro_batches: list[list[int]], results: list[Tensor]) -> Tensor:
    """Gather the ranks' values of their micro-batches' tokens: fp32 [r] of all rows, on every rank's CPU."""
    value_r = torch.zeros(int(rows.length_n.sum()), dtype=torch.float32)
    if owns_results():
        for index, values in zip(micro_batches, results, strict=True):
            spans = [torch.arange(rows.offsets[i], rows.offsets[i + 1]) for i in index]
            if spans:
                value_r[torch.cat(spans)] = values.float().cpu()
    # All ranks but the owner of a row add zeros, so the sum is exact.
    dist.all_reduce(value_r)
    return value_r


def owns_results() -> bool:
    """Return True on one of the ranks that computed the same numbers: the one that reports them."""
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    first = parallel_state.get_tensor_and_context_parallel_rank() == 0
    return bool(last and first)


def detached(metrics: Mapping[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Detach metrics but keep tensors: to convert each micro-batch's to numbers would wait for the GPU."""
    return {n: value.detach() if isinstance(value, Tensor) else value for n, value in metrics.items()}


def floats(metrics: Mapping[str, Tensor | float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def sum_over_ranks(per_micro_batch: list[dict[str, float]]) -> dict[str, float]:
    """Sum the metrics of all micro-batches of all ranks; every rank gets the sums."""
    total: dict[str, float] = {}
    mine: list[Any] = per_micro_batch if owns_results() else []
    for from_rank in all_gather_msgpack(mine):
        for metrics in from_rank:
            for name, value in metrics.items():
                total[name] = total.get(name, 0.0) + value
    return total

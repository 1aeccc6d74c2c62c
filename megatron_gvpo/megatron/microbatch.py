"""Divides an optimizer step's rows among the ranks, and gathers the ranks' results.

The plan is a pure function of the rows, so that every rank computes the same one. Whole groups stay together
if the token budget allows it. batch.py packs the rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_gvpo.core.collectives import all_gather_msgpack
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.turns import Segment, Turn
from megatron_gvpo.types import TrainBatch


@dataclass(frozen=True)
class MicroBatchPlan:
    """The plan of an optimizer step: which rank computes which rows in which micro-batch.

    `micro_batches[dp_rank][i]` are row indices, ascending: a loss sees rows in the order of the step.

    All ranks have equally many micro-batches; some may be empty.
    `split_groups`: a group is divided between micro-batches, so sums over it need a scoring pass.
    """

    micro_batches: list[list[list[int]]]
    split_groups: bool


def plan(
    rows: TrainBatch,
    dp_size: int,
    max_tokens: int,
    hidden_size: int,
    keep_groups: bool = True,
    multiple: int = 1,
    share_prompts: bool = False,
) -> MicroBatchPlan:
    """Distribute rows over data-parallel ranks and micro-batches of at most `max_tokens` tokens.

    The plan balances cost: tokens for the linear layers plus squared lengths for attention. A sequence
    longer than `max_tokens` gets a micro-batch of its own. Every rank gets a `multiple` of micro-batches, as
    an interleaved pipeline needs; some are empty if there are too few rows. `share_prompts`: a row with the
    same prompt as the row before it in its group adds only its response.
    """
    items, tokens, is_split = _items(rows, max_tokens, keep_groups, share_prompts)
    cost = [t * (1 + t / (6 * hidden_size)) for t in tokens]
    items.sort(key=lambda item: -sum(cost[i] for i in item))
    least = sum(min(t, max_tokens) for t in tokens)  # a longer sequence takes one micro-batch
    count = max(1, -(-least // (max_tokens * dp_size)))
    count += -count % multiple
    while (bins := _fill(items, tokens, cost, count * dp_size, dp_size, max_tokens)) is None:
        count += multiple
    micro_batches = [[sorted(part) for part in bins[r::dp_size]] for r in range(dp_size)]
    return MicroBatchPlan(micro_batches, is_split)


def _items(
    rows: TrainBatch, max_tokens: int, keep_groups: bool, share_prompts: bool
) -> tuple[list[list[int]], list[int], bool]:
    """Return (indivisible units, tokens that each row adds to its pack, True if a group is split).

    A unit is a group that fits the budget, or a single row.
    """
    tokens = list(rows.tokens)
    if not keep_groups:
        return [[i] for i in range(len(rows))], tokens, True
    groups: dict[int, list[int]] = {}
    for i, group in enumerate(rows.group_n.tolist()):
        groups.setdefault(group, []).append(i)
    items: list[list[int]] = []
    is_split = False
    for group_rows in groups.values():
        added = {i: tokens[i] for i in group_rows}
        if share_prompts:  # PackedBatch.pack will repeat no prompt
            for before, i in pairwise(group_rows):
                if rows.prompt_ids[before] == rows.prompt_ids[i]:
                    added[i] = len(rows.response_ids[i])
        if sum(added.values()) <= max_tokens or len(group_rows) == 1:
            items.append(group_rows)
            for i in group_rows:
                tokens[i] = added[i]
        else:
            is_split = True
            items.extend([i] for i in group_rows)
    return items, tokens, is_split


def _fill(
    items: list[list[int]], tokens: list[int], cost: list[float], bins: int, dp_size: int, max_tokens: int
) -> list[list[int]] | None:
    """Put items, sorted by decreasing cost, into bins within the token budget; None if an item does not fit.

    Each item goes to the rank with the least cost so far, and there into the bin with the least cost
    (longest-processing-time scheduling). Bin b belongs to rank b % dp_size.
    """
    content: list[list[int]] = [[] for _ in range(bins)]
    used, load, rank_load = [0] * bins, [0.0] * bins, [0.0] * dp_size
    for item in items:
        size = sum(tokens[i] for i in item)
        fitting = [b for b in range(bins) if used[b] + size <= max_tokens or not content[b]]
        if not fitting:
            return None
        best = min(fitting, key=lambda b: (rank_load[b % dp_size], load[b]))
        item_cost = sum(cost[i] for i in item)
        content[best] += item
        used[best] += size
        load[best] += item_cost
        rank_load[best % dp_size] += item_cost
    return content


@dataclass(frozen=True)
class RowSegments:
    """Rows with those conversations divided by segment that do not fit into a micro-batch.

    Each part, [n], is an undivided row or one segment of a row.
    """

    row_n: list[int]  # the row that each part comes from
    token_r: Tensor  # int64 indices into the rows' token columns, one for each token of the parts
    segment_n: list[Segment | None]  # None: the row is not divided

    @staticmethod
    def divide(rows: TrainBatch, max_tokens: int) -> RowSegments | None:
        """Divide the rows of several segments and more than `max_tokens` tokens; None if there is none."""
        too_long = [i for i, tokens in enumerate(rows.tokens) if tokens > max_tokens and rows.turns]
        segments = {i: rows.segments(i) for i in too_long if len(rows.segments(i)) > 1}
        if not segments:
            return None
        row_n: list[int] = []
        spans: list[Tensor] = []
        segment_n: list[Segment | None] = []
        for i, (offset, end) in enumerate(zip(rows.offsets[:-1], rows.offsets[1:], strict=True)):
            if i not in segments:
                row_n.append(i)
                segment_n.append(None)
                spans.append(torch.arange(offset, end))
            for segment in segments.get(i, ()):
                row_n.append(i)
                segment_n.append(segment)
                spans += [torch.arange(offset + first, offset + first + n) for _, first, n in segment.own]
        return RowSegments(row_n, torch.cat(spans), segment_n)

    def apply(self, rows: TrainBatch) -> TrainBatch:
        """Return the parts of `rows` as rows, with all columns; a part has its row's values.

        A sum over a part's tokens is not the sum over its row's: losses are computed on undivided rows.
        """
        repeated = rows.select(self.row_n)  # each divided row once for every part
        token_columns = {
            f.name: column[self.token_r]
            for f in fields(rows)
            if f.name.endswith("_r") and (column := getattr(rows, f.name)) is not None
        }
        supports = list(repeated.support or [])
        prompts, responses, turns = (
            list(repeated.prompt_ids),
            list(repeated.response_ids),
            list(repeated.turns or []),
        )
        for n, segment in enumerate(self.segment_n):
            if segment is not None:
                prompts[n], responses[n], turns[n] = _as_row(segment)
                if supports and (of_row := supports[n]) is not None:
                    supports[n] = of_row.parts((first, first + count) for _, first, count in segment.own)
        return replace(
            repeated,
            prompt_ids=prompts,
            response_ids=responses,
            turns=turns,
            routing=None,
            support=supports or None,
            **token_columns,
        )


def _as_row(segment: Segment) -> tuple[list[int], list[int], list[Turn]]:
    """Return (prompt, response, turns) of a row that is this segment alone."""
    prompt, response = segment.ids[: segment.own[0][0]], list[int]()
    turns: list[Turn] = []
    end = len(prompt)
    for begin, _, count in segment.own:
        turns.append(Turn(len(response), len(turns) - 1, None, tuple(segment.ids[end:begin])))
        end = begin + count
        response += segment.ids[begin:end]
    return prompt, response, turns


@dataclass(frozen=True)
class Share:
    """This rank's share of an optimizer step's rows, in micro-batches.

    A conversation that has several segments and more tokens than the budget is divided by segment: each is a
    row of its own there.
    """

    micro_batches: list[list[int]]  # indices of the rows, or of the parts of `segments`
    split_groups: bool  # a group is divided between micro-batches
    segments: RowSegments | None  # None: no row is divided

    @property
    def split_rows(self) -> bool:
        return self.segments is not None

    def packs(self, rows: TrainBatch) -> list[TrainBatch]:
        """Return the rows of each micro-batch, with the columns of `rows`."""
        if self.segments is not None:
            rows = self.segments.apply(rows)
        return [rows.select(index) for index in self.micro_batches]

    def gather(self, rows: TrainBatch, results: list[Tensor]) -> Tensor:
        """Gather the ranks' values of their packs' tokens: fp32 [r] of all rows, on every rank's CPU."""
        if self.segments is not None:
            value_r = torch.zeros(rows.offsets[-1], dtype=torch.float32)
            value_r[self.segments.token_r] = gather(self.segments.apply(rows), self.micro_batches, results)
            return value_r
        return gather(rows, self.micro_batches, results)


def my_share(model: Model, rows: TrainBatch, max_tokens: int, keep_groups: bool) -> Share:
    """Divide the rows, the same way on every rank, into micro-batches of at most `max_tokens` tokens."""
    dp_size = parallel_state.get_data_parallel_world_size()
    mcore = model.config
    multiple = mcore.pipeline_model_parallel_size if len(model.chunks) > 1 else 1
    segments = RowSegments.divide(rows, max_tokens)
    divided = rows if segments is None else segments.apply(rows)
    shared = model.shares_prompts_of(rows)
    keep_groups = keep_groups or shared  # in different micro-batches, responses cannot share their prompt
    all_ranks = plan(divided, dp_size, max_tokens, mcore.hidden_size, keep_groups, multiple, shared)
    micro_batches = all_ranks.micro_batches[parallel_state.get_data_parallel_rank()]
    return Share(micro_batches, all_ranks.split_groups, segments)


def gather(rows: TrainBatch, micro_batches: list[list[int]], results: list[Tensor]) -> Tensor:
    """Gather the ranks' values of their micro-batches' tokens: fp32 [r] of all rows, on every rank's CPU."""
    value_r = torch.zeros(int(rows.length_n.sum()), dtype=torch.float32)
    if owns_results():
        spans = [torch.arange(*rows.offsets[i : i + 2]) for index in micro_batches for i in index]
        values = [result for index, result in zip(micro_batches, results, strict=True) if index]
        if spans:  # one copy to the host in all, because each copy waits for the GPU
            value_r[torch.cat(spans)] = torch.cat(values).float().cpu()
    # All ranks but the owner of a row add zeros, so the sum is exact.
    dist.all_reduce(value_r)
    return value_r


def owns_results() -> bool:
    """Return True on one of the ranks that computed the same numbers: the one that reports them."""
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    is_first = parallel_state.get_tensor_and_context_parallel_rank() == 0
    return bool(is_last and is_first)


def detached(metrics: Mapping[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Detach metrics but keep tensors: converting them to numbers here would wait for the GPU every time."""
    return {n: value.detach() if isinstance(value, Tensor) else value for n, value in metrics.items()}


def floats(per_micro_batch: Sequence[Mapping[str, Tensor | float]]) -> list[dict[str, float]]:
    """Convert the metrics of all micro-batches in one copy: each copy makes the host wait for the GPU."""
    tensors = [
        value for metrics in per_micro_batch for value in metrics.values() if isinstance(value, Tensor)
    ]
    device = tensors[0].device if tensors else None
    scalars = [tensor.detach().to(device, torch.float64).reshape(()) for tensor in tensors]
    numbers = iter(torch.stack(scalars).tolist() if scalars else [])
    return [
        {
            name: next(numbers) if isinstance(value, Tensor) else float(value)
            for name, value in metrics.items()
        }
        for metrics in per_micro_batch
    ]


def sum_over_ranks(per_micro_batch: list[dict[str, float]]) -> dict[str, float]:
    """Sum the metrics of all micro-batches of all ranks; every rank gets the sums."""
    total: dict[str, float] = {}
    local: list[Any] = per_micro_batch if owns_results() else []
    for of_rank in all_gather_msgpack(local):
        for metrics in of_rank:
            for name, value in metrics.items():
                total[name] = total.get(name, 0.0) + value
    return total

"""The plan of an optimizer step: which rank computes which rows in which micro-batch.

The plan is a pure function of the rows, so that every rank computes the same one. Whole groups stay together
if the token budget allows it. batch.py packs the rows of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from megatron_gvpo.types import TrainBatch


@dataclass(frozen=True)
class Plan:
    """`micro_batches[dp_rank][i]` are row indices, ascending: a loss sees rows in the order of the step.

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
) -> Plan:
    """Distribute rows over data-parallel ranks and micro-batches of at most `max_tokens` tokens.

    The plan balances cost: tokens for the linear layers plus squared lengths for attention. A sequence
    longer than `max_tokens` gets a micro-batch of its own. Every rank gets a `multiple` of micro-batches, as
    an interleaved pipeline needs; some are empty if there are too few rows. `share_prompts`: a row with the
    same prompt as the row before it in its group adds only its response.
    """
    tokens = list(rows.tokens)
    items, split = _items(rows, tokens, max_tokens, keep_groups, share_prompts)
    if share_prompts:  # count an item's tokens as PackedBatch.pack will pack them
        for item in items:
            for before, i in pairwise(item):
                if rows.prompt_ids[before] == rows.prompt_ids[i]:
                    tokens[i] = len(rows.response_ids[i])
    cost = [t * (1 + t / (6 * hidden_size)) for t in tokens]
    items.sort(key=lambda item: -sum(cost[i] for i in item))
    least = sum(min(t, max_tokens) for t in tokens)  # a longer sequence takes one micro-batch
    count = max(1, -(-least // (max_tokens * dp_size)))
    count += -count % multiple
    while (bins := _fill(items, tokens, cost, count * dp_size, dp_size, max_tokens)) is None:
        count += multiple
    return Plan([[sorted(part) for part in bins[r::dp_size]] for r in range(dp_size)], split)


def _items(
    rows: TrainBatch, tokens: list[int], max_tokens: int, keep_groups: bool, share_prompts: bool
) -> tuple[list[list[int]], bool]:
    """Return (indivisible units, True if a group is split): groups that fit the budget, else single rows."""
    if not keep_groups:
        return [[i] for i in range(len(rows))], True
    members: dict[int, list[int]] = {}
    for i, group in enumerate(rows.group_n.tolist()):
        members.setdefault(group, []).append(i)
    items: list[list[int]] = []
    split = False
    for group_rows in members.values():
        size = sum(tokens[i] for i in group_rows)
        if share_prompts:
            pairs = [(a, b) for a, b in pairwise(group_rows) if rows.prompt_ids[a] == rows.prompt_ids[b]]
            size -= sum(len(rows.prompt_ids[b]) for _, b in pairs)
        if size <= max_tokens or len(group_rows) == 1:
            items.append(group_rows)
        else:
            split = True
            items.extend([i] for i in group_rows)
    return items, split


def _fill(
    items: list[list[int]], tokens: list[int], cost: list[float], bins: int, dp_size: int, max_tokens: int
) -> list[list[int]] | None:
    """Put items, sorted by falling cost, into bins under the token budget; None if an item does not fit.

    Each item goes to the rank with the least cost so far, and there into the bin with the least cost
    (longest-processing-time scheduling). Bin b belongs to rank b % dp_size.
    """
    content: list[list[int]] = [[] for _ in range(bins)]
    used, load, rank_load = [0] * bins, [0.0] * bins, [0.0] * dp_size
    for item in items:
        size = sum(tokens[i] for i in item)
        room = [b for b in range(bins) if used[b] + size <= max_tokens or not content[b]]
        if not room:
            return None
        best = min(room, key=lambda b: (rank_load[b % dp_size], load[b]))
        item_cost = sum(cost[i] for i in item)
        content[best] += item
        used[best] += size
        load[best] += item_cost
        rank_load[best % dp_size] += item_cost
    return content

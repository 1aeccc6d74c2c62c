"""Rows to packed micro-batches: which rank computes which rows when, and the packs themselves.

The plan is a pure function of the rows, so that every rank computes the same one. Nothing is padded but
what the layout demands (`layout.Padding`). Whole groups stay together where the token budget allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from megatron_gvpo.config.parallel_layout import Padding
from megatron_gvpo.types import Routing, TrainBatch, on_device


@dataclass(frozen=True)
class Plan:
    """`micro_batches[dp_rank][i]` are row indices; all ranks have equally many, some may be empty.

    `split_groups`: some group is divided between micro-batches, so its sums need a scoring pass.
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

    Balanced by cost, the linear layers' tokens plus the attention's squares. A sequence longer than
    `max_tokens` gets a micro-batch of its own. Every rank gets a `multiple` of micro-batches, which an
    interleaved pipeline wants; empty ones where the rows do not fill them. `share_prompts`: rows that begin
    with the same prompt as the one before them in their group bring their response alone.
    """
    tokens = [len(p) + len(r) for p, r in zip(rows.prompt_ids, rows.response_ids, strict=True)]
    items, split = _items(rows, tokens, max_tokens, keep_groups, share_prompts)
    if share_prompts:  # inside an item, as TokenBatch.pack will do it
        for item in items:
            for before, i in pairwise(item):
                if rows.prompt_ids[before] == rows.prompt_ids[i]:
                    tokens[i] = len(rows.response_ids[i])
    cost = [t * (1 + t / (6 * hidden_size)) for t in tokens]
    items.sort(key=lambda item: -sum(cost[i] for i in item))
    least = sum(min(t, max_tokens) for t in tokens)  # a longer sequence fills one micro-batch, not several
    count = max(1, -(-least // (max_tokens * dp_size)))
    count += -count % multiple
    while (bins := _fill(items, tokens, cost, count * dp_size, dp_size, max_tokens)) is None:
        count += multiple
    group: list[int] = rows.group_n.tolist()
    first: dict[int, int] = {}
    for i, g in enumerate(group):
        first.setdefault(g, i if share_prompts else 0)  # members who share a prompt are neighbours
    order = {i: (first[g], i) for i, g in enumerate(group)}
    per_rank = [[sorted(part, key=order.__getitem__) for part in bins[r::dp_size]] for r in range(dp_size)]
    return Plan(per_rank, split)


def _items(
    rows: TrainBatch, tokens: list[int], max_tokens: int, keep_groups: bool, share_prompts: bool
) -> tuple[list[list[int]], bool]:
    """The indivisible units: whole groups that fit the budget, single sequences otherwise."""
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
    """Longest-processing-time packing under the token budget, onto the rank with the least to do so far
    (bin b is rank b % dp_size's) and there into its emptiest bin; None if some item finds no room.
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


@dataclass
class PackedBatch:
    """One pack, or a context-parallel rank's cut of one: token-aligned columns [t] (design law 1).

    The hidden state at `response_r` predicts token `index_r` of the rows' flat response columns, `label_r`.
    """

    rows: TrainBatch  # all of the pack's, in every cut
    token_t: Tensor  # int64
    position_t: Tensor  # int64, from 0 in every sequence
    response_r: Tensor  # int64 indices into t
    index_r: Tensor  # int64 indices into the rows' token columns
    label_r: Tensor  # int64
    lengths: list[int]  # of all the pack's sequences, padding included; the pack's own is one more sequence
    # With shared prompts, a prompt is a sequence, and so is what follows it in each response. Of every
    # sequence: how many of the next ones follow it, attend to it, and go on from its last position.
    followers: list[int] = field(default_factory=list)
    # Through which experts the tokens are to go: int16 [t, layers, experts a token]; -1: the router chooses.
    experts_t: Tensor | None = None

    @staticmethod
    def pack(
        rows: TrainBatch,
        padding: Padding = Padding(1, 1),  # noqa: B008 - frozen
        share_prompts: bool = False,
    ) -> PackedBatch:
        """`share_prompts`: neighbours with the same prompt have it once. Not with padded sequences."""
        if share_prompts:
            assert padding.sequence == 1, "shared prompts are not cut over context-parallel ranks"
            assert rows.routing is None, "a prompt may have been routed differently for each of its responses"
            return _pack_shared(rows, padding)
        tokens: list[int] = []
        response: list[Tensor] = []
        lengths: list[int] = []
        for prompt, answer in zip(rows.prompt_ids, rows.response_ids, strict=True):
            begin = len(tokens)
            first = begin + len(prompt) - 1  # the hidden state here predicts answer[0]
            response.append(torch.arange(first, first + len(answer)))
            tokens += [*prompt, *answer[:-1]]  # the last token predicts nothing that is trained
            tokens += [0] * (-(len(tokens) - begin) % padding.sequence)
            lengths.append(len(tokens) - begin)
        pad = -len(tokens) % padding.pack if tokens else padding.pack
        if pad:
            tokens += [0] * pad
            lengths.append(pad)
        return PackedBatch(
            rows=rows,
            token_t=torch.tensor(tokens, dtype=torch.int64),
            position_t=torch.cat([torch.arange(length) for length in lengths]),
            response_r=torch.cat(response) if response else torch.zeros(0, dtype=torch.int64),
            index_r=torch.arange(int(rows.length_n.sum())),
            label_r=torch.tensor([t for answer in rows.response_ids for t in answer], dtype=torch.int64),
            lengths=lengths,
            experts_t=_experts(rows.routing, lengths),
        )

    def cut(self, parts: int, part: int) -> PackedBatch:
        """One of `parts` context-parallel ranks' tokens, all columns cut alike."""
        if parts == 1:
            return self
        mine_t = context_cut(self.lengths, parts, part)
        local_t = torch.full_like(self.token_t, -1)
        local_t[mine_t] = torch.arange(len(mine_t))
        response_r = local_t[self.response_r]
        here_r = response_r >= 0
        return replace(
            self,
            token_t=self.token_t[mine_t],
            position_t=self.position_t[mine_t],
            response_r=response_r[here_r],
            index_r=self.index_r[here_r],
            label_r=self.label_r[here_r],
            experts_t=None if self.experts_t is None else self.experts_t[mine_t],
        )

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(
            rows=self.rows.to(device),
            token_t=on_device(self.token_t, device),
            position_t=on_device(self.position_t, device),
            response_r=on_device(self.response_r, device),
            index_r=on_device(self.index_r, device),
            label_r=on_device(self.label_r, device),
            lengths=self.lengths,
            followers=self.followers,
            experts_t=None if self.experts_t is None else on_device(self.experts_t, device),
        )


def _experts(routing: Sequence[Routing | None] | None, lengths: list[int]) -> Tensor | None:
    """`PackedBatch.experts_t` of rows with padded sequences of these lengths, and of the pack's padding."""
    known = next((of_row for of_row in routing or [] if of_row is not None), None)
    if routing is None or known is None:
        return None
    experts_t = torch.full((sum(lengths), known.layers, known.per_token), -1, dtype=torch.int16)
    begins = [0, *accumulate(lengths)]
    for of_row, begin in zip(routing, begins, strict=False):  # the pack's own padding comes last
        if of_row is not None:
            chosen_t = _decoded(of_row)
            experts_t[begin : begin + len(chosen_t)] = chosen_t
    return experts_t


def _decoded(routing: Routing) -> Tensor:
    """int16 [tokens - 1, layers, experts a token]"""
    dtype = {1: torch.uint8, 2: torch.int16}[routing.width]
    flat = torch.frombuffer(bytearray(routing.ids), dtype=dtype)
    return flat.view(-1, routing.layers, routing.per_token)


def _pack_shared(rows: TrainBatch, padding: Padding) -> PackedBatch:
    """Every run of rows with one prompt as the prompt and their responses after it.

    The prompt's last token is in the pack once, and predicts the first token of all its responses.
    """
    tokens: list[int] = []
    positions: list[Tensor] = []
    response: list[Tensor] = []
    lengths: list[int] = []
    followers: list[int] = []

    def segment(ids: Sequence[int], first_position: int) -> int:
        begin = len(tokens)
        tokens.extend(ids)
        positions.append(torch.arange(first_position, first_position + len(ids)))
        lengths.append(len(ids))
        followers.append(0)
        return begin

    pairs = list(zip(rows.prompt_ids, rows.response_ids, strict=True))
    for prompt, run in groupby(pairs, key=lambda pair: pair[0]):
        answers = [answer for _, answer in run]
        if len(answers) == 1:  # nobody to share it with
            begin = segment([*prompt, *answers[0][:-1]], 0) + len(prompt) - 1
            response.append(torch.arange(begin, begin + len(answers[0])))
            continue
        last, place = segment(prompt, 0) + len(prompt) - 1, len(lengths) - 1
        for answer in answers:
            response.append(torch.tensor([last]))
            if len(answer) > 1:  # the last token predicts nothing that is trained
                begin = segment(answer[:-1], len(prompt))
                response.append(torch.arange(begin, begin + len(answer) - 1))
                followers[place] += 1
    pad = -len(tokens) % padding.pack if tokens else padding.pack
    if pad:
        segment([0] * pad, 0)
    return PackedBatch(
        rows=rows,
        token_t=torch.tensor(tokens, dtype=torch.int64),
        position_t=torch.cat(positions),
        response_r=torch.cat(response) if response else torch.zeros(0, dtype=torch.int64),
        index_r=torch.arange(int(rows.length_n.sum())),
        label_r=torch.tensor([t for answer in rows.response_ids for t in answer], dtype=torch.int64),
        lengths=lengths,
        followers=followers,
    )


def context_cut(lengths: list[int], parts: int, part: int) -> Tensor:
    """Pack indices of the tokens that context-parallel rank `part` of `parts` holds, int64.

    Of every sequence's 2 x `parts` chunks it holds number `part` from the front and from the back, so that
    all ranks have the same share of causal attention: the order that Megatron and Transformer Engine assume.
    """
    indices, begin = [], 0
    for length in lengths:
        chunks = torch.arange(begin, begin + length).view(2 * parts, -1)
        indices.append(chunks[[part, 2 * parts - 1 - part]].flatten())
        begin += length
    return torch.cat(indices)

"""Packs the rows of a micro-batch into one sequence of tokens, without more padding than the layout needs.

`settings/parallel.py` says how much the layout needs. microbatch.py decides which rows a micro-batch has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, zip_longest

import torch
from torch import Tensor

from megatron_gvpo.groups import Routing
from megatron_gvpo.kernels.supports import Supports
from megatron_gvpo.settings.parallel import Padding
from megatron_gvpo.supports import Support
from megatron_gvpo.types import TrainBatch, on_device


@dataclass
class PackedBatch:
    """A pack, or a context-parallel rank's part of it, with token-aligned columns [t] (design law 1).

    The hidden state at `response_r` predicts the token `label_r`, which is number `index_r` in the rows' flat
    response columns. `index_r` ascends, so log-probs are in the order of `rows`, whatever the order of the
    sequences in the pack, which a loss cannot see.
    """

    rows: TrainBatch  # all rows of the pack, also in a context-parallel rank's part
    order: list[int]  # the rows, in the order of their sequences in the pack
    token_t: Tensor  # int64
    position_t: Tensor  # int64, from 0 in every sequence
    response_r: Tensor  # int64 indices into t
    index_r: Tensor  # int64 indices into the rows' token columns
    label_r: Tensor  # int64
    lengths: list[int]  # tokens of all sequences, with padding; padding at the end is a sequence of its own
    # Shared prompts are the first sequences. For each of them, the number of responses that continue it: the
    # next sequences are these responses, in the prompts' order.
    followers: list[int] = field(default_factory=list)
    # The experts of every token, from router replay: int16 [t, layers, experts a token]; -1: router chooses.
    experts_t: Tensor | None = None
    # The supports that the labels `label_r` were sampled from; None: the whole vocabulary for all.
    supports: Supports | None = None

    @staticmethod
    def pack(
        rows: TrainBatch,
        padding: Padding = Padding(1, 1),  # noqa: B008 - frozen
        share_prompts: bool = False,
    ) -> PackedBatch:
        """Pack `rows`, the shortest first; with `share_prompts`, responses to a prompt have one copy of it.

        A conversation's row is as many sequences as it has segments (`TrainBatch.segments`).
        """
        assert rows.routing is None or rows.turns is None, "the experts of conversations cannot be replayed"
        if share_prompts:
            assert padding.sequence == 1, "share_prompts: a shared prompt cannot be cut over context ranks"
            assert rows.routing is None, (
                "share_prompts: responses may route the tokens of a prompt differently"
            )
            assert rows.turns is None, "share_prompts: the turns of a conversation have contexts of their own"
            return _pack_shared(rows, padding)
        tokens: list[int] = []
        response_r = torch.zeros(rows.offsets[-1], dtype=torch.int64)
        lengths: list[int] = []
        # A CPU computes the attention of neighbours of equal length together.
        order = sorted(range(len(rows)), key=rows.tokens.__getitem__)
        for i in order:
            offset = rows.offsets[i]
            for segment in rows.segments(i):
                begin = len(tokens)
                for position, first, count in segment.own:  # the hidden state before a token predicts it
                    predicting_r = torch.arange(begin + position - 1, begin + position - 1 + count)
                    response_r[offset + first : offset + first + count] = predicting_r
                tokens += segment.ids[:-1] or segment.ids  # no label follows the last token
                tokens += [0] * (-(len(tokens) - begin) % padding.sequence)
                lengths.append(len(tokens) - begin)
        pad = -len(tokens) % padding.pack if tokens else padding.pack
        if pad:
            tokens += [0] * pad
            lengths.append(pad)
        return PackedBatch(
            rows=rows,
            order=order,
            token_t=torch.tensor(tokens, dtype=torch.int64),
            position_t=torch.cat([torch.arange(length) for length in lengths]),
            response_r=response_r,
            index_r=torch.arange(rows.offsets[-1]),
            label_r=_labels(rows),
            lengths=lengths,
            experts_t=_experts(None if rows.routing is None else [rows.routing[i] for i in order], lengths),
            supports=_supports(rows),
        )

    @property
    def positions(self) -> int:
        """The number of positions that tokens have: 1 + the largest."""
        begins = [n for n, count in zip(self.lengths, self.followers, strict=False) for _ in range(count)]
        begins = [0] * len(self.followers) + begins
        return max(begin + n for begin, n in zip_longest(begins, self.lengths, fillvalue=0))

    def cut(self, parts: int, part: int) -> PackedBatch:
        """Return the tokens of context-parallel rank `part` of `parts`, in all columns."""
        if parts == 1:
            return self
        rank_t = context_parallel_indices(self.lengths, parts, part)
        local_t = torch.full_like(self.token_t, -1)  # the index within the cut
        local_t[rank_t] = torch.arange(len(rank_t))
        response_r = local_t[self.response_r]
        here_r = response_r >= 0
        return replace(
            self,
            token_t=self.token_t[rank_t],
            position_t=self.position_t[rank_t],
            response_r=response_r[here_r],
            index_r=self.index_r[here_r],
            label_r=self.label_r[here_r],
            experts_t=None if self.experts_t is None else self.experts_t[rank_t],
            supports=None if self.supports is None else self.supports.select(here_r),
        )

    def to(self, device: torch.device) -> PackedBatch:
        return PackedBatch(
            rows=self.rows.to(device),
            order=self.order,
            token_t=on_device(self.token_t, device),
            position_t=on_device(self.position_t, device),
            response_r=on_device(self.response_r, device),
            index_r=on_device(self.index_r, device),
            label_r=on_device(self.label_r, device),
            lengths=self.lengths,
            followers=self.followers,
            experts_t=None if self.experts_t is None else on_device(self.experts_t, device),
            supports=None if self.supports is None else self.supports.on(device),
        )


def _labels(rows: TrainBatch) -> Tensor:
    """Return the tokens that are predicted, int64 [r]: the responses', unless the rows name others."""
    if rows.label_r is not None:
        return rows.label_r.cpu()
    return torch.tensor([t for answer in rows.response_ids for t in answer], dtype=torch.int64)


def _supports(rows: TrainBatch) -> Supports | None:
    """Return `PackedBatch.supports`, in the order of the rows' token columns."""
    if rows.support is None or not any(rows.support):
        return None
    counts, ids = [], []
    for support, response in zip(rows.support, rows.response_ids, strict=True):
        of_row = (support or Support.whole_vocabulary(len(response))).arrays
        counts.append(torch.from_numpy(of_row[0]))
        ids.append(torch.from_numpy(of_row[1]))
    return Supports(torch.cat(ids), torch.cat(counts))


def _experts(routing: Sequence[Routing | None] | None, lengths: list[int]) -> Tensor | None:
    """Return `PackedBatch.experts_t` for sequences of these padded lengths; None if no row has a routing."""
    first = next((row for row in routing or [] if row is not None), None)
    if routing is None or first is None:
        return None
    experts_t = torch.full((sum(lengths), first.layers, first.per_token), -1, dtype=torch.int16)
    begins = [0, *accumulate(lengths)]
    for row, begin in zip(routing, begins, strict=False):  # the padding at the end has no row
        if row is not None:
            chosen_t = _decoded(row)
            experts_t[begin : begin + len(chosen_t)] = chosen_t
    return experts_t


def _decoded(routing: Routing) -> Tensor:
    """Return the experts as integers [tokens - 1, layers, experts a token]."""
    dtype = {1: torch.uint8, 2: torch.int16}[routing.width]
    flat = torch.frombuffer(bytearray(routing.ids), dtype=dtype)
    return flat.view(-1, routing.layers, routing.per_token)


@dataclass
class _Sequence:
    """One sequence of a pack, before the pack is put together."""

    ids: Sequence[int]
    first_position: int
    begin: int = -1  # index of its first token in the pack


# A sequence of a pack, the index in it of the first token that predicts, the index in the rows' token columns
# of the first predicted token, and the number of predicted tokens.
_Prediction = tuple[_Sequence, int, int, int]


def _pack_shared(rows: TrainBatch, padding: Padding) -> PackedBatch:
    """Pack rows that share prompts: each shared prompt once, and the responses behind all of these prompts.

    The prompt's last token predicts the first token of all its responses.
    """
    prompts: list[_Sequence] = []
    responses: list[_Sequence] = []
    others: list[_Sequence] = []  # rows without a shared prompt: prompt and response in one sequence
    followers: list[int] = []
    predicts: list[_Prediction] = []
    order = _by_prompt(rows)
    for prompt, run in groupby(order, key=lambda i: rows.prompt_ids[i]):
        members = list(run)
        inputs = [rows.response_ids[i][:-1] for i in members]  # no label follows the last token
        if len(members) == 1:
            [i] = members
            others.append(_Sequence([*prompt, *inputs[0]], 0))
            predicts.append((others[-1], len(prompt) - 1, rows.offsets[i], len(rows.response_ids[i])))
            continue
        shared = _Sequence(prompt, 0)
        followers += [count] if (count := sum(map(bool, inputs))) else []
        (prompts if count else others).append(shared)
        for i, tokens in zip(members, inputs, strict=True):
            predicts.append((shared, len(prompt) - 1, rows.offsets[i], len(rows.response_ids[i][:1])))
            if tokens:
                responses.append(_Sequence(tokens, len(prompt)))
                predicts.append((responses[-1], 0, rows.offsets[i] + 1, len(tokens)))
    sequences = _joined([*prompts, *responses, *others], padding.pack)
    lengths = [len(sequence.ids) for sequence in sequences]
    return PackedBatch(
        rows=rows,
        order=order,
        token_t=torch.tensor([token for sequence in sequences for token in sequence.ids], dtype=torch.int64),
        position_t=torch.cat(
            [torch.arange(n) + s.first_position for s, n in zip(sequences, lengths, strict=True)]
        ),
        response_r=_predicting_tokens(predicts, rows.offsets[-1]),
        index_r=torch.arange(rows.offsets[-1]),
        label_r=_labels(rows),
        lengths=lengths,
        followers=followers,
        supports=_supports(rows),
    )


def _predicting_tokens(predicts: Sequence[_Prediction], count: int) -> torch.Tensor:
    """Return the index in the pack of the token that predicts each of `count` tokens, int64 [r]."""
    response_r = torch.zeros(count, dtype=torch.int64)
    for sequence, first, offset, length in predicts:
        response_r[offset : offset + length] = torch.arange(length) + sequence.begin + first
    return response_r


def _joined(sequences: list[_Sequence], multiple: int) -> list[_Sequence]:
    """Give the sequences their positions in the pack, and add one of padding up to the `multiple`."""
    total = sum(len(sequence.ids) for sequence in sequences)
    if pad := -total % multiple if total else multiple:
        sequences.append(_Sequence([0] * pad, 0))
    begin = 0
    for sequence in sequences:
        sequence.begin = begin
        begin += len(sequence.ids)
    return sequences


def _by_prompt(rows: TrainBatch) -> list[int]:
    """Return the rows so that those of a group that share a prompt are neighbours, the shortest first."""
    keys: list[tuple[int, int, int]] = []
    last: dict[int, int] = {}  # last row seen of every group
    for i, group in enumerate(rows.group_n.tolist()):
        before = last.get(group)
        shares = before is not None and rows.prompt_ids[before] == rows.prompt_ids[i]
        first = keys[before][1] if before is not None and shares else i
        last[group] = i
        keys.append((len(rows.prompt_ids[i]), first, len(rows.response_ids[i])))
    return sorted(range(len(rows)), key=keys.__getitem__)


def context_parallel_indices(lengths: list[int], parts: int, part: int) -> Tensor:
    """Return the pack indices, int64, of the tokens that context-parallel rank `part` of `parts` holds.

    Every sequence is cut into 2 x `parts` chunks. The rank holds chunk `part` from the front and chunk `part`
    from the back, so that all ranks have equal work in causal attention. Megatron and Transformer Engine
    assume this order.
    """
    indices, begin = [], 0
    for length in lengths:
        chunks = torch.arange(begin, begin + length).view(2 * parts, -1)
        indices.append(chunks[[part, 2 * parts - 1 - part]].flatten())
        begin += length
    return torch.cat(indices)

"""Packs the rows of a micro-batch into one sequence of tokens, without more padding than the layout needs.

`settings/parallel.py` says how much the layout needs. microbatch.py decides which rows a micro-batch has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, zip_longest
from typing import NamedTuple

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
        followers: list[int] = []
        if share_prompts:
            assert padding.sequence == 1, "share_prompts: a shared prompt cannot be cut over context ranks"
            assert rows.routing is None, (
                "share_prompts: responses may route the tokens of a prompt differently"
            )
            assert rows.turns is None, "share_prompts: the turns of a conversation have contexts of their own"
            order = _by_prompt(rows)
            sequences, followers = _shared_sequences(rows, order)
        else:
            # A CPU computes the attention of neighbours of equal length together.
            order = sorted(range(len(rows)), key=rows.tokens.__getitem__)
            sequences = [s for i in order for s in _separate_sequences(rows, i, padding.sequence)]
        tokens = sum(len(sequence.ids) for sequence in sequences)
        if pad := -tokens % padding.pack if tokens else padding.pack:
            sequences.append(_Sequence([0] * pad, []))
        lengths = [len(sequence.ids) for sequence in sequences]
        return PackedBatch(
            rows=rows,
            order=order,
            token_t=torch.tensor([token for s in sequences for token in s.ids], dtype=torch.int64),
            position_t=torch.cat([torch.arange(len(s.ids)) + s.first_position for s in sequences]),
            response_r=_predicting_tokens(sequences, rows.offsets[-1]),
            index_r=torch.arange(rows.offsets[-1]),
            label_r=_labels(rows),
            lengths=lengths,
            followers=followers,
            experts_t=_experts(None if rows.routing is None else [rows.routing[i] for i in order], lengths),
            supports=_supports(rows),
        )

    @property
    def positions(self) -> int:
        """The number of positions that tokens have: 1 + the largest."""
        of_prompts = [0] * len(self.followers)
        prompts = zip(self.lengths, self.followers, strict=False)  # the other sequences come after them
        of_responses = [length for length, count in prompts for _ in range(count)]
        first_positions = zip_longest([*of_prompts, *of_responses], self.lengths, fillvalue=0)
        return max(first + length for first, length in first_positions)

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


class _Prediction(NamedTuple):
    """Neighbouring tokens of a sequence that predict neighbouring response tokens of a row."""

    first: int  # index in the sequence of the first token that predicts
    response: int  # index in the rows' token columns of the first token that is predicted
    length: int


@dataclass
class _Sequence:
    """One sequence of a pack. It lacks a response's last token, which predicts nothing."""

    ids: list[int]
    predictions: list[_Prediction]
    first_position: int = 0


def _separate_sequences(rows: TrainBatch, i: int, multiple: int) -> list[_Sequence]:
    """Return the sequences of row `i` with a prompt of their own, padded to a `multiple` of tokens."""
    sequences = []
    for segment in rows.segments(i):
        ids = segment.ids[:-1] or segment.ids
        padding = [0] * (-len(ids) % multiple)
        predictions = [
            _Prediction(begin - 1, rows.offsets[i] + own, count) for begin, own, count in segment.own
        ]
        sequences.append(_Sequence(ids + padding, predictions))
    return sequences


def _shared_sequences(rows: TrainBatch, order: list[int]) -> tuple[list[_Sequence], list[int]]:
    """Return the sequences of rows that share prompts, and `PackedBatch.followers`.

        prompt A | prompt B | A's responses | B's responses | rows with a prompt of their own

    Neighbours in `order` with the same prompt share it. The prompt's last token predicts the first token of
    every response, and a response's positions continue the prompt's.
    """
    prompts: list[_Sequence] = []
    responses: list[_Sequence] = []
    others: list[_Sequence] = []
    followers: list[int] = []
    for prompt, sharing_rows in groupby(order, key=lambda i: rows.prompt_ids[i]):
        last = len(prompt) - 1
        row_responses = [(rows.offsets[i], rows.response_ids[i]) for i in sharing_rows]
        if len(row_responses) == 1:
            [(offset, response)] = row_responses
            others.append(_Sequence([*prompt, *response[:-1]], [_Prediction(last, offset, len(response))]))
            continue
        shared = _Sequence(
            list(prompt),
            [_Prediction(last, offset, min(len(response), 1)) for offset, response in row_responses],
        )
        continuations = [
            _Sequence(list(response[:-1]), [_Prediction(0, offset + 1, len(response) - 1)], len(prompt))
            for offset, response in row_responses
            if len(response) > 1
        ]
        if continuations:
            prompts.append(shared)
            followers.append(len(continuations))
            responses += continuations
        else:  # all responses have one token, which the prompt predicts
            others.append(shared)
    return [*prompts, *responses, *others], followers


def _predicting_tokens(sequences: list[_Sequence], count: int) -> Tensor:
    """Return the index in the pack of the token that predicts each of `count` response tokens, int64 [r]."""
    response_r = torch.zeros(count, dtype=torch.int64)
    begin = 0  # index in the pack of the sequence's first token
    for sequence in sequences:
        for first, response, length in sequence.predictions:
            response_r[response : response + length] = torch.arange(length) + begin + first
        begin += len(sequence.ids)
    return response_r


def _by_prompt(rows: TrainBatch) -> list[int]:
    """Return the rows so that those of a group that share a prompt are neighbours, the shortest first."""
    sharing: list[int] = []  # for each row, the first row of its group whose prompt it shares
    previous: dict[int, int] = {}  # for each group, its previous row
    for i, group in enumerate(rows.group_n.tolist()):
        before = previous.get(group)
        if before is not None and rows.prompt_ids[before] == rows.prompt_ids[i]:
            sharing.append(sharing[before])
        else:
            sharing.append(i)
        previous[group] = i
    return sorted(
        range(len(rows)), key=lambda i: (len(rows.prompt_ids[i]), sharing[i], len(rows.response_ids[i]))
    )


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

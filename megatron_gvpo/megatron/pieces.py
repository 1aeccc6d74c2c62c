"""Conversations that do not fit into a micro-batch, divided by segment into rows of their own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from megatron_gvpo.turns import Segment, Turn
from megatron_gvpo.types import TrainBatch


@dataclass(frozen=True)
class Pieces:
    """Rows, some of which are divided: a piece is a whole row, or one segment of a row."""

    row_n: list[int]  # the row of every piece
    token_r: Tensor  # int64: of every token of the pieces, its place in the rows' token columns
    segment_n: list[Segment | None]  # None: the whole row

    @staticmethod
    def divide(rows: TrainBatch, max_tokens: int) -> Pieces | None:
        """Divide the rows of several segments and more than `max_tokens` tokens; None if there is none."""
        over = [i for i, tokens in enumerate(rows.tokens) if tokens > max_tokens and rows.turns]
        cut = {i: found for i in over if len(found := rows.segments(i)) > 1}
        if not cut:
            return None
        row_n: list[int] = []
        spans: list[Tensor] = []
        segment_n: list[Segment | None] = []
        for i, (offset, end) in enumerate(zip(rows.offsets[:-1], rows.offsets[1:], strict=True)):
            if i not in cut:
                row_n.append(i)
                segment_n.append(None)
                spans.append(torch.arange(offset, end))
            for segment in cut.get(i, ()):
                row_n.append(i)
                segment_n.append(segment)
                spans += [torch.arange(offset + own, offset + own + n) for _, own, n in segment.own]
        return Pieces(row_n, torch.cat(spans), segment_n)

    def of(self, rows: TrainBatch) -> TrainBatch:
        """The pieces of `rows` as rows, with all columns; a piece has its row's values.

        Sums over a row's tokens are not those of its pieces: a loss is computed on whole rows.
        """
        whole = rows.select(self.row_n)  # a divided row's tokens once for every piece
        token_columns = {
            f.name: column[self.token_r]
            for f in fields(rows)
            if f.name.endswith("_r") and (column := getattr(rows, f.name)) is not None
        }
        prompts, responses, turns = list(whole.prompt_ids), list(whole.response_ids), list(whole.turns or [])
        for n, segment in enumerate(self.segment_n):
            if segment is not None:
                prompts[n], responses[n], turns[n] = _as_row(segment)
        return replace(
            whole, prompt_ids=prompts, response_ids=responses, turns=turns, routing=None, **token_columns
        )


def _as_row(segment: Segment) -> tuple[list[int], list[int], list[Turn]]:
    """(prompt, own tokens, turns) of a row that is this segment alone."""
    prompt, own = segment.ids[: segment.own[0][0]], list[int]()
    turns: list[Turn] = []
    end = len(prompt)
    for place, _, count in segment.own:
        turns.append(Turn(len(own), len(turns) - 1, None, tuple(segment.ids[end:place])))
        end = place + count
        own += segment.ids[place:end]
    return prompt, own, turns

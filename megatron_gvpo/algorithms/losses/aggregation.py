"""The sum of token terms to the loss of an optimizer step; losses are normalised only here.

Every normaliser comes from `BatchTotals`, the sizes of the whole optimizer step, so that the shares of any
split over micro-batches and ranks add up to the same loss (design law 2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import PositiveInt, model_validator

from megatron_gvpo.algorithms.base import Block
from megatron_gvpo.types import BatchTotals, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor

GroupNorm = Literal["k-1", "sum", "k"]


class Aggregation(Block):
    """Coefficient of every response token's term in the step's loss, fp32 [r].

    With N sequences, T response tokens in all and |y_i| in sequence i:

        token_mean      1 / T          every token counts the same
        group_token_mean  1 / (G T_g)  T_g tokens in its group of G: the mean over groups of the groups' mean
                                       over tokens (GPG arXiv 2504.02546 eq. 5, DAPO eq. 8, CISPO eq. 4)
        sequence_mean   1 / (N |y_i|)  every sequence counts the same (GRPO, arXiv 2402.03300 eq. 3)
        sequence_sum    1 / (N C)      C = `constant`, by default the longest response that sampling allows
                                       (Dr. GRPO, arXiv 2503.20783); REINFORCE and RLOO take 1

    N and T count only responses that are trained. With `count_masked`, those count that a shaper such as
    mask_truncated keeps from training, too, as in TRL: the more of them, the smaller the update.
    """

    name: Literal["token_mean", "group_token_mean", "sequence_mean", "sequence_sum"]
    constant: PositiveInt | None = None  # null with sequence_sum: rollout.max_tokens
    count_masked: bool = False  # N and T include responses that are not trained

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.constant is not None and self.name != "sequence_sum":
            raise ValueError(f"constant={self.constant} goes with name=sequence_sum, not {self.name}")
        if self.count_masked and self.name == "group_token_mean":
            raise ValueError(
                "count_masked=true does not go with group_token_mean, which counts what is trained"
            )
        return self

    @property
    def unset_length(self) -> str | None:
        return "constant" if self.name == "sequence_sum" and self.constant is None else None

    def __call__(self, rows: TrainBatch, totals: BatchTotals) -> Tensor:
        sequences, tokens = totals.sequences, totals.tokens
        if self.count_masked:
            sequences, tokens = sequences + totals.left_out[0], tokens + totals.left_out[1]
        match self.name:
            case "token_mean":
                coef_n = rows.reward_n.new_full((len(rows),), 1 / tokens)
            case "group_token_mean":
                assert rows.group_tokens_n is not None, "Policy.update fills in the tokens of whole groups"
                coef_n = 1 / (totals.groups * rows.group_tokens_n.to(rows.reward_n.dtype))
            case "sequence_mean":
                coef_n = 1 / (sequences * rows.length_n.to(rows.reward_n.dtype))
            case "sequence_sum":
                assert self.constant is not None, "the longest response is not known here (Block.sized)"
                coef_n = rows.reward_n.new_full((len(rows),), 1 / (sequences * self.constant))
        return coef_n[rows.seq_r]


def group_coefficients(rows: TrainBatch, totals: BatchTotals, norm: GroupNorm) -> Tensor:
    """Coefficient of every sequence's term in the mean over groups of a group sum, fp32 [n].

    `norm` divides the group sum: "k-1" makes half the sum of squares an unbiased estimate of half the
    population variance at any k (GVPO Listing 1), "k" is its mean, "sum" leaves it as GVPO eq. 8 prints
    it. k is the group's own size, so groups may be ragged and must be whole in `rows`. A group of one
    has nothing to compare: under "k-1" it counts 0.
    """
    index_n, size_g = rows.groups
    match norm:
        case "k-1":
            coef_g = (size_g > 1) / (size_g - 1).clamp(min=1)
        case "k":
            coef_g = 1 / size_g
        case "sum":
            coef_g = size_g.new_ones(len(size_g)) / 1
    return (coef_g / totals.groups)[index_n]

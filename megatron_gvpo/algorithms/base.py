"""What a block of an algorithm is: a frozen set of options that is also the function it configures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator
from torch import Tensor

from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch

Metrics = dict[str, Tensor]
# Of the reward: its name, or its number; 0 is the verifier's by convention.
Component = str | NonNegativeInt


class Block(BaseModel):
    """Options of one block; its fields are the keys a user writes in YAML.

    Where there are several to choose from, `name` says which; `reference: fixed` is short for
    `reference: {name: fixed}`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, values: Any) -> Any:
        return {"name": values} if isinstance(values, str) and "name" in cls.model_fields else values

    @property
    def components_read(self) -> tuple[Component, ...]:
        """The components of the reward that it cannot do without."""
        return ()


class Reference(Block):
    """Another policy that a loss compares with; the trainer keeps it and fills in its log-probs.

    `step_start` is the policy that the step began with, `fixed` the one that the run began with, `ema`
    an exponential moving average of the weights (`ema <- decay * ema + (1 - decay) * weights` after
    every step).
    """

    name: Literal["step_start", "fixed", "ema"] = "step_start"
    decay: float | None = Field(None, gt=0, lt=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if (self.name == "ema") != (self.decay is not None):
            raise ValueError(
                f"decay={self.decay} with name={self.name}: ema needs a decay, the others have none"
            )
        return self


STEP_START = Reference()


class FilledBy(Protocol):
    """An estimator at work."""

    def fill(self, rows: TrainBatch) -> tuple[TrainBatch, Metrics]: ...


class Advantage(Block):
    """Rewards to advantages, of all rows of one optimizer step at once.

    Calling it returns (advantages, metrics): fp32 [n], one a response, or [r], one a token, where
    `per_token`. Rows that are not trained have advantages too, which nobody reads.
    """

    @property
    def per_token(self) -> bool:
        """Whether the tokens of a response have advantages of their own."""
        return False

    @property
    def needs_prior(self) -> bool:
        """Whether it reads `rows.prior_n`."""
        return False

    @property
    def needs_group(self) -> bool:
        """Whether it compares the responses of a prompt with each other."""
        return True

    @property
    def needs_values(self) -> bool:
        """Whether it reads `rows.value_r`, a critic's."""
        return False

    @property
    def anchors(self) -> Mapping[Literal["old", "ref"], Reference]:
        """The policies whose log-probs it reads, as `Loss.anchors`."""
        return {}

    def build(self) -> FilledBy:
        """What fills a run's rows: itself, unless it remembers something from step to step."""
        return self

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        raise NotImplementedError

    def fill(self, rows: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """The rows with their advantages."""
        advantage, metrics = self(rows)
        column = "advantage_r" if self.per_token else "advantage_n"
        return rows.with_columns(**{column: advantage}), metrics


class Loss(Block):
    """A loss as a differentiable function of the current log-probs.

    Calling it returns (share, metrics): this micro-batch's share of the optimizer step's loss (fp32
    scalar) and detached shares of metrics, which add up over micro-batches and ranks like the loss.
    """

    # Bonus on the policy's entropy: the trainer subtracts entropy_coef times its mean over response tokens.
    entropy_coef: float = Field(0.0, ge=0)

    # What weighs the log-probs: `rows.reward_n`, `rows.advantage_n`, or nothing.
    signal: ClassVar[Literal["reward", "advantage", "none"]]
    # The weight of a sequence depends on the other sequences of its group, which therefore must all be
    # among the rows of one call.
    couples_groups: ClassVar[bool] = False
    # Advantages may differ between the tokens of a response.
    token_advantages: ClassVar[bool] = True
    # The weight of a sequence depends on all sequences of the optimizer step.
    couples_step: ClassVar[bool] = False
    # Anchors enter as sums of log-probs and are never exponentiated, so that small errors in them stay small.
    sums_anchors: ClassVar[bool] = False

    @property
    def anchors(self) -> Mapping[Literal["old", "ref"], Reference]:
        """The policies that it compares with, by the column of log-probs that each must fill."""
        return {}

    @property
    def linear(self) -> bool:
        """dL/dlogp depends on no policy's log-probs: the weights are known before any forward."""
        return False

    @property
    def known_at_step_start(self) -> bool:
        """On the first mini-batch of a step the weights are known before the forward.

        There every `step_start` anchor equals the current policy, so a loss that sees log-probs only
        as differences from such anchors may be given zeros for all of them.
        """
        return self.linear

    @property
    def wants_entropy(self) -> bool:
        """Whether the head must compute entropies (it costs time)."""
        return self.entropy_coef > 0

    def sized(self, max_tokens: int) -> Self:
        """For responses of at most `max_tokens` tokens, which an aggregation may divide by."""
        aggregation = getattr(self, "aggregation", None)
        if aggregation is None:
            return self
        return self.model_copy(update={"aggregation": aggregation.sized(max_tokens)})

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        raise NotImplementedError


def token_weights(
    loss: Loss, rows: TrainBatch, logp_r: Tensor, totals: BatchTotals
) -> tuple[Tensor, Metrics]:
    """Weights w = dL/dlogp at `logp_r`, fp32 [r], and the loss and metrics there.

    This is what lets a group be split over micro-batches or ranks: with w fixed, the surrogate
    sum(w * logp) has the same gradient as the loss, whatever the packing (design law 2).
    """
    logp_r = logp_r.detach().clone().requires_grad_()
    with torch.enable_grad():
        share, metrics = loss(LossInputs(rows, logp_r, totals))
        (weight_r,) = torch.autograd.grad(share, logp_r)
    return weight_r, {"loss": share.detach(), **metrics}

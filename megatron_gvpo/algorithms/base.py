"""What a block of an algorithm is: a frozen set of options that is also the function it configures."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from megatron_gvpo.types import LossInputs, Rows, Totals

Metrics = dict[str, Tensor]


class Block(BaseModel):
    """Options of one block; its fields are the keys a user writes in YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Loss(Block):
    """A loss as a differentiable function of the current log-probs.

    Calling it returns (share, metrics): this micro-batch's share of the optimizer step's loss (fp32
    scalar) and detached shares of metrics, which add up over micro-batches and ranks like the loss.
    """

    # Log-probs of other policies that it compares with. "old": the policy at step start; "ref": the
    # method's reference. A loss must depend on them only through logp - old and logp - ref.
    anchors: ClassVar[frozenset[str]] = frozenset()
    # The weight of a sequence depends on the other sequences of its group.
    couples_groups: ClassVar[bool] = False
    # dL/dlogp does not depend on logp.
    linear: ClassVar[bool] = False

    @property
    def wants_entropy(self) -> bool:
        """Whether `inputs.entropy_r` must be filled (it costs time)."""
        return False

    @property
    def reference(self) -> Literal["step_start", "fixed", "ema"]:
        """Which policy fills `rows.ref_logp_r`, where "ref" is among the anchors."""
        return "step_start"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        raise NotImplementedError


def token_weights(loss: Loss, rows: Rows, logp_r: Tensor, totals: Totals) -> tuple[Tensor, Metrics]:
    """Weights w = dL/dlogp at `logp_r`, fp32 [r], and the loss and metrics there.

    This is what lets a group be split over micro-batches or ranks: with w fixed, the surrogate
    sum(w * logp) has the same gradient as the loss, whatever the packing (design law 2).
    """
    logp_r = logp_r.detach().clone().requires_grad_()
    with torch.enable_grad():
        share, metrics = loss(LossInputs(rows, logp_r, totals))
        (weight_r,) = torch.autograd.grad(share, logp_r)
    return weight_r, {"loss": share.detach(), **metrics}



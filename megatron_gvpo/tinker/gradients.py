"""Log-probs, losses and gradients of a request's sequences on the ranks of the Megatron model.

Every rank calls these functions with the same request, and gets the same results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_gvpo.kernels.linear_logprob import LinearLogprob
from megatron_gvpo.megatron import forward
from megatron_gvpo.megatron.forward import LogprobHead
from megatron_gvpo.megatron.microbatch import my_share, sum_over_ranks
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.scorer import score
from megatron_gvpo.tinker.losses import GROUP, TARGETS, RequestedLoss
from megatron_gvpo.tinker.wire import Datum
from megatron_gvpo.types import TrainBatch

# The temperature of the API's log-probs of tokens that the client gives (forward, forward_backward,
# prompt_logprobs). Those of samples are at their own temperature, as on Tinker's service (tinker-cookbook,
# pull request 86).
TEMPERATURE = 1.0


class LossResult(NamedTuple):
    """Log-probs of all targets, fp32 [r] on the CPU, and the value of the loss."""

    logp_r: Tensor
    loss: float


class _PackLoss(NamedTuple):
    """A micro-batch's log-probs and its share of the loss."""

    logp_r: Tensor
    loss: float


def rows_of(data: list[Datum]) -> TrainBatch:
    """The sequences as rows: every position predicts its target, whatever token comes next in the input."""
    targets = [datum.inputs[TARGETS].tolist() for datum in data]
    groups = [int(datum.inputs[GROUP][0]) if GROUP in datum.inputs else i for i, datum in enumerate(data)]
    return TrainBatch(
        prompt_ids=[datum.tokens[:1] for datum in data],
        # The token behind the last position is never read.
        response_ids=[[*datum.tokens[1:], ids[-1]] for datum, ids in zip(data, targets, strict=True)],
        label_r=torch.tensor([token for ids in targets for token in ids], dtype=torch.int64),
        group_n=torch.tensor(groups, dtype=torch.int64),
        reward_n=torch.zeros(len(data)),
        truncated_n=torch.zeros(len(data), dtype=torch.bool),
        place_n=torch.arange(len(data)),
    )


def evaluate(model: Model, loss: RequestedLoss, max_tokens: int) -> LossResult:
    """Compute log-probs and the loss, without a gradient."""
    logp_r = score(model, rows_of(list(loss.data)), max_tokens, TEMPERATURE)
    return LossResult(logp_r, float(loss(logp_r)))


def differentiate(model: Model, loss: RequestedLoss, max_tokens: int, stash_bytes: int) -> LossResult:
    """Compute log-probs and the loss, and add its gradient to Megatron's buffers, which are empty before.

    This takes one pass: the weights dL/dlogp are known before it (cross-entropy), or each micro-batch
    computes its own. If a group that a loss couples does not fit into a micro-batch, a scoring pass comes
    first.
    """
    rows = rows_of(list(loss.data))
    share = my_share(model, rows, max_tokens, loss.couples_groups)
    weight_r = loss.known_weights()
    if weight_r is None and loss.couples_groups and share.split_groups:
        weight_r, _ = loss.weights(score(model, rows, max_tokens, TEMPERATURE))
    packs = share.packs(rows.with_columns(weight_r=weight_r))

    def differentiated(pack: TrainBatch, values: tuple[Any, ...]) -> tuple[Tensor, _PackLoss]:
        output = LinearLogprob(*values)
        logp_r = output.logp_r.detach()
        if output.surrogate is not None:
            return output.surrogate, _PackLoss(logp_r, 0.0)
        if pack.weight_r is not None:
            return (pack.weight_r * output.logp_r).sum(), _PackLoss(logp_r, 0.0)
        assert pack.place_n is not None
        own_weight_r, value = loss.weights(logp_r, pack.place_n.tolist())
        return (own_weight_r * output.logp_r).sum(), _PackLoss(logp_r, float(value))

    head = LogprobHead(TEMPERATURE, model.vocab_size, stash_bytes=stash_bytes)
    parts = forward.run(model, packs, differentiated, head=head)
    logp_r = share.gather(rows, [part.logp_r for part in parts])
    if weight_r is not None:
        return LossResult(logp_r, float(loss(logp_r)))
    return LossResult(logp_r, sum_over_ranks([{"loss": part.loss} for part in parts]).get("loss", 0.0))

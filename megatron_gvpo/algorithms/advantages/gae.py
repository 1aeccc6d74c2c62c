"""PPO's token advantages and the loss of its critic (arXiv 1707.06347; GAE: arXiv 1506.02438)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from megatron_gvpo.algorithms.base import (
    STEP_START,
    Advantage,
    Block,
    Metrics,
    Reference,
    References,
    only_with,
)
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import BatchTotals, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class GAE(Advantage):
    """A_t = sum_{l >= 0} (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t); fp32 [r].

    (arXiv 1506.02438, eq. 16.) s_t is prompt and response before token t, and V of the end of a response is
    0, of a truncated one too. r_t is the response's reward for the last token and 0 for the others, minus
    kl_coef log(pi(y_t) / pi_ref(y_t)) of every token under the policy at step start (arXiv 2203.02155). The
    critic's targets are V(s_t) + A_t, before `whiten`: (A - mean) / (std + eps) over the tokens that the
    optimizer step trains.

    In a conversation t counts the policy's own tokens: the step after a turn's last token is the next turn's
    first, whose s_t includes the environment's messages, and gamma and lambda do not discount these. A turn's
    last token has the reward that the environment paid for it (the component `environment`, times its
    weight), the conversation's last token the rest of the reward.

    values  critic  the critic's (`algorithm.critic`), before the step's updates
            zero    none: with gamma and lam 1 the return, as in REINFORCE++ (arXiv 2501.03262)
    """

    per_token: ClassVar[bool] = True
    needs_group: ClassVar[bool] = False

    name: Literal["gae"] = "gae"
    values: Literal["critic", "zero"] = "critic"
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    kl_coef: float = Field(0.0, ge=0)
    reference: Reference = Reference(name="fixed")
    whiten: Literal["none", "token"] = "token"
    eps: float = Field(1e-8, ge=0)

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(
            reference=(self.kl_coef > 0, "kl_coef above 0"), eps=(self.whiten != "none", "whiten=token")
        )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kl_coef and self.reference == STEP_START:
            raise ValueError(
                f"kl_coef={self.kl_coef:g} has no effect with reference=step_start: the advantages are those "
                "of this policy, and its log-ratio to itself is 0; use fixed, ema or teacher"
            )
        return self

    @property
    def needs_values(self) -> bool:
        return self.values == "critic"

    @property
    def reference_policies(self) -> References:
        return {"old": STEP_START, "ref": self.reference} if self.kl_coef else {}

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        advantage_r, _, metrics = self._advantages(rows)
        return self._whitened(rows, advantage_r).float(), metrics

    def fill(self, rows: TrainBatch) -> tuple[TrainBatch, Metrics]:
        advantage_r, value_r, metrics = self._advantages(rows)
        filled = rows.with_columns(
            advantage_r=self._whitened(rows, advantage_r).float(),
            return_r=(value_r + advantage_r).float() if self.needs_values else None,
        )
        return filled, metrics

    def _advantages(self, rows: TrainBatch) -> tuple[Tensor, Tensor, Metrics]:
        """Return the advantages by their definition, the values and the metrics, fp64 [r]."""
        reward_r = torch.zeros(len(rows.seq_r), dtype=torch.float64)
        value_r, metrics = torch.zeros_like(reward_r), {}
        if self.kl_coef:
            assert rows.old_logp_r is not None and rows.ref_logp_r is not None, (
                "see Advantage.reference_policies"
            )
            log_ratio_r = rows.old_logp_r.double() - rows.ref_logp_r.double()
            reward_r -= self.kl_coef * log_ratio_r
            metrics["kl_in_reward"] = log_ratio_r.mean()
        if self.needs_values:
            assert rows.value_r is not None, "the critic's values are missing (Advantage.needs_values)"
            value_r = rows.value_r.double()
        some_n = rows.length_n > 0
        left_n = rows.reward_n.double()
        if rows.turn_reward_r is not None:
            reward_r += rows.turn_reward_r.double()
            left_n = left_n - rows.sequence_sum(rows.turn_reward_r.double())
        reward_r[torch.tensor(rows.offsets[1:])[some_n] - 1] += left_n[some_n]
        advantage_r = gae(reward_r, value_r, rows.length_n.tolist(), self.gamma, self.lam)
        if self.needs_values:
            return_r = value_r + advantage_r
            unexplained = (return_r - value_r).var(correction=0) / return_r.var(correction=0)
            metrics["explained_variance"] = torch.nan_to_num(1 - unexplained, nan=0.0, neginf=0.0)
        return advantage_r, value_r, metrics

    def _whitened(self, rows: TrainBatch, advantage_r: Tensor) -> Tensor:
        of_r = advantage_r if rows.trained_n is None else advantage_r[rows.trained_n[rows.seq_r]]
        if self.whiten == "none" or len(of_r) < 2:
            return advantage_r
        return (advantage_r - of_r.mean()) / (of_r.std() + self.eps)


def gae(reward_r: Tensor, value_r: Tensor, lengths: Sequence[int], gamma: float, lam: float) -> Tensor:
    """Advantages [r] of responses of these `lengths`, whose tokens follow each other in the columns."""
    last_n = torch.tensor([0, *lengths]).cumsum(0)[1:][torch.tensor(lengths) > 0] - 1
    next_value_r = value_r.roll(-1)
    next_value_r[last_n] = 0.0
    delta_r = reward_r + gamma * next_value_r - value_r
    sum_nt = torch.nn.utils.rnn.pad_sequence(list(delta_r.split(list(lengths))), batch_first=True)
    for t in range(sum_nt.shape[1] - 2, -1, -1):
        sum_nt[:, t] += gamma * lam * sum_nt[:, t + 1]
    inside_nt = torch.arange(sum_nt.shape[1]) < torch.tensor(lengths)[:, None]
    return sum_nt[inside_nt]


class CriticOptions(Block):
    """A second model of the policy's architecture, with a scalar head, that learns the returns.

    Starts as `path` (null: model.path) with a head of zeros, and is updated once a mini-batch, like the
    policy and in its layout, by its own optimizer, whose settings are the policy's but for `lr` and
    `warmup_steps`. Its loss is half the mean over response tokens of

        max( (V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2 ),

    where V_old is its value before the step's updates (PPO's public code; InstructGPT, arXiv 2203.02155).
    clip: null leaves (V - R)^2. It needs as much memory and compute as the policy; rollouts do not need it.
    """

    path: str | None = None
    lr: float = Field(1e-5, gt=0)
    warmup_steps: NonNegativeInt = 0  # in optimizer updates
    clip: float | None = Field(0.2, gt=0)

    @property
    def only_after_updates(self) -> tuple[str, ...]:
        return ("clip",)

    def loss(self, rows: TrainBatch, value_r: Tensor, totals: BatchTotals) -> tuple[Tensor, Metrics]:
        """The share of these rows in the loss of the optimizer step, and shares of metrics."""
        assert rows.return_r is not None and rows.value_r is not None, "the estimator gives returns"
        error_r = (value_r - rows.return_r) ** 2
        clipped = torch.zeros((), device=value_r.device)
        if self.clip is not None:
            near_r = rows.value_r + (value_r - rows.value_r).clamp(-self.clip, self.clip)
            clipped_r = (near_r - rows.return_r) ** 2
            clipped = (clipped_r > error_r).sum() / totals.tokens
            error_r = error_r.maximum(clipped_r)
        share = 0.5 * error_r.sum() / totals.tokens
        return share, {
            "value_loss": share.detach(),
            "value_clip_fraction": clipped,
            "value": value_r.detach().sum() / totals.tokens,
        }

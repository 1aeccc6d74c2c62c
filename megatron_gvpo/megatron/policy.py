"""The policy as the trainer sees it: score rows, take an optimizer update, export weights.

Every rank calls every method with the same rows; the work is shared inside.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megatron_gvpo.algorithms.base import STEP_START, Loss, token_weights
from megatron_gvpo.config.schema import Config, ConfigError
from megatron_gvpo.kernels.linear_logprob import LinearLogprob
from megatron_gvpo.megatron import forward
from megatron_gvpo.megatron.critic import Critic
from megatron_gvpo.megatron.device_memory import Memory
from megatron_gvpo.megatron.forward import LogprobHead
from megatron_gvpo.megatron.memory_profile import MemoryProfile
from megatron_gvpo.megatron.microbatch import detached, floats, gather, my_micro_batches, sum_over_ranks
from megatron_gvpo.megatron.model.build import Model
from megatron_gvpo.megatron.optimizer import Optimizer, Update
from megatron_gvpo.megatron.reference_weights import ReferenceWeights
from megatron_gvpo.megatron.scorer import Scorer
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch


@dataclass(frozen=True)
class UpdateResult:
    """An optimizer update and the loss and metrics it was taken on."""

    update: Update
    metrics: dict[str, float]  # "loss" among them
    logp_r: Tensor | None  # before the update, fp32 [r] on the CPU of every rank; where it was asked for
    head: dict[str, float]  # how the output layer came by its gradient, which depends on the machine
    memory: dict[str, float] = field(default_factory=dict)  # of a run's first update: see Footprint.metrics


class Policy(Scorer):
    """A Megatron model, its optimizer and, where the method wants them, reference weights and a critic."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, trained=True)
        if config.train.share_prompts and not self.model.local:
            raise ConfigError(
                "train.share_prompts=true: on a GPU, Transformer Engine's attention over packs has no way to "
                "attend to two sequences at once, nor returns the softmax statistics to merge two calls by; "
                "leave it out"
            )
        self.model.share_prompts = config.train.share_prompts
        self.model.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = Optimizer(self.model, config.optimizer, config.model, config.train.updates)
        options = config.algorithm.critic
        self.critic = None if options is None else Critic(config, options)
        critics = [] if self.critic is None else [(self.critic.model, self.critic.optimizer)]
        self._trained = [(self.model, self.optimizer), *critics]
        self.memory = Memory(*self._trained)
        self._loss: Loss = config.algorithm.loss.sized(config.rollout.max_tokens)
        self._stash_bytes = config.train.head_stash_mb << 20
        self._measured = False
        self._aside: dist.ProcessGroup | None = None
        other = next((r for r in config.algorithm.reference_policies if r != STEP_START), None)
        self.shadow = None if other is None else ReferenceWeights(self.model, other.decay)

    def score_reference(self, rows: TrainBatch) -> Tensor:
        """`score` under the weights of the method's fixed or moving reference, whose routers choose."""
        assert self.shadow is not None, "the method has no reference of its own"
        with self.shadow.lent():
            return self.score(rows.with_columns(routing=None))

    def update(self, rows: TrainBatch, *, at_step_start: bool, keep_logp: bool = False) -> UpdateResult:
        """One optimizer update on `rows`, which hold whole groups.

        `at_step_start`: no update has been taken since the step began, so that a reference at step start is
        the present policy; the batch's columns of such references need not be filled. `keep_logp`: return the
        log-probs that the update's own forward found.
        """
        loss, totals = self._loss, BatchTotals.of(rows)
        mine, some_split = my_micro_batches(self.model, rows, self._budget, loss.couples_groups)
        split = (some_split and loss.couples_groups) or loss.couples_step
        rows = self._known_weights(rows, totals, at_step_start, split)

        def share(rows: TrainBatch, values: tuple[Any, ...]) -> tuple[Tensor, Any]:
            output = LinearLogprob(*values)
            logp_r = output.logp_r.detach()
            besides = _head_metrics(rows, output, totals)
            bonus = output.logp_r.new_zeros(())
            if output.entropy_r is not None:
                mean = output.entropy_r.sum() / totals.tokens
                bonus, besides["entropy"] = -loss.entropy_coef * mean, mean
            if split:
                surrogate = output.surrogate
                if surrogate is None:  # the head, which then differentiates entropies, had no weights
                    assert rows.weight_r is not None, "a split group needs its weights before the forward"
                    surrogate = (rows.weight_r * output.logp_r).sum()
                return surrogate + bonus, (logp_r, detached(besides))
            value, metrics = loss(LossInputs(_with_references(rows, logp_r), output.logp_r, totals))
            trained = value if output.surrogate is None else output.surrogate
            return trained + bonus, (logp_r, detached({"loss": value + bonus, **metrics} | besides))

        self.optimizer.zero_grad()
        footprint = self._first_footprint()
        head = LogprobHead(
            self._temperature, self.model.vocab_size, loss.wants_entropy, self._stash_bytes, footprint
        )
        with footprint or contextlib.nullcontext():
            packs = [rows.select(index) for index in mine]
            results = forward.run(self.model, packs, share, head=head)
        logp_r = gather(rows, mine, [found for found, _ in results]) if split or keep_logp else None
        if split:  # the loss and its metrics, too, are defined on whole groups only
            assert logp_r is not None
            value, shares = loss(LossInputs(_with_references(rows, logp_r), logp_r, totals))
            besides = sum_over_ranks([floats(share) for _, share in results])
            metrics = floats({"loss": value, **shares}) | besides
            if loss.wants_entropy:
                metrics["loss"] -= loss.entropy_coef * metrics["entropy"]
        else:
            metrics = sum_over_ranks([floats(share) for _, share in results])
        memory = {} if footprint is None else footprint.metrics()
        of_head = {name: metrics.pop(name) for name in list(metrics) if name.startswith("head/")}
        self.model.about_to_change()
        return UpdateResult(self.optimizer.apply(), metrics, logp_r, of_head, memory)

    def _first_footprint(self) -> MemoryProfile | None:
        """To measure a run's first update with; None afterwards."""
        first = not self._measured and self.optimizer.steps == 0
        self._measured = True
        return MemoryProfile(*self._trained) if first else None

    def _known_weights(
        self, rows: TrainBatch, totals: BatchTotals, at_step_start: bool, split: bool
    ) -> TrainBatch:
        """Fill `weight_r` where dL/dlogp can be had before the forward: the head then needs one pass less.

        Where a coupled group is `split` over micro-batches there is no other way, and a scoring pass at
        the present weights finds them.
        """
        loss = self._loss
        others = rows.old_logp_r is not None or rows.ref_logp_r is not None  # than the present policy
        if loss.linear or (at_step_start and loss.known_at_step_start and not others):
            # Only differences from references enter, and these are 0: zeros serve for all log-probs.
            logp_r = torch.zeros(int(rows.length_n.sum()))
        elif split:
            logp_r = self.score(rows)
        else:
            return rows
        weight_r, _ = token_weights(loss, _with_references(rows, logp_r), logp_r, totals)
        return rows.with_columns(weight_r=weight_r)

    def end_step(self) -> None:
        """Move a reference that follows the policy."""
        if self.shadow is not None:
            self.shadow.follow()

    def group_aside(self) -> dist.ProcessGroup:
        """All ranks, in a group for what goes on beside training. A collective."""
        if self._aside is None:
            self._aside = dist.new_group(backend="gloo")
        return self._aside

    @property
    def models(self) -> list[Model]:
        """The policy's, and the critic's where there is one."""
        return [self.model] if self.critic is None else [self.model, self.critic.model]


def _with_references(rows: TrainBatch, logp_r: Tensor) -> TrainBatch:
    """Rows whose missing old and reference log-probs are the present ones."""
    old = logp_r if rows.old_logp_r is None else rows.old_logp_r
    reference = old if rows.ref_logp_r is None else rows.ref_logp_r
    return rows.with_columns(old_logp_r=old, ref_logp_r=reference)


def _head_metrics(rows: TrainBatch, output: LinearLogprob, totals: BatchTotals) -> dict[str, Tensor | float]:
    """A micro-batch's part in how the output layer came by its gradient: shares of the tokens, and their mean
    of what a rank kept for them."""
    share = rows.offsets[-1] / totals.tokens
    return {
        "head/known": share * (output.mode == "weights_first"),
        "head/stash": share * output.stash_share,
        "head/stash_mb": share * output.stash_bytes / 2**20,
    }

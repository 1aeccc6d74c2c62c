"""The policy: it scores rows, takes optimizer updates and exports weights.

Every rank calls every method with the same rows. The methods divide the work among the ranks.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.algorithms.base import TEACHER, Loss, token_weights
from megatron_gvpo.core.collectives import first_problem
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.kernels.divergence import Divergence
from megatron_gvpo.kernels.linear_logprob import LinearLogprob
from megatron_gvpo.megatron import forward
from megatron_gvpo.megatron.critic import Critic
from megatron_gvpo.megatron.device_memory import DeviceMemory
from megatron_gvpo.megatron.forward import LogprobHead
from megatron_gvpo.megatron.memory_profile import MemoryProfile
from megatron_gvpo.megatron.microbatch import detached, floats, my_share, sum_over_ranks
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.optimizer import Optimizer, Update
from megatron_gvpo.megatron.reference_weights import ReferenceWeights
from megatron_gvpo.megatron.scorer import Scorer
from megatron_gvpo.megatron.teacher import Teacher, teacher_states
from megatron_gvpo.megatron.teacher_head import HeadDivergence
from megatron_gvpo.settings.config import Config
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch


@dataclass(frozen=True)
class UpdateResult:
    """An optimizer update, and the loss and metrics before it."""

    update: Update
    metrics: dict[str, float]  # includes "loss"
    logp_r: Tensor | None  # before the update, fp32 [r] on the CPU of every rank; None unless asked for
    head: dict[str, float]  # how the head computed its gradient; depends on the machine
    memory: dict[str, float] = field(default_factory=dict)  # MemoryProfile.metrics of a run's first update
    weight_r: Tensor | None = None  # dL/dlogp at `logp_r`, fp32 [r] on the CPU; None unless asked for


class Policy(Scorer):
    """A Megatron model, its optimizer and, if the method needs them, reference weights and a critic."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, trained=True)
        self.optimizer = Optimizer(self.model, config.optimizer, config.model, config.train.updates)
        options = config.algorithm.critic
        self.critic = None if options is None else Critic(config, options)
        critics = [] if self.critic is None else [(self.critic.model, self.critic.optimizer)]
        self._trained = [(self.model, self.optimizer), *critics]
        self.memory = DeviceMemory(*self._trained)
        self._loss: Loss = config.algorithm.loss.sized(config.rollout.max_tokens)
        self._stash_bytes = config.train.head_stash_bytes
        self._measured = False
        self._background_group: dist.ProcessGroup | None = None
        self._patience = timedelta(seconds=config.parallel.timeout_seconds)
        other = config.algorithm.kept_reference
        # New adapters are switched off to give the fixed reference, the base: it needs no second weights.
        new_adapters = config.model.adapter is not None and config.model.adapter.path is None
        self._base_is_reference = other is not None and other.decay is None and new_adapters
        self.reference = None
        if other is not None and not self._base_is_reference:
            self.reference = ReferenceWeights(self.model, other.decay)
        held = config.teacher is not None and config.teacher.server is None
        self.teacher = Teacher(config) if held else None

    @property
    def kept_reference(self) -> Literal["none", "base", "fixed", "average"]:
        """The kept reference weights of the method; "base": those of the model, which new adapters leave."""
        if self._base_is_reference:
            return "base"
        if self.reference is None:
            return "none"
        return "average" if self.reference.moves else "fixed"

    def score_reference(self, rows: TrainBatch) -> Tensor:
        """`score` under the weights of the method's fixed or moving reference."""
        with self._reference_in_place():
            return self.score(rows.with_columns(routing=None))  # the reference's own routers choose experts

    def score_teacher(self, rows: TrainBatch) -> Tensor:
        """`score` by the teacher that the trainer holds."""
        assert self.teacher is not None, "the trainer holds no teacher"
        return self.teacher.score(rows)

    def _reference_in_place(self) -> contextlib.AbstractContextManager[None]:
        if self._base_is_reference:
            assert self.model.adapters is not None
            return self.model.adapters.off()
        assert self.reference is not None, "the method has no reference weights"
        return self.reference.swapped_in()

    def update(
        self, rows: TrainBatch, *, at_step_start: bool, keep_logp: bool = False, keep_weights: bool = False
    ) -> UpdateResult:
        """Take one optimizer update on `rows`, which hold whole groups.

        `at_step_start`: there was no update since the step began. So the policy at the step's start is the
        present policy, and the rows' columns of its log-probs may be missing. `keep_logp`: return the
        log-probs of the update's own forward. `keep_weights`: return these and the loss's gradient by them.
        Raises UserFunctionError on all ranks, with the weights as they were, where the user's loss fails on
        any.
        """
        loss, totals, kept = self._loss, BatchTotals.of(rows), keep_logp or keep_weights
        share = my_share(self.model, rows, self._budget, loss.couples_groups)
        split = (share.split_groups and loss.couples_groups) or share.split_rows or loss.couples_step
        rows = self._with_weights_first(rows, totals, at_step_start, split)

        def micro_batch_loss(rows: TrainBatch, values: tuple[Any, ...]) -> tuple[Tensor, Any]:
            output = LinearLogprob(*values)
            logp_r = output.logp_r.detach()
            extra = _head_metrics(rows, output, totals)
            bonus = output.logp_r.new_zeros(())
            if output.entropy_r is not None:
                mean = output.entropy_r.sum() / totals.tokens
                bonus, extra["entropy"] = -loss.entropy_coef * mean, mean
            if output.divergence is not None and output.divergence_r is not None:
                bonus = bonus + output.divergence
                extra["divergence"] = output.divergence_r.sum() / totals.tokens
            if split:
                surrogate = output.surrogate
                if surrogate is None:  # with an entropy bonus the head gets no weights
                    assert rows.weight_r is not None, "a split group needs its weights before the forward"
                    surrogate = (rows.weight_r * output.logp_r).sum()
                return surrogate + bonus, (logp_r, None, detached(extra))
            filled, surrogate = _with_references(rows, logp_r), output.surrogate
            weight_r: Tensor | None = None
            try:
                if surrogate is None:  # one call of the loss gives its value and the weights, which are saved
                    weight_r, metrics = token_weights(loss, filled, logp_r, totals)
                    surrogate = (weight_r * output.logp_r).sum()
                else:
                    value, metrics = loss(LossInputs(filled, output.logp_r, totals))
                    metrics = {"loss": value, **metrics}
            except UserFunctionError as error:  # raised below: the other ranks are in the same schedule
                problems.append(str(error))
                surrogate = 0 * output.logp_r.sum()
                metrics = {"loss": surrogate}
            return surrogate + bonus, (logp_r, weight_r, detached(metrics | extra))

        problems: list[str] = []  # of the user's loss
        packs, divergence = self._with_teacher(share.packs(rows), totals)
        self.optimizer.zero_grad()
        memory_profile = self._first_update_profile()
        head = LogprobHead(
            self._temperature,
            self.model.vocab_size,
            loss.wants_entropy,
            self._stash_bytes,
            memory_profile,
            divergence,
        )
        with memory_profile or contextlib.nullcontext():
            results = forward.run(self.model, packs, micro_batch_loss, head=head)
        if (said := first_problem(problems[0] if problems else None)) is not None:
            raise UserFunctionError(said)
        logp_r = share.gather(rows, [logp for logp, _, _ in results]) if split or kept else None
        summed = sum_over_ranks([floats(metrics) for *_, metrics in results])
        if split:  # the loss and its metrics are defined on whole groups only
            assert logp_r is not None
            value, of_loss = loss(LossInputs(_with_references(rows, logp_r), logp_r, totals))
            metrics = floats({"loss": value, **of_loss}) | summed
        else:
            metrics = summed
        if loss.wants_entropy:
            metrics["loss"] -= loss.entropy_coef * metrics["entropy"]
        if loss.divergence is not None:
            metrics["loss"] += loss.divergence.coef * metrics["divergence"]
        metrics |= loss.derived(metrics)
        memory = {} if memory_profile is None else memory_profile.metrics()
        of_head = {name: metrics.pop(name) for name in list(metrics) if name.startswith("head/")}
        weight_r = rows.weight_r
        if keep_weights and weight_r is None:
            weight_r = share.gather(rows, [weight for _, weight, _ in results])
        self.model.finish_background_work()
        return UpdateResult(self.optimizer.apply(), metrics, logp_r, of_head, memory, weight_r)

    def _with_teacher(
        self, packs: list[TrainBatch], totals: BatchTotals
    ) -> tuple[list[TrainBatch], HeadDivergence | None]:
        """Return the micro-batches with a teacher's hidden states, and the head's part of the loss."""
        options = self._loss.divergence
        if options is None:
            return packs, None
        if options.reference == TEACHER:
            assert self.teacher is not None, "the trainer holds no teacher"
            states = self.teacher.states(packs)
        else:
            with self._reference_in_place():
                states = teacher_states(self.model, [pack.with_columns(routing=None) for pack in packs])
        if states.output is None:  # not the last pipeline stage
            return packs, None
        beta = 0.5 if options.beta is None else options.beta
        divergence = Divergence(options.name, beta, options.top_k)
        weight, alone = options.coef / totals.tokens, not self._loss.has_terms
        return states.beside(packs), HeadDivergence(divergence, weight, states.output, alone)

    def _first_update_profile(self) -> MemoryProfile | None:
        """Return a profile for a run's first update, then None."""
        first = not self._measured and self.optimizer.steps == 0
        self._measured = True
        return MemoryProfile(*self._trained) if first else None

    def _with_weights_first(
        self, rows: TrainBatch, totals: BatchTotals, at_step_start: bool, split: bool
    ) -> TrainBatch:
        """Fill `weight_r` = dL/dlogp if it is known before the forward: the head then needs one pass less.

        If a coupled group or a row is `split` over micro-batches, the weights must be known first: a scoring
        pass at the present weights computes them.
        """
        loss = self._loss
        other_policies = rows.old_logp_r is not None or rows.ref_logp_r is not None
        if loss.linear or (at_step_start and loss.known_at_step_start and not other_policies):
            # Only differences between policies' log-probs enter, and all are 0: zeros serve as log-probs.
            logp_r = torch.zeros(int(rows.length_n.sum()))
        elif split:
            logp_r = self.score(rows)
        else:
            return rows
        weight_r, _ = token_weights(loss, _with_references(rows, logp_r), logp_r, totals)
        return rows.with_columns(weight_r=weight_r)

    def skip_updates(self, count: int) -> None:
        """Advance the learning rates past updates that have nothing to train."""
        for _, optimizer in self._trained:
            optimizer.scheduler.step(count)

    def end_step(self) -> None:
        """Update a moving reference."""
        if self.reference is not None:
            self.reference.update_average()

    def background_group(self) -> dist.ProcessGroup:
        """Return a group of all ranks for communication in the background of training. A collective."""
        if self._background_group is None:
            self._background_group = dist.new_group(backend="gloo", timeout=self._patience)
        return self._background_group

    @property
    def models(self) -> list[Model]:
        """The policy's model, and the critic's if there is one."""
        return [self.model] if self.critic is None else [self.model, self.critic.model]


def _with_references(rows: TrainBatch, logp_r: Tensor) -> TrainBatch:
    """Fill missing old and reference log-probs with the present policy's."""
    old = logp_r if rows.old_logp_r is None else rows.old_logp_r
    reference = old if rows.ref_logp_r is None else rows.ref_logp_r
    return rows.with_columns(old_logp_r=old, ref_logp_r=reference)


def _head_metrics(rows: TrainBatch, output: LinearLogprob, totals: BatchTotals) -> dict[str, Tensor | float]:
    """Return a micro-batch's part of the metrics head/*, which add up over micro-batches.

    `head/known` and `head/stash` are shares of the step's tokens, by the head's mode. `head/stash_mb` is the
    MiB that a rank stashed, averaged over tokens.
    """
    share = rows.offsets[-1] / totals.tokens
    return {
        "head/known": share * (output.mode == "weights_first"),
        "head/stash": share * output.stash_share,
        "head/stash_mb": share * output.stash_bytes / 2**20,
    }

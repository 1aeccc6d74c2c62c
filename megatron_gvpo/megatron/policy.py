"""The policy: it scores rows, takes optimizer updates and exports weights.

Every rank calls every method with the same rows. The methods divide the work among the ranks.
"""

from __future__ import annotations

import megatron_gvpo.megatron.parallel  # noqa: F401 - first: it prepares the import of megatron.core

# isort: split
import contextlib
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_gvpo.algorithms.base import TEACHER, Loss, token_weights
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.core.collectives import all_ranks_agree
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.kernels.divergence import Divergence
from megatron_gvpo.kernels.linear_logprob import LinearLogprob
from megatron_gvpo.megatron import forward
from megatron_gvpo.megatron.critic import Critic
from megatron_gvpo.megatron.device_memory import DeviceMemory
from megatron_gvpo.megatron.forward import LogprobHead
from megatron_gvpo.megatron.loss_pass import (
    KnownWeights,
    LossInForward,
    LossPass,
    MicroBatchResult,
    UpdateResult,
    with_references,
)
from megatron_gvpo.megatron.memory_profile import MemoryProfile
from megatron_gvpo.megatron.microbatch import my_share
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.optimizer import Optimizer
from megatron_gvpo.megatron.reference_weights import ReferenceWeights
from megatron_gvpo.megatron.scorer import Scorer, temperature_of
from megatron_gvpo.megatron.teacher import Teacher, teacher_states
from megatron_gvpo.megatron.teacher_head import HeadDivergence
from megatron_gvpo.megatron.tensor_sums import TensorSum, TensorSums
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.reward_servers import TeacherConfig
from megatron_gvpo.settings.sections import ModelConfig, OptimizerConfig, RolloutConfig, TrainConfig
from megatron_gvpo.types import BatchTotals, TrainBatch


class Policy(Scorer):
    """A Megatron model, its optimizer and, if the method needs them, reference weights and a critic."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Make the policy of a run from the sections of its configuration."""
        return cls(
            config.model,
            config.parallel,
            config.train,
            config.optimizer,
            config.algorithm,
            config.rollout,
            config.teacher,
        )

    def __init__(
        self,
        model: ModelConfig,
        layout: ParallelConfig,
        train: TrainConfig,
        optimizer: OptimizerConfig,
        algorithm: AlgorithmConfig,
        rollout: RolloutConfig,
        teacher: TeacherConfig | None = None,
    ) -> None:
        """`teacher`: the trainer holds it beside the policy, unless it computes on servers of its own."""
        super().__init__(
            model,
            layout,
            train,
            temperature=temperature_of(algorithm, rollout),
            replays_routing=rollout.router_replay,
            trained=True,
            muon=optimizer.muon is not None,
        )
        self.optimizer = Optimizer(self.model, optimizer, model, train.updates)
        self.critic = None
        if algorithm.critic is not None:
            self.critic = Critic(algorithm.critic, model, layout, train, optimizer)
        critics = [] if self.critic is None else [(self.critic.model, self.critic.optimizer)]
        self._trained = [(self.model, self.optimizer), *critics]
        self.memory = DeviceMemory(*self._trained)
        self._loss: Loss = algorithm.loss.sized(rollout.max_tokens)
        self._stash_bytes = train.head_stash_bytes
        self._head_backend = train.head_backend
        self._is_measured = False
        self._background_group: dist.ProcessGroup | None = None
        self._timeout = timedelta(seconds=layout.timeout_seconds)
        reference = algorithm.kept_reference
        # New adapters are switched off to give the fixed reference, the base: it needs no second weights.
        new_adapters = model.adapter is not None and model.adapter.path is None
        self._base_is_reference = reference is not None and reference.decay is None and new_adapters
        self.reference = None
        if reference is not None and not self._base_is_reference:
            self.reference = ReferenceWeights(self.model, reference.decay)
        self.teacher = None
        if teacher is not None and teacher.server is None:
            self.teacher = Teacher(teacher, model, layout, train, self._temperature)

    @property
    def kept_reference(self) -> Literal["none", "base", "fixed", "average"]:
        """Return which reference the method keeps; "base": the model without its adapters, which were new."""
        if self._base_is_reference:
            return "base"
        if self.reference is None:
            return "none"
        return "average" if self.reference.moves else "fixed"

    def score_reference(self, rows: TrainBatch) -> Tensor:
        """Return `score` under the weights of the method's fixed or moving reference."""
        with self._reference_in_place():
            # Without `routing`, the reference's own routers choose the experts.
            return self.score(rows.with_columns(routing=None))

    def score_teacher(self, rows: TrainBatch) -> Tensor:
        """Return `score` by the teacher that the trainer holds."""
        assert self.teacher is not None, "the trainer holds no teacher"
        return self.teacher.score(rows)

    def _reference_in_place(self) -> contextlib.AbstractContextManager[None]:
        if self._base_is_reference:
            assert self.model.adapters is not None
            return self.model.adapters.off()
        assert self.reference is not None, "the method has no reference weights"
        return self.reference.swapped_in()

    def update(
        self,
        rows: TrainBatch,
        *,
        at_step_start: bool,
        keep_logp: bool = False,
        keep_weights: bool = False,
        keep_gradients: bool = False,
    ) -> UpdateResult:
        """Take one optimizer update on `rows`, which hold whole groups.

        `at_step_start`: there was no update since the step began. So the policy at the step's start is the
        present policy, and the rows' columns of its log-probs may be missing. `keep_logp`: return the
        log-probs of the update's own forward. `keep_weights`: also return the loss's gradient by these
        log-probs. `keep_gradients`: return the sums over each tensor's gradient. Rows that have `weight_r`
        are trained with it, so that a replayed step uses its recorded weights. Raises UserFunctionError on
        all ranks, with the weights as they were, where the user's loss fails on any.
        """
        loss, totals, rows = self._loss, BatchTotals.of(rows), rows.with_group_tokens()
        share = my_share(self.model, rows, self._budget, loss.couples_groups)
        is_split = (share.split_groups and loss.couples_groups) or share.split_rows or loss.couples_step
        rows = self._with_weights_first(rows, totals, at_step_start, is_split)
        loss_pass = KnownWeights(loss, totals) if is_split else LossInForward(loss, totals)
        results, memory = self._forward_and_backward(share.packs(rows), loss_pass, totals)
        with all_ranks_agree(UserFunctionError):
            loss_pass.raise_problem()
        logp_r, weight_r = None, rows.weight_r
        if is_split or keep_logp or keep_weights:
            logp_r = share.gather(rows, [result.logp_r for result in results])
        if keep_weights and weight_r is None:
            weights = [result.weight_r for result in results if result.weight_r is not None]
            weight_r = share.gather(rows, weights)
        metrics = loss_pass.metrics(rows, logp_r, results)
        head = {name: metrics.pop(name) for name in list(metrics) if name.startswith("head/")}
        self.model.finish_background_work()
        gradients = self.tensor_sums.take("gradients") if keep_gradients else {}
        return UpdateResult(self.optimizer.apply(), metrics, logp_r, head, memory, weight_r, gradients)

    def gradients(self, rows: TrainBatch) -> dict[str, TensorSum]:
        """Return the sums over each tensor's gradient of sum(weight_r * logp) on `rows`; nothing is updated.

        A collective. The rows have `weight_r`; an entropy bonus and a divergence are left out.
        """
        assert rows.weight_r is not None, "the gradient of what"
        share = my_share(self.model, rows, self._budget, keep_groups=False)
        self.optimizer.zero_grad()
        head = LogprobHead(
            self._temperature, self.model.vocab_size, False, self._stash_bytes, backend=self._head_backend
        )

        def weighted(_: TrainBatch, values: tuple[Any, ...]) -> tuple[Tensor, None]:
            surrogate = LinearLogprob(*values).surrogate
            assert surrogate is not None, "rows with weights have one"
            return surrogate, None

        forward.run(self.model, share.packs(rows), weighted, head=head)
        sums = self.tensor_sums.take("gradients")
        self.optimizer.zero_grad()
        return sums

    @property
    def data_parallel_ranks(self) -> int:
        """The number of ranks over which an update divides its rows."""
        return int(parallel_state.get_data_parallel_world_size())

    @cached_property
    def tensor_sums(self) -> TensorSums:
        """The sums over the trained tensors. A collective when first read."""
        return TensorSums(self.model)

    def _forward_and_backward(
        self, packs: list[TrainBatch], loss_pass: LossPass, totals: BatchTotals
    ) -> tuple[list[MicroBatchResult], dict[str, float]]:
        """Fill the gradients; return the micro-batches' results, and memory in a run's first update."""
        packs, divergence = self._with_teacher(packs, totals)
        self.optimizer.zero_grad()
        profile = self._first_update_profile()
        head = LogprobHead(
            self._temperature,
            self.model.vocab_size,
            self._loss.wants_entropy,
            self._stash_bytes,
            profile,
            divergence,
            self._head_backend,
        )
        with profile or contextlib.nullcontext():
            results = forward.run(self.model, packs, loss_pass, head=head)
        return results, {} if profile is None else profile.metrics()

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
        is_first = not self._is_measured and self.optimizer.steps == 0
        self._is_measured = True
        return MemoryProfile(*self._trained) if is_first else None

    def _with_weights_first(
        self, rows: TrainBatch, totals: BatchTotals, at_step_start: bool, split: bool
    ) -> TrainBatch:
        """Fill `weight_r` = dL/dlogp if it is known before the forward: the head then needs one pass less.

        If a coupled group or a row is `split` over micro-batches, the weights must be known first: a scoring
        pass at the present weights computes them.
        """
        loss = self._loss
        if rows.weight_r is not None:
            return rows
        other_policies = rows.old_logp_r is not None or rows.ref_logp_r is not None
        if loss.linear or (at_step_start and loss.known_at_step_start and not other_policies):
            # The loss reads only differences of policies' log-probs, which are all 0, so zeros stand for the
            # log-probs.
            logp_r = torch.zeros(int(rows.length_n.sum()))
        elif split:
            logp_r = self.score(rows)
        else:
            return rows
        weight_r, _ = token_weights(loss, with_references(rows, logp_r), logp_r, totals)
        return rows.with_columns(weight_r=weight_r)

    def skip_updates(self, count: int) -> None:
        """Advance the learning rates past updates that have nothing to train."""
        for _, optimizer in self._trained:
            optimizer.scheduler.step(count)

    def follow_schedule(self, updates: int) -> None:
        """Set the learning rates to those after this many updates of the whole run."""
        for _, optimizer in self._trained:
            optimizer.scheduler.num_steps = 0  # Megatron adds to it
            optimizer.scheduler.step(updates)

    def end_step(self) -> None:
        """Update a moving reference."""
        if self.reference is not None:
            self.reference.update_average()

    def background_group(self) -> dist.ProcessGroup:
        """Return a group of all ranks for communication in the background of training. A collective."""
        if self._background_group is None:
            self._background_group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._background_group

    @property
    def models(self) -> list[Model]:
        """The policy's model, and the critic's if there is one."""
        return [self.model] if self.critic is None else [self.model, self.critic.model]

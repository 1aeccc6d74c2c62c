"""Builds the components of a run from its configuration; the trainer's loop connects them."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_gvpo.algorithms.advantages.gae import CriticOptions
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.curriculum.batch_policy import BatchPolicy
from megatron_gvpo.checks.teacher import tokenizer_difference
from megatron_gvpo.data.order import PromptOrder, SuccessTracker, WeightedOrder
from megatron_gvpo.data.prompts import PromptWriter
from megatron_gvpo.data.task import Task, load_task
from megatron_gvpo.groups import Group
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.end_tokens import other_end
from megatron_gvpo.huggingface.tokenizer import set_date
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.observe import PhaseTimer, ProfileWindow, profile_window
from megatron_gvpo.observe.mismatch import THRESHOLDS, MismatchWatch
from megatron_gvpo.observe.timer import phase_markers
from megatron_gvpo.rewards.teacher import SECTION, ServedTeacher
from megatron_gvpo.runs.record import first_start
from megatron_gvpo.sampling.batch_queues import BatchQueue, Order, OverSampledQueue
from megatron_gvpo.sampling.batch_sampler import ComposedSampler, PendingBatch
from megatron_gvpo.sampling.empty_batches import EmptyBatches
from megatron_gvpo.sampling.rollouts import Rollouts
from megatron_gvpo.sampling.samplers import DatasetSampler, FileSampler, Sampler, responses_of
from megatron_gvpo.sampling.shaping import run_shapers
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.reward_servers import TeacherConfig
from megatron_gvpo.settings.sections import DataConfig, OptimizerConfig, TrainConfig
from megatron_gvpo.training.environment import prepare
from megatron_gvpo.training.text_teacher import TextTeacher, text_teacher
from megatron_gvpo.types import OnWait
from megatron_gvpo.workers.tools import configured_schemas

log = logging.getLogger(__name__)


class Components:
    """The policy, the engine, the data and the samplers of a run.

    A context manager: the engine and the reward workers run inside it.
    """

    def __init__(self, config: Config, resumes: bool = False, heartbeat: OnWait = None) -> None:
        """`resumes`: prompts have the date on which the run in the output directory began.

        `heartbeat` is called on every rank at once from time to time while the ranks wait for responses.
        """
        set_date(first_start(config.output_dir) if resumes else None)
        # The command line has done this already; the Python API has not.
        prepare(config.parallel, config.rollout)
        self.config = config
        rank = int(os.environ.get("RANK", "0"))  # there is no process group before the policy
        self._markers = phase_markers(config.logging, config.output_dir, rank)
        self.timer = PhaseTimer(synchronize=torch.cuda.is_available(), markers=self._markers)
        cards = ModelCards(config)
        task = load_task(config, cards.policy, configured_schemas(config.rollout.conversation))
        self.text_teacher, warning = _text_teacher(
            config.model.path, config.teacher, config.data, task, cards
        )
        few_prompts = _few_prompts(config.train, config.data, len(task.prompts))
        long_warmups = warmups_beyond(config.train.updates, config.optimizer, config.algorithm.critic)
        for text in (warning, few_prompts, *long_warmups):
            if rank == 0 and text is not None:
                log.warning(text)
        algorithm = config.algorithm.sized(config.rollout.max_tokens)
        self.prompts, self.tokenizer = task.prompts, task.tokenizer
        self.end_token_ids = task.end_token_ids
        self.tracker = SuccessTracker(algorithm.tracker) if algorithm.needs_tracker else None
        self.order: Order = PromptOrder(len(self.prompts), config.train.seed, config.data.shuffle)
        if self.tracker is not None and algorithm.prompts.weighted:
            self.order = WeightedOrder(self.prompts, config.train.seed, algorithm.prompts, self.tracker)
        self.members = [member.build() for member in algorithm.members]
        self.empty_batches = EmptyBatches(
            config.algorithm, config.rewards, config.rollout.max_tokens, config.train.max_empty_batches
        )
        self._shapers = algorithm.shapers
        self.estimator = None if algorithm.estimator is None else algorithm.estimator.build()
        self.batch_policy: BatchPolicy = config.algorithm.batch_policy.build(config.train.prompts_per_step)
        self.policy = Policy.of(config)
        self.teacher = self._served_teacher(cards)
        threshold = config.rollout.mismatch_threshold or THRESHOLDS[config.model.dtype]
        self.mismatch = MismatchWatch(threshold)
        self.profiler: ProfileWindow = profile_window(
            config.logging, Path(config.output_dir), dist.get_rank()
        )
        self._rollouts = Rollouts(config, cards, task, self.policy, self.timer, heartbeat)
        self.engine = self._rollouts.engine
        self.sampler = self._compose(task, algorithm)
        self.batches = self._queue()

    def _served_teacher(self, cards: ModelCards) -> ServedTeacher | None:
        config, teacher = self.config, self.config.teacher
        if teacher is None or teacher.server is None:
            return None
        gpu = config.first_gpus()[SECTION]
        return ServedTeacher(teacher, config.model.dtype, cards, config.output_dir, gpu)

    def _queue(self) -> BatchQueue[PendingBatch] | OverSampledQueue[PendingBatch]:
        rollout, size = self.config.rollout, self.config.train.prompts_per_step
        if extra := rollout.over_sampling_prompts:
            source = self.order, self.prompts, self.sampler
            return OverSampledQueue(*source, size, extra, rollout.async_steps)
        return BatchQueue(self.order, self.prompts, self.sampler, size)

    def _compose(self, task: Task, algorithm: AlgorithmConfig) -> ComposedSampler:
        """The sampler of the method: its responses come from the data, a file or the engine, and members."""
        config, tracker = self.config, self.tracker
        base: Sampler[Any] = DatasetSampler() if algorithm.trains_on_demonstrations else FileSampler()
        of_members = score = greedy = None
        if algorithm.samples_from_policy:
            shares = None
            if tracker is not None:
                shares = responses_of(algorithm.allocation, tracker, config.rollout.n)
            sampled = self._rollouts.sampler(config.rollout.n, shares=shares, counted=True)
            base, score, of_members = sampled, sampled.score, self._rollouts.sampler_of_members
            if algorithm.prior.greedy:
                greedy = self._rollouts.sampler(1, config.rollout.greedy)
        is_read = any(algorithm.blocks_on_components())
        components = {component.name for component in config.rewards.components if is_read}
        writer = PromptWriter(
            config.data.train, config.data, task.tokenizer, task.longest_prompt, task.tools, task.images
        )
        return ComposedSampler(
            base,
            writer,
            self.members,
            task.end_token_ids,
            answers=of_members,
            score=score,
            greedy=greedy,
            tracker=tracker,
            expected=algorithm.prior.function_of_prompt,
            policy=self.policy.score,
            components=components,
        )

    def shape(self, groups: list[Group], step: int) -> tuple[list[Group], list[str]]:
        """The groups that the method's shapers leave, and warnings. A collective. Raises RolloutError."""
        with self.timer.phase("reward"):  # members may ask a judge
            remaining, dropped = run_shapers(self._shapers, groups, step)
        return remaining, self.empty_batches.check_shaped(step, groups, remaining, dropped)

    def sync(self, version: int) -> None:
        """Give the engine the policy's weights, unless it has this version. A collective."""
        self._rollouts.sync(version)

    @property
    def rollout_metrics(self) -> dict[str, float]:
        """Metrics of the engine's last sync and of the last batch's conversations."""
        return self._rollouts.metrics

    def evaluate(self, version: int) -> tuple[list[Group], dict[str, float]]:
        """Responses of the present policy to the held-out prompts, and metrics; empty without prompts.

        A collective.
        """
        return self._rollouts.evaluate(version)

    def __enter__(self) -> Self:
        with ExitStack() as opened:  # closes earlier parts if a later one fails to open
            opened.enter_context(self._rollouts)
            if self.teacher is not None:
                opened.enter_context(self.teacher)
            opened.enter_context(self.profiler)
            for marker in self._markers:
                opened.callback(marker.close)
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)


def _few_prompts(train: TrainConfig, data: DataConfig, count: int) -> str | None:
    """A warning about data with fewer prompts than a step takes."""
    if count >= train.prompts_per_step:
        return None
    return (
        f"train.prompts_per_step={train.prompts_per_step}, and {data.train.path} has {count} prompts: a step "
        "trains a prompt several times"
    )


def warmups_beyond(updates: int, optimizer: OptimizerConfig, critic: CriticOptions | None) -> list[str]:
    """A warning about each warm-up that is longer than the run, which has this many updates."""
    warmups = [("optimizer", optimizer.warmup_steps, optimizer.lr)]
    if critic is not None:
        warmups.append(("algorithm.critic", critic.warmup_steps, critic.lr))
    return [
        f"{section}.warmup_steps={steps}: the run ends in its warm-up, after {updates} updates "
        "(train.steps x train.mini_batches x train.batch_epochs), at a learning rate of "
        f"{lr * updates / steps:.3g} of {lr:g}"
        for section, steps, lr in warmups
        if steps > updates
    ]


def _text_teacher(
    path: str, teacher: TeacherConfig | None, data: DataConfig, task: Task, cards: ModelCards
) -> tuple[TextTeacher | None, str | None]:
    """Return the translation for a teacher with another tokenizer or None, and a warning about the teacher.

    `path` is the directory of the policy.
    """
    if teacher is None:
        return None, None
    if (difference := tokenizer_difference(path, teacher.path)) is None:
        return None, other_end(teacher.path, cards.teacher, task.end_token_ids)
    warning = f"teacher.path={teacher.path}: {difference}: the teacher scores the text of responses"
    return text_teacher(teacher, data, task, cards.teacher), warning

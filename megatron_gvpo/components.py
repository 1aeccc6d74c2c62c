"""A run's parts, built from its configuration: what the trainer's loop is a short story about."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_gvpo.algorithms.base import Stateful
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.curriculum.batch_policy import BatchPolicy
from megatron_gvpo.config.schema import Config
from megatron_gvpo.data.order import PromptOrder
from megatron_gvpo.data.prompts import PromptWriter
from megatron_gvpo.data.task import Task, load_task
from megatron_gvpo.data.tracker import SuccessTracker, WeightedOrder
from megatron_gvpo.megatron.checkpoint import sharded as checkpoint
from megatron_gvpo.megatron.checkpoint.convert import write_hugging_face
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.observe import PhaseTimer, ProfileWindow, profile_window
from megatron_gvpo.observe.mismatch import THRESHOLDS, MismatchWatch
from megatron_gvpo.runtime.environment import prepare
from megatron_gvpo.sampling.generation import Generation
from megatron_gvpo.sampling.samplers import (
    BatchQueue,
    ComposedSampler,
    DatasetSampler,
    FileSampler,
    Order,
    Sampler,
    Shapers,
    responses_of,
)

GREEDY = 1e-6  # top_p that leaves the most likely token alone, in every engine


class Components:
    """Policy, engine, data, samplers. A context manager: the engine and the workers end with it."""

    def __init__(self, config: Config) -> None:
        prepare(config)  # for whoever comes by Python
        self.config = config
        self.timer = PhaseTimer(synchronize=torch.cuda.is_available())
        task = load_task(config)
        algorithm = config.algorithm.sized(config.rollout.max_tokens)
        self.prompts = task.prompts
        self.tracker = SuccessTracker(algorithm.tracker) if algorithm.needs_tracker else None
        self.order: Order = PromptOrder(len(self.prompts), config.train.seed, config.data.shuffle)
        if self.tracker is not None and algorithm.prompts.weighted:
            self.order = WeightedOrder(self.prompts, config.train.seed, algorithm.prompts, self.tracker)
        self.members = [member.build() for member in algorithm.members]
        self.shapers = Shapers(algorithm.shapers, config.train.max_empty_batches)
        self.estimator = None if algorithm.estimator is None else algorithm.estimator.build()
        self.batch_policy: BatchPolicy = config.algorithm.batch_policy.build(config.train.prompts_per_step)
        self.policy = Policy(config)
        threshold = config.rollout.mismatch_threshold or THRESHOLDS[config.model.dtype]
        self.mismatch = MismatchWatch(threshold, config.rollout.top_p)
        self.profiler: ProfileWindow = profile_window(
            config.logging.profile_steps, Path(config.output_dir), dist.get_rank()
        )
        self.generation: Generation | None = None
        if algorithm.sampler == "engine" or task.eval_prompts:
            self.generation = Generation(config, task, self.policy, self.timer)
        self.sampler = self._compose(task, algorithm)
        self.batches = BatchQueue(self.order, self.prompts, self.sampler, config.train.prompts_per_step)

    def _compose(self, task: Task, algorithm: AlgorithmConfig) -> ComposedSampler:
        """Where a group's responses come from: the data, a file or the engine, and the method's members."""
        config, generation, tracker = self.config, self.generation, self.tracker
        base: Sampler = DatasetSampler() if algorithm.sampler == "dataset" else FileSampler()
        answers = greedy = None
        if algorithm.sampler == "engine":
            assert generation is not None
            shares = None
            if tracker is not None:
                shares = responses_of(algorithm.allocation, tracker, config.rollout.n)
            answers = generation.sampler
            base = answers(config.rollout.n, shares=shares)
            if algorithm.prior.greedy:
                greedy = answers(1, config.rollout.model_copy(update={"top_p": GREEDY}))
        writer = PromptWriter(config.data.train, config.data, task.tokenizer)
        return ComposedSampler(
            *(base, writer, self.members, task.end_token_id),
            answers=answers,
            greedy=greedy,
            tracker=tracker,
            expected=algorithm.prior.function_of_prompt,
            policy=self.policy.score,
        )

    def sync(self, version: int) -> None:
        """Give the engine, where there is one, the policy's weights, unless it has them. A collective."""
        if self.generation is not None:
            self.generation.sync(version)

    @property
    def shares_gpus(self) -> bool:
        """Whether the engine has the trainer's own GPUs, so that only one of them can work at a time."""
        return self.generation is not None and self.generation.shares_gpus

    @property
    def sync_metrics(self) -> dict[str, float]:
        """Of the last weight push to servers, on rank 0."""
        return {} if self.generation is None else self.generation.sync_metrics

    def while_waiting(self, call: Callable[[], None]) -> AbstractContextManager[None]:
        """Inside, `call` is called on every rank at once, now and again, while responses are awaited."""
        return nullcontext() if self.generation is None else self.generation.while_waiting(call)

    def evaluate(self, version: int) -> dict[str, float]:
        """Metrics of the present policy on the held-out prompts; empty without any. A collective."""
        return {} if self.generation is None else self.generation.evaluate(version)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the policy, as JSON values."""
        members: list[dict[str, Any]] = [
            m.state_dict() if isinstance(m, Stateful) else {} for m in self.members
        ]
        return {
            "order": self.batches.state_dict(),
            "batch_policy": self.batch_policy.state_dict(),
            "tracker": None if self.tracker is None else self.tracker.state_dict(),
            "members": members,
            "estimator": self.estimator.state_dict() if isinstance(self.estimator, Stateful) else {},
            "mismatch": self.mismatch.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.load_state_dict(state["order"])
        self.batch_policy.load_state_dict(state["batch_policy"])
        if self.tracker is not None:
            self.tracker.load_state_dict(state.get("tracker") or {})
        for member, held in zip(self.members, state.get("members", ()), strict=False):
            if isinstance(member, Stateful):
                member.load_state_dict(held)
        if isinstance(self.estimator, Stateful):
            self.estimator.load_state_dict(state.get("estimator", {}))
        self.mismatch.load_state_dict(state.get("mismatch", {}))

    def resume(self) -> int | None:
        """Restore the newest complete checkpoint; returns its step, None without one. A collective."""
        found = checkpoint.newest(self.checkpoints)
        if found is None:
            return None
        state = checkpoint.load(found, self.policy)
        self.load_state_dict(state)
        return int(state["step"])

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint of the policy and `state`, or begin to. A collective."""
        with self.timer.phase("checkpoint"):
            options = self.config.checkpoint
            return checkpoint.save(
                self.checkpoints, step, self.policy, state, options.keep, options.asynchronous
            )

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is still being written. Raises CheckpointError where it cannot be."""
        with self.timer.phase("checkpoint"):
            for model in self.policy.models:
                model.finish_background_work()

    def export_hf(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint: weights, configuration, tokenizer. A collective.

        Raises CheckpointError; what was in `directory` is then as it was.
        """
        with self.timer.phase("checkpoint"):
            write_hugging_face(self.policy.model, self.config.model.path, directory)

    @property
    def checkpoints(self) -> Path:
        return Path(self.config.output_dir) / "checkpoints"

    def __enter__(self) -> Self:
        with ExitStack() as opened:  # what is open already ends where the next cannot be opened
            for part in (self.generation, self.profiler):
                if part is not None:
                    opened.enter_context(part)
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

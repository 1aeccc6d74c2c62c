"""Builds the components of a run from its configuration; the trainer's loop connects them."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from megatron_gvpo.algorithms.base import Stateful
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.curriculum.batch_policy import BatchPolicy
from megatron_gvpo.core.collectives import broadcast_msgpack
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.order import PromptOrder, SuccessTracker, WeightedOrder
from megatron_gvpo.data.prompts import PromptWriter
from megatron_gvpo.data.task import Task, load_task
from megatron_gvpo.groups import Group, Prompt
from megatron_gvpo.huggingface.end_tokens import other_end
from megatron_gvpo.huggingface.tokenizer import set_date
from megatron_gvpo.megatron.checkpoint import sharded as checkpoint
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.observe import PhaseTimer, ProfileWindow, profile_window
from megatron_gvpo.observe.mismatch import THRESHOLDS, MismatchWatch
from megatron_gvpo.observe.spans import phase_markers
from megatron_gvpo.rewards.teacher import ServedTeacher
from megatron_gvpo.runs.existing_run import exported_step
from megatron_gvpo.runs.record import Best, first_start
from megatron_gvpo.sampling.batch_sampler import BatchQueue, ComposedSampler, Order, run_shapers
from megatron_gvpo.sampling.rollouts import RolloutSource
from megatron_gvpo.sampling.samplers import DatasetSampler, EmptyBatches, FileSampler, Sampler, responses_of
from megatron_gvpo.settings.config import Config
from megatron_gvpo.training.conversion import write_hugging_face
from megatron_gvpo.training.environment import prepare
from megatron_gvpo.types import OnWait
from megatron_gvpo.workers.tools import configured_schemas

log = logging.getLogger(__name__)

GREEDY = 1e-6  # the top_p that leaves only the most likely token, in every engine


class Components:
    """The policy, the engine, the data and the samplers of a run.

    A context manager: the engine and the reward workers run inside it.
    """

    def __init__(self, config: Config, resumes: bool = False) -> None:
        """`resumes`: prompts have the date on which the run in the output directory began."""
        set_date(first_start(config.output_dir) if resumes else None)
        prepare(config)  # the command line has done so; a user of the Python API has not
        self.config = config
        rank = int(os.environ.get("RANK", "0"))  # there is no process group before the policy
        self._markers = phase_markers(config.logging, config.output_dir, rank)
        self.timer = PhaseTimer(synchronize=torch.cuda.is_available(), markers=self._markers)
        task = load_task(config, configured_schemas(config))
        if not rank and (said := other_end(config, task.end_token_ids)) is not None:
            log.warning(said)
        algorithm = config.algorithm.sized(config.rollout.max_tokens)
        self.prompts, self.tokenizer = task.prompts, task.tokenizer
        self._prompts_digest = _digest_of_prompts(task.prompts)
        self.tracker = SuccessTracker(algorithm.tracker) if algorithm.needs_tracker else None
        self.order: Order = PromptOrder(len(self.prompts), config.train.seed, config.data.shuffle)
        if self.tracker is not None and algorithm.prompts.weighted:
            self.order = WeightedOrder(self.prompts, config.train.seed, algorithm.prompts, self.tracker)
        self.members = [member.build() for member in algorithm.members]
        self.empty_batches = EmptyBatches(config)
        self._shapers = algorithm.shapers
        self.estimator = None if algorithm.estimator is None else algorithm.estimator.build()
        self.batch_policy: BatchPolicy = config.algorithm.batch_policy.build(config.train.prompts_per_step)
        self.policy = Policy(config)
        taught = config.teacher is not None and config.teacher.server is not None
        self.teacher = ServedTeacher(config) if taught else None
        threshold = config.rollout.mismatch_threshold or THRESHOLDS[config.model.dtype]
        self.mismatch = MismatchWatch(threshold, config.rollout.top_p)
        self.best = Best(config.checkpoint.keep_best)
        # Metrics of the step that `resume` has read, if its run could not report it; else None.
        self.unreported: dict[str, float] | None = None
        self.profiler: ProfileWindow = profile_window(
            config.logging, Path(config.output_dir), dist.get_rank()
        )
        self._source = RolloutSource(config, task, self.policy, self.timer)
        self.engine = self._source.engine
        self.sampler = self._compose(task, algorithm)
        self.batches = BatchQueue(self.order, self.prompts, self.sampler, config.train.prompts_per_step)

    def _compose(self, task: Task, algorithm: AlgorithmConfig) -> ComposedSampler:
        """The sampler of the method: its responses come from the data, a file or the engine, and members."""
        config, tracker = self.config, self.tracker
        base: Sampler = DatasetSampler() if algorithm.trains_on_demonstrations else FileSampler()
        answers = score = greedy = None
        if algorithm.samples_from_policy:
            shares = None
            if tracker is not None:
                shares = responses_of(algorithm.allocation, tracker, config.rollout.n)
            answers = self._source.sampler
            sampled = answers(config.rollout.n, shares=shares, counted=True)
            base, score = sampled, sampled.score
            if algorithm.prior.greedy:
                greedy = answers(1, config.rollout.model_copy(update={"top_p": GREEDY}))
        writer = PromptWriter(
            config.data.train, config.data, task.tokenizer, task.longest_prompt, task.tools, task.images
        )
        return ComposedSampler(
            *(base, writer, self.members, task.end_token_ids),
            answers=answers,
            score=score,
            greedy=greedy,
            tracker=tracker,
            expected=algorithm.prior.function_of_prompt,
            policy=self.policy.score,
        )

    def shape(self, groups: list[Group], step: int) -> tuple[list[Group], list[str]]:
        """The groups that the method's shapers leave, and warnings. A collective. Raises RolloutError."""
        with self.timer.phase("reward"):  # they may ask a judge
            left, dropped = run_shapers(self._shapers, groups, step)
        return left, self.empty_batches.check_shaped(step, groups, left, dropped)

    def sync(self, version: int) -> None:
        """Give the engine the policy's weights, unless it has this version. A collective."""
        self._source.sync(version)

    @property
    def rollout_metrics(self) -> dict[str, float]:
        """Metrics of the engine's last sync and of the last batch's conversations."""
        return self._source.metrics

    def evaluate(self, version: int, on_wait: OnWait = None) -> tuple[list[Group], dict[str, float]]:
        """Responses of the present policy to the held-out prompts, and metrics; empty without prompts.

        A collective. The engine calls `on_wait` while it waits.
        """
        return self._source.evaluate(version, on_wait)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps besides the policy, as JSON values."""
        members: list[dict[str, Any]] = [
            m.state_dict() if isinstance(m, Stateful) else {} for m in self.members
        ]
        return {
            "blocks": self._blocks(),
            "order": self.batches.state_dict(),
            "prompts": self._prompts_digest,
            "images": _digest_of_images(self.prompts),
            "batch_policy": self.batch_policy.state_dict(),
            "tracker": None if self.tracker is None else self.tracker.state_dict(),
            "members": members,
            "estimator": self.estimator.state_dict() if isinstance(self.estimator, Stateful) else {},
            "mismatch": self.mismatch.state_dict(),
            "empty_batches": self.empty_batches.state_dict(),
        }

    def _blocks(self) -> dict[str, Any]:
        """The names of the blocks that may have a state, which says whose state it is."""
        algorithm = self.config.algorithm
        return {
            "batch_policy": algorithm.batch_policy.name,
            "members": [member.name for member in algorithm.members],
            "estimator": None if algorithm.estimator is None else algorithm.estimator.name,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`. Raises DataError for the state of other data.

        The state of a block that the method no longer has is left out, with a warning. A block that the
        checkpoint's method did not have starts without one.
        """
        if state.get("images") not in (None, _digest_of_images(self.prompts)):
            raise DataError(
                f"{self.config.data.train.path}: its images are not those that the checkpoint was trained "
                "on: resume with the same files, or start a new run"
            )
        if state.get("prompts") not in (None, self._prompts_digest) and dist.get_rank() == 0:
            log.warning(
                "%s: the prompts are not those that the checkpoint was trained on: the data, the tokenizer "
                "or its chat template have changed",
                self.config.data.train.path,
            )
        blocks, saved = self._blocks(), state.get("blocks") or self._blocks()
        self.order.load_state_dict(state["order"])
        if blocks["batch_policy"] == saved["batch_policy"]:
            self.batch_policy.load_state_dict(state["batch_policy"])
        if self.tracker is not None:
            self.tracker.load_state_dict(state.get("tracker") or {})
        held = list(zip(saved["members"], state.get("members", ()), strict=True))
        for name, member in zip(blocks["members"], self.members, strict=True):
            place = next((i for i, (other, _) in enumerate(held) if other == name), None)
            if place is not None and isinstance(member, Stateful):
                member.load_state_dict(held.pop(place)[1])
        if isinstance(self.estimator, Stateful) and blocks["estimator"] == saved["estimator"]:
            self.estimator.load_state_dict(state.get("estimator", {}))
        self.mismatch.load_state_dict(state.get("mismatch", {}))
        self.empty_batches.load_state_dict(state.get("empty_batches", {}))
        self.best.load_state_dict(state.get("best", {}))
        self.unreported = state.get("unreported")
        if (lost := _without_state(saved, blocks, state)) and dist.get_rank() == 0:
            log.warning("the method has changed: the checkpoint's state of %s is left out", ", ".join(lost))

    def resume(self) -> int | None:
        """Restore the newest checkpoint that is not damaged; returns its step, None without one.

        A collective. Raises CheckpointError.
        """

        def load(directory: Path) -> dict[str, Any]:
            return checkpoint.load(directory, self.policy)

        state = checkpoint.load_newest(self.checkpoints, load, put_aside=True)
        if state is None:
            return None
        try:
            self.load_state_dict(state)
        except DataError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise checkpoint.CheckpointError(
                f"{self.checkpoints}: state.json of step {state['step']} is damaged: "
                f"{type(error).__name__}: {error}"
            ) from None
        return int(state["step"])

    def save(self, step: int, state: dict[str, Any], metrics: Mapping[str, float]) -> Path:
        """Write a checkpoint of the policy and `state`, or begin to write it, and the step's exports.

        `metrics` are the step's, by which it may be the best. A collective.
        """
        options = self.config.checkpoint
        is_best = broadcast_msgpack(self.best.offer(step, metrics))  # ranks may differ in times and memory
        state = {**state, "best": self.best.state_dict()}
        with self.timer.phase("checkpoint"):
            path = checkpoint.save(
                *(self.checkpoints, step, self.policy, state, options.keep, options.asynchronous),
                best=self.best.step,
            )
        self._export(self._exports(step, is_best), step)
        return path

    def complete_exports(self, step: int) -> None:
        """Write the exports of the checkpoint of `step`, which `resume` has read, that its run did not reach.

        A collective.
        """
        exports = self._exports(step, self.best.step == step)
        missing = broadcast_msgpack([i for i, path in enumerate(exports) if exported_step(path) != step])
        self._export([exports[i] for i in missing], step)

    def _exports(self, step: int, is_best: bool) -> list[Path]:
        """The Hugging Face directories that go with the checkpoint of `step`."""
        out = Path(self.config.output_dir)
        best = [out / "hf_best"] if is_best else []
        on_the_way = [out / "exports" / f"step_{step:08d}"] if self.config.checkpoint.exports(step) else []
        return best + on_the_way

    def _export(self, directories: Sequence[Path], step: int) -> None:
        if directories:
            self.finish_saving()  # first: no export is of a step whose checkpoint is lost
        for directory in directories:
            self.export_hf(directory, step)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is still being written. Raises CheckpointError if writing fails."""
        with self.timer.phase("checkpoint"):
            for model in self.policy.models:
                model.finish_background_work()

    def export_hf(self, directory: Path, step: int) -> None:
        """Write a Hugging Face checkpoint of `step`: weights, configuration, tokenizer. A collective.

        Raises CheckpointError, and leaves `directory` as it was.
        """
        with self.timer.phase("checkpoint"):
            write_hugging_face(self.policy.model, self.config.model, directory, step)

    @property
    def checkpoints(self) -> Path:
        return Path(self.config.output_dir) / "checkpoints"

    def __enter__(self) -> Self:
        with ExitStack() as opened:  # closes what is open where the next part cannot be opened
            opened.enter_context(self._source)
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


def _digest_of_prompts(prompts: Sequence[Prompt]) -> str:
    """A hash of tokens and answers: the record of a run has none of hub data, generators and tokenizers."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(np.asarray(prompt.token_ids, np.int32).tobytes())
        digest.update(f"{prompt.answer} ".encode(errors="replace"))
    return digest.hexdigest()


def _digest_of_images(prompts: Sequence[Prompt]) -> str | None:
    """A hash of all images, None without any; the record of a run has that of the data, which names them."""
    digests = [image.digest for prompt in prompts for image in prompt.images]
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest() if digests else None


def _without_state(saved: dict[str, Any], blocks: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """The blocks of a checkpoint's method that had a state, and that the present method does not have."""
    lost = [kind for kind in ("batch_policy", "estimator") if saved[kind] != blocks[kind] and state.get(kind)]
    members, kept = zip(saved["members"], state.get("members", ()), strict=True), list(blocks["members"])
    for name, held in members:
        if name in kept:
            kept.remove(name)
        elif held:
            lost.append(f"the member {name}")
    return lost

"""A run's parts, built from its configuration: what the trainer's loop is a short story about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_gvpo.algorithms.batch_policy import BatchPolicy
from megatron_gvpo.algorithms.curriculum import FunctionPrior, SuccessRate
from megatron_gvpo.algorithms.members import Stateful
from megatron_gvpo.config import Config, SamplingConfig, read_model_config
from megatron_gvpo.data.order import PromptOrder
from megatron_gvpo.data.prompts import DataError, PromptWriter, load_prompts
from megatron_gvpo.data.tokenizer import end_token_id, load_tokenizer
from megatron_gvpo.data.tracker import SuccessTracker, WeightedOrder
from megatron_gvpo.environment import prepare
from megatron_gvpo.evaluation import summarise
from megatron_gvpo.megatron import checkpoint, parallel
from megatron_gvpo.megatron.convert import write_hugging_face
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.observe import PhaseTimer, ProfileWindow, profile_window
from megatron_gvpo.observe.mismatch import THRESHOLDS, MismatchWatch
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.rollout.collect import EmbeddedRollouts, Rollouts
from megatron_gvpo.rollout.local import LocalEngine
from megatron_gvpo.rollout.served import ServedRollouts
from megatron_gvpo.sampling import (
    BatchQueue,
    ComposedSampler,
    DatasetSampler,
    EngineSampler,
    FileSampler,
    Order,
    Sampler,
    responses_of,
)
from megatron_gvpo.types import Prompt
from megatron_gvpo.weights.in_process import EmbeddedWeights
from megatron_gvpo.weights.push import WeightPush
from megatron_gvpo.weights.served import ServedWeights

GREEDY = 1e-6  # top_p that leaves the most likely token alone, in every engine


class Parts:
    """Policy, engine, data, samplers. A context manager: the engine and the workers end with it.

    Data is read before the model is built, so that bad data costs seconds.
    """

    def __init__(self, config: Config) -> None:
        prepare(config)  # for whoever comes by Python
        self.config = config
        self.timer = PhaseTimer(synchronize=torch.cuda.is_available())
        tokenizer = load_tokenizer(config.model.path)
        end = end_token_id(tokenizer)
        model = read_model_config(config.model.path)
        vocabulary = model.get("vocab_size", end + 1)
        if end >= vocabulary:
            raise DataError(
                f"model.path={config.model.path}: the tokenizer's end token {tokenizer.eos_token!r} has id "
                f"{end}, and the model knows only {vocabulary} tokens; name its own as eos_token in "
                "tokenizer_config.json"
            )
        positions = model.get("max_position_embeddings") if config.algorithm.sampler != "engine" else None
        self.prompts: list[Prompt] = load_prompts(
            config.data.train, config.data, tokenizer, end_token_id=end, positions=positions
        )
        self.eval_prompts: list[Prompt] = []
        if config.data.eval is not None:
            self.eval_prompts = load_prompts(config.data.eval, config.data, tokenizer, end_token_id=end)
        algorithm = config.algorithm.sized(config.rollout.max_tokens)
        self.tracker = SuccessTracker(algorithm.tracker) if algorithm.needs_tracker else None
        self.order: Order = PromptOrder(len(self.prompts), config.train.seed, config.data.shuffle)
        if self.tracker is not None and isinstance(algorithm.prompts, SuccessRate):
            self.order = WeightedOrder(self.prompts, config.train.seed, algorithm.prompts, self.tracker)
        self.members = [member.build() for member in algorithm.members]
        self.shapers = algorithm.shapers
        self.estimator = None if algorithm.estimator is None else algorithm.estimator.build()
        self.batch_policy: BatchPolicy = config.algorithm.batch_policy.build(config.train.prompts_per_step)
        self.policy = Policy(config)
        threshold = config.rollout.mismatch_threshold or THRESHOLDS[config.model.dtype]
        self.mismatch = MismatchWatch(threshold, config.rollout.top_p)
        self.profiler: ProfileWindow = profile_window(
            config.logging.profile_steps, Path(config.output_dir), dist.get_rank()
        )
        self._engine: LocalEngine | None = None
        self._served: ServedRollouts | None = None
        self._rewards: RewardPool | None = None
        base: Sampler = DatasetSampler() if algorithm.sampler == "dataset" else FileSampler()
        self.evaluator: Sampler | None = None
        self._engine_sampler: Callable[..., EngineSampler] | None = None
        if algorithm.sampler == "engine" or self.eval_prompts:
            self._build_rollout(tokenizer, end)
        answers = greedy = None
        if algorithm.sampler == "engine":
            answers = self._engine_sampler
            assert answers is not None
            shares = None
            if self.tracker is not None:
                shares = responses_of(algorithm.allocation, self.tracker, config.rollout.n)
            base = answers(config.rollout.n, shares=shares)
            if algorithm.prior.name == "greedy":
                greedy = answers(1, config.rollout.model_copy(update={"top_p": GREEDY}))
        writer = PromptWriter(config.data.train, config.data, tokenizer)
        self.sampler = ComposedSampler(
            *(base, writer, self.members, end),
            answers=answers,
            greedy=greedy,
            tracker=self.tracker,
            expected=algorithm.prior.expected if isinstance(algorithm.prior, FunctionPrior) else None,
            policy=self.policy.score,
        )
        size = config.train.prompts_per_step
        self.batches = BatchQueue(self.order, self.prompts, self.sampler, size)

    def _build_rollout(self, tokenizer: Any, end: int) -> None:
        config = self.config
        weights = partial(self.policy.weights, on_host=False)
        rollouts: Rollouts
        if config.rollout.engine == "local":
            self._engine = LocalEngine(
                config.model.path,
                tokenizer,
                device=parallel.device(),
                dtype=getattr(torch, config.model.dtype),
                batch_size=config.rollout.batch_size,
                end_token_id=end,
            )
            self._weights: WeightPush = EmbeddedWeights(self._engine, weights)
            rollouts = EmbeddedRollouts(self._engine)
        else:
            model = read_model_config(config.model.path)
            rollouts = self._served = ServedRollouts(config, tokenizer, end, model, self.policy.memory)
            score = partial(self.policy.score, temperature=1.0)
            self._weights = ServedWeights(config, self._served, weights, score, self.prompts)
        self._rewards = RewardPool(config.rewards)
        rewards = self._rewards

        def sampler(
            n: int,
            sampling: SamplingConfig = config.rollout,
            shares: Callable[..., list[int]] | None = None,
        ) -> EngineSampler:
            return EngineSampler(rollouts, rewards, self.timer, n, sampling, shares)

        self._engine_sampler = sampler
        if self.eval_prompts:
            self.evaluator = sampler(config.eval.n, config.eval.sampling)

    def sync(self, version: int) -> None:
        """Give the engine the policy's weights, unless it has them. A collective."""
        if self._rewards is not None and self._weights.version != version:
            with self.timer.phase("sync"):
                self._weights.push(version)

    @property
    def shares_gpus(self) -> bool:
        """Whether the engine has the trainer's own GPUs, so that only one of them can work at a time."""
        return self._served is not None and self._served.memory is not None

    @property
    def sync_metrics(self) -> dict[str, float]:
        """Of the last weight push to servers, on rank 0."""
        return self._weights.metrics if self._rewards is not None else {}

    @contextmanager
    def while_waiting(self, call: Callable[[], None]) -> Iterator[None]:
        """Inside, `call` is called on every rank at once, now and again, while responses are awaited."""
        if self._served is None:
            yield
            return
        before, self._served.on_heartbeat = self._served.on_heartbeat, call
        try:
            yield
        finally:
            self._served.on_heartbeat = before

    def evaluate(self, version: int) -> dict[str, float]:
        """Metrics of the present policy on the held-out prompts; empty without any. A collective."""
        if self.evaluator is None:
            return {}
        self.sync(version)
        groups = self.evaluator.collect(self.evaluator.submit(self.eval_prompts, self.config.eval.seed))
        self.timer.take()
        return summarise(groups, self.config.eval.k)

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
        """Restore the newest complete checkpoint; returns its step, None where there is none."""
        found = checkpoint.complete(self.checkpoints)
        if not found:
            return None
        state = checkpoint.load(found[-1], self.policy)
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
                model.about_to_change()

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
            for part in (self._rewards, self._served, self.profiler):
                if part is not None:
                    opened.enter_context(part)
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._served is not None and isinstance(self._weights, ServedWeights):
            self._weights.close()
        self._opened.__exit__(kind, error, trace)
        if self._engine is not None:
            self._engine.close()

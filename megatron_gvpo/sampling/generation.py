"""What samples from the policy: an engine, the way of the weights to it, the rewards of its responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Self

import torch

from megatron_gvpo.config.schema import Config, ConfigError, SamplingConfig, read_model_config
from megatron_gvpo.data.task import Task, load_task
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.checkpoint.convert import load_newest
from megatron_gvpo.megatron.scorer import Scorer
from megatron_gvpo.observe import PhaseTimer
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.runtime.collectives import first_problem
from megatron_gvpo.runtime.environment import prepare
from megatron_gvpo.sampling.collect import EmbeddedRollouts, Rollouts
from megatron_gvpo.sampling.embedded import LocalEngine
from megatron_gvpo.sampling.evaluation import summarise
from megatron_gvpo.sampling.samplers import EngineSampler
from megatron_gvpo.sampling.served import ServedRollouts
from megatron_gvpo.weights.in_process import EmbeddedWeights
from megatron_gvpo.weights.push import WeightPush
from megatron_gvpo.weights.sync import ServedWeights


class Generation:
    """The embedded engine or servers, and reward workers. A context manager: they end with it."""

    def __init__(self, config: Config, task: Task, policy: Scorer, timer: PhaseTimer) -> None:
        self._config, self._task, self._timer = config, task, timer
        self._engine: LocalEngine | None = None
        self._served: ServedRollouts | None = None
        self._rollouts: Rollouts
        self._weights: WeightPush
        self._rewards = RewardPool(config.rewards)
        weights = partial(policy.weights, on_host=False)
        if config.rollout.engine == "local":
            self._engine = LocalEngine(
                config.model.path,
                task.tokenizer,
                device=parallel.device(),
                dtype=getattr(torch, config.model.dtype),
                batch_size=config.rollout.batch_size,
                end_token_id=task.end_token_id,
            )
            self._weights = EmbeddedWeights(self._engine, weights)
            self._rollouts = EmbeddedRollouts(self._engine)
        else:
            model = read_model_config(config.model.path)
            self._rollouts = self._served = ServedRollouts(
                config, task.tokenizer, task.end_token_id, model, policy.memory
            )
            score = partial(policy.score, temperature=1.0)
            self._weights = ServedWeights(config, self._served, weights, score, task.prompts)

    def sampler(
        self,
        n: int,
        sampling: SamplingConfig | None = None,
        shares: Callable[..., list[int]] | None = None,
    ) -> EngineSampler:
        """Of `n` responses a prompt, and their rewards; `sampling`: default the configuration's."""
        return EngineSampler(
            self._rollouts, self._rewards, self._timer, n, sampling or self._config.rollout, shares
        )

    def sync(self, version: int) -> None:
        """Give the engine the policy's weights, unless it has them. A collective."""
        if self._weights.version != version:
            with self._timer.phase("sync"):
                self._weights.push(version)

    @property
    def shares_gpus(self) -> bool:
        """Whether the engine has the trainer's own GPUs, so that only one of them can work at a time."""
        return self._served is not None and self._served.memory is not None

    @property
    def sync_metrics(self) -> dict[str, float]:
        """Of the last weight push to servers, on rank 0."""
        return self._weights.metrics

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
        if not self._task.eval_prompts:
            return {}
        self.sync(version)
        options = self._config.eval
        sampler = self.sampler(options.n, options.sampling)
        groups = sampler.collect(sampler.submit(self._task.eval_prompts, options.seed))
        self._timer.take()
        return summarise(groups, options.k)

    def __enter__(self) -> Self:
        with ExitStack() as opened:  # what is open already ends where the next cannot be opened
            problem = None
            try:
                opened.enter_context(self._rewards)
            except ConfigError as error:  # perhaps of this node alone, where a file is missing
                problem = str(error)
            if (said := first_problem(problem)) is not None:
                raise ConfigError(said)
            if self._served is not None:
                opened.enter_context(self._served)
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._weights, ServedWeights):
            self._weights.close()
        self._opened.__exit__(kind, error, trace)
        if self._engine is not None:
            self._engine.close()


def evaluate(config: Config, resume: bool) -> dict[str, float]:
    """Metrics of `model.path`, or of the run's newest checkpoint, on the held-out prompts. A collective.

    No gradients and no optimizer are built: most of the memory that training takes. Raises ConfigError,
    DataError, CheckpointError, RolloutError.
    """
    prepare(config)
    task = load_task(config)
    policy = Scorer(config)
    step = load_newest(config, policy.model) if resume else 0
    with Generation(config, task, policy, PhaseTimer()) as generation:
        return generation.evaluate(step)

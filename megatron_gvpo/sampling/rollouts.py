"""The engine and the reward workers of a run, opened and closed together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from megatron_gvpo.core.collectives import all_ranks_agree
from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Group
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.megatron.scorer import Scorer
from megatron_gvpo.observe import PhaseTimer
from megatron_gvpo.observe.rollout_metrics import summarise
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.rewards.served import ServedRewards
from megatron_gvpo.sampling.engine import NoEngine, RolloutEngine, engine_class
from megatron_gvpo.sampling.samplers import REWARDS, EngineSampler, Outages
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.types import OnWait


class Rollouts:
    """Samples responses from the policy and scores them. A context manager: engine and workers end with it.

    A run that samples nothing (another sampler than the engine, no held-out prompts) has `NoEngine` and no
    workers.
    """

    def __init__(
        self,
        config: Config,
        cards: ModelCards,
        task: Task,
        policy: Scorer,
        timer: PhaseTimer,
        heartbeat: OnWait = None,
    ) -> None:
        """`heartbeat` is called on every rank at once from time to time during a wait."""
        self._config = config
        self._task = task
        self._timer = timer
        self._heartbeat = heartbeat
        self._samples = config.samples_responses
        talks = config.rollout.conversation
        self._rewards = RewardPool(config.rewards, () if talks is None else talks.counts)
        self._most_lost = None if talks is None else talks.max_lost
        self._outages, self._of_members = self._outages_now(), self._outages_now(is_limited=False)
        self._served = None
        if config.rewards.is_served:
            gpus = config.first_gpus()
            self._served = ServedRewards(config.rewards, cards, config.output_dir, gpus)
        self._unscored = self._unscored_now()
        self._unscored_of_members = self._unscored_now(is_limited=False)
        self.engine: RolloutEngine[Any] = NoEngine()
        if self._samples:
            build = engine_class(config.rollout.engine)
            self.engine = build(config.model, config.rollout, config.output_dir, cards, task, policy)

    def sampler(
        self,
        n: int,
        sampling: SamplingConfig | None = None,
        shares: Callable[..., list[int]] | None = None,
        counted: bool = False,
    ) -> EngineSampler[Any]:
        """A sampler of `n` scored responses to a prompt; `sampling` is `rollout` by default.

        `counted`: `metrics` include the sampler's losses to outages.
        """
        outages = self._outages if counted else self._outages_now()
        unscored = self._unscored if counted else self._unscored_now()
        return self._sampler(n, sampling or self._config.rollout, outages, unscored, shares)

    def sampler_of_members(self, n: int) -> EngineSampler[Any]:
        """A sampler of `n` scored responses to a prompt, of which any number may be lost to outages."""
        return self._sampler(n, self._config.rollout, self._of_members, self._unscored_of_members)

    def _sampler(
        self,
        n: int,
        sampling: SamplingConfig,
        outages: Outages | None,
        unscored: Outages | None,
        shares: Callable[..., list[int]] | None = None,
    ) -> EngineSampler[Any]:
        return EngineSampler(
            self.engine,
            self._rewards,
            self._timer,
            n,
            sampling,
            shares=shares,
            outages=outages,
            served=self._served,
            unscored=unscored,
            heartbeat=self._heartbeat,
        )

    def _outages_now(self, is_limited: bool = True) -> Outages | None:
        return None if self._most_lost is None else Outages(self._most_lost if is_limited else None)

    def _unscored_now(self, is_limited: bool = True) -> Outages | None:
        most = self._config.rewards.max_lost if is_limited else None
        return None if self._served is None else Outages(most, REWARDS)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the engine's last sync, of reward models, and of the last batch's losses to outages."""
        parts = (self._served, self._outages, self._unscored)
        metrics = dict(self.engine.metrics)
        for part in parts:
            metrics |= {} if part is None else part.metrics
        return metrics

    def sync(self, version: int) -> None:
        """Give the engine the policy's weights, unless it has this version. A collective."""
        if self.engine.version != version:
            with self._timer.phase("sync"):
                self.engine.sync(version)

    def evaluate(self, version: int) -> tuple[list[Group], dict[str, float]]:
        """Responses of the present policy to the held-out prompts, and metrics; empty without prompts.

        A collective.
        """
        if not self._task.eval_prompts:
            return [], {}
        self.sync(version)
        options = self._config.eval
        sampler = self.sampler(options.n, options.sampling)
        groups = sampler.finish(sampler.begin(self._task.eval_prompts, options.seed))
        self._timer.take()
        complete = [group for group in groups if len(group.rollouts) >= max(options.k, default=1)]
        if not complete:
            raise RolloutError("evaluation: every held-out prompt lost responses to outages")
        metrics = summarise(complete, options.k, options.right_at, *self._config.rewards.components[:1])
        if self._served is not None or self._most_lost is not None:
            wanted = options.n * len(self._task.eval_prompts)
            metrics["eval/lost"] = 1 - sum(len(group.rollouts) for group in complete) / wanted
        return groups, metrics

    def __enter__(self) -> Self:
        with ExitStack() as opened:  # closes earlier parts if a later one fails to open
            if self._samples:
                with all_ranks_agree(ConfigError):  # a file may be missing on one node alone
                    opened.enter_context(self._rewards)
                if self._served is not None:
                    opened.enter_context(self._served)
            opened.enter_context(self.engine)
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

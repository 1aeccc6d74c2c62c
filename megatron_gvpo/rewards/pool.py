"""Rewards in worker processes: a reward that hangs or crashes costs its rollout, not the run.

Workers are plain subprocesses, because `multiprocessing` would run the user's script again in each. They
answer job by job, so that the pool always knows which job took a worker down.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from itertools import batched
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Self

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.real_number import LARGEST
from megatron_gvpo.core.user_functions import contents
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.rewards.conversation_rewards import NamedCounts
from megatron_gvpo.settings.rewards import RewardsConfig
from megatron_gvpo.workers.messages import Job, WireError, prompt_bytes, rollout_bytes
from megatron_gvpo.workers.output import Printout
from megatron_gvpo.workers.reward_functions import Component
from megatron_gvpo.workers.reward_process import Failure, WorkerProcess

_CHUNK = 32  # jobs sent at once: enough to hide the way there and back, few enough to share evenly
_DEATHS = 3  # workers that may die in a row without a job to blame


class RewardPool:
    """Worker processes that score rollouts by functions. A context manager: they start and end with it.

    `counts` are the names of what every conversation counts, for `check`.
    """

    def __init__(self, config: RewardsConfig, counts: Sequence[str] = ()) -> None:
        self._config = config
        places = [(i, c) for i, c in enumerate(config.components) if c.served is None]
        self._weighed = [component for _, component in places]
        self._components = [Component(c.name, c.function, c.options, i) for i, c in places]
        self._files = contents(self._components)  # a worker that is replaced loads them as they are now
        self._named = NamedCounts(self._components, counts)
        self._printout = Printout([component.name for component in self._components])
        self._workers: list[WorkerProcess] = []
        self._deaths = 0
        self._told: dict[str, float] = {}  # by component, the share of failures in the last warning

    def __enter__(self) -> Self:
        """Start the workers. Raises ConfigError if a component's function cannot be loaded."""
        try:
            self._workers = [self._start() for _ in range(self._config.workers)]
            while not all(worker.ready for worker in self._workers):
                self._wait()
                for worker in self._workers:
                    worker.take()
                    if worker.failure is not None:
                        raise ConfigError(f"rewards: {worker.failure.reason}")
            self._printout.end_step()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> WorkerProcess:
        return WorkerProcess(self._components, self._files, self._config.timeout, self._printout)

    def _stop(self) -> None:
        while self._workers:
            self._workers.pop().stop()
        self._printout.end_step()

    def check(self, groups: Sequence[Group]) -> None:
        """Raises ConfigError if a component reads a count that no conversation of the first batch has."""
        self._named.check(groups)

    def score(self, groups: list[Group]) -> None:
        """Fill in `rewards`, `reward` and `reward_errors` of every rollout.

        A component that raises, exceeds the time limit, returns no finite number or kills its process
        is 0 for that rollout, and the error is recorded. Equal responses to a prompt are scored once. Raises
        ConfigError where a worker that is gone cannot be replaced.
        """
        same: dict[Any, list[Rollout]] = {}
        jobs: list[Job | Failure] = []
        for g, group in enumerate(groups):
            prompt = _prompt(group.prompt)
            for rollout in group.rollouts:
                if rollout.messages or rollout.counts:  # a conversation: the environment may have differed
                    key: tuple[Any, ...] = (g, id(rollout))
                else:
                    key = (g, rollout.text, tuple(rollout.token_ids), rollout.finish_reason)
                if key not in same:
                    jobs += self._jobs(len(jobs), prompt, rollout)
                same.setdefault(key, []).append(rollout)
        answers, count = self._evaluate(jobs), len(self._components)
        for number, rollouts in enumerate(same.values()):
            for rollout in rollouts:
                self._record(rollout, answers[number * count : (number + 1) * count])
        for worker in self._workers:
            worker.output.end_step()
        self._printout.end_step()

    def _jobs(self, first: int, prompt: bytes | Failure, rollout: Rollout) -> list[Job | Failure]:
        """A job of every component, numbered from `first`."""
        if isinstance(prompt, Failure):
            return [prompt] * len(self._components)
        response = rollout_bytes(rollout)
        return [Job(first + c, c, prompt, response) for c in range(len(self._components))]

    def warnings(self, groups: Sequence[Group]) -> list[str]:
        """Warnings about rewards that failed: the first time, and each time their share has doubled."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        said = []
        for component in self._components:
            errors = [r.reward_errors[component.name] for r in rollouts if component.name in r.reward_errors]
            if errors and len(errors) / len(rollouts) >= 2 * self._told.get(component.name, 0.0):
                self._told[component.name] = len(errors) / len(rollouts)
                [(commonest, _)] = Counter(errors).most_common(1)
                said.append(
                    f"rewards.components.{component.place} ({component.name}) failed for {len(errors)} of "
                    f"{len(rollouts)} responses, and counts 0 for them: {commonest}"
                )
        return said

    def _record(self, rollout: Rollout, answer: Sequence[float | Failure]) -> None:
        rewards, errors, limit = {}, {}, LARGEST / max(1, len(answer))
        for component, value in zip(self._weighed, answer, strict=True):
            if isinstance(value, Failure):
                errors[component.name] = value.reason
            elif abs(component.weight * value) > limit:  # the sum could be infinite
                errors[component.name] = (
                    f"{value:g} times its weight {component.weight:g} is beyond {limit:.2g}"
                )
            rewards[component.name] = 0.0 if isinstance(value, Failure) or component.name in errors else value
        rollout.rewards, rollout.reward_errors = rewards, errors
        rollout.reward = sum((c.weight * rewards[c.name] for c in self._weighed), 0.0)

    def _evaluate(self, jobs: Sequence[Job | Failure]) -> list[float | Failure]:
        """Each job's value, or its failure.

        A job whose worker was killed is tried once more: the kernel kills a worker where other processes have
        taken the memory, and its response should not pay for that.
        """
        answers: dict[int, float | Failure] = {i: j for i, j in enumerate(jobs) if isinstance(j, Failure)}
        tried_again: set[int] = set()
        todo = deque(batched([job for job in jobs if isinstance(job, Job)], _CHUNK))
        while len(answers) < len(jobs):
            for i, worker in enumerate(self._workers):
                if todo and worker.ready and not worker.pending:
                    chunk = todo.popleft()
                    try:
                        worker.give(chunk)
                    except OSError as error:  # it died while idle, so no job is to blame
                        todo.appendleft(chunk)
                        self._died(f"a worker cannot be given its jobs: {error}")
                        self._replace(i)
            self._wait()
            for i, worker in enumerate(self._workers):
                answers |= (found := worker.take())
                self._deaths = 0 if found or worker.pending else self._deaths
                if worker.failure is not None:
                    if not worker.pending:
                        self._died(worker.failure.reason)
                    elif worker.failure.killed and worker.pending[0].number not in tried_again:
                        tried_again.add(worker.pending[0].number)
                    else:
                        answers[worker.pending.popleft().number] = worker.failure
                    if worker.pending:
                        todo.appendleft(tuple(worker.pending))
                    self._replace(i)
        return [answers[number] for number in range(len(jobs))]

    def _wait(self) -> None:
        """Wait until a worker replies, prints, ends or is late."""
        left = min(worker.seconds_left for worker in self._workers)
        descriptors = [d for worker in self._workers for d in worker.waits_for()]
        wait(descriptors, None if left == math.inf else left)

    def _died(self, reason: str) -> None:
        """Raises ConfigError if workers die one after the other with no job to blame."""
        self._deaths += 1
        if self._deaths > _DEATHS:
            raise ConfigError(f"rewards: {reason}, {self._deaths} times in a row")

    def _replace(self, i: int) -> None:
        self._workers[i].stop()
        self._workers[i] = self._start()


def _prompt(prompt: Prompt) -> bytes | Failure:
    try:
        return prompt_bytes(prompt)
    except WireError as error:
        return Failure(f"its data record cannot be sent to a worker: {error}")

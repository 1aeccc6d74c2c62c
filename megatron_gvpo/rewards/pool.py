"""Rewards in worker processes: a reward that hangs or crashes costs its rollout, not the run.

Workers are plain subprocesses, because `multiprocessing` would run the user's script again in each. They
answer job by job, so that the pool always knows which job took a worker down.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import batched
from multiprocessing import Pipe
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Self

from megatron_gvpo.config.schema import ConfigError, RewardsConfig
from megatron_gvpo.rewards.registry import Component, Job
from megatron_gvpo.types import Group, Rollout

_START = 600.0  # seconds that a worker has to import its functions
_CHUNK = 32  # jobs sent at once: enough to hide the way there and back, few enough to share evenly


class RewardPool:
    """Worker processes that score rollouts. A context manager: they start and end with it."""

    def __init__(self, config: RewardsConfig) -> None:
        self._config = config
        self._components = [Component(c.name, c.function, c.options) for c in config.components]
        self._workers: list[_Worker] = []
        self._told: dict[str, float] = {}  # by component, the share of failures in the last warning

    def __enter__(self) -> Self:
        """Start the workers. Raises ConfigError where a component's function cannot be loaded."""
        try:
            for _ in range(self._config.workers):
                self._workers.append(_Worker(self._components, self._config.timeout))
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        while self._workers:
            self._workers.pop().stop()

    def score(self, groups: list[Group]) -> None:
        """Fill in `rewards`, `reward` and `reward_errors` of every rollout.

        A component that raises, exceeds the time limit, returns no finite number or kills its process
        is 0 for that rollout, and the error is recorded. Equal responses to a prompt are scored once.
        """
        same: dict[Any, list[Rollout]] = {}
        jobs = []
        for g, group in enumerate(groups):
            for rollout in group.rollouts:
                key = (g, rollout.text, tuple(rollout.token_ids), rollout.finish_reason)
                if key not in same:
                    jobs += [Job(c, group.prompt, rollout) for c in range(len(self._components))]
                same.setdefault(key, []).append(rollout)
        answers, count = self._evaluate(jobs), len(self._components)
        for number, rollouts in enumerate(same.values()):
            for rollout in rollouts:
                self._record(rollout, answers[number * count : (number + 1) * count])

    def warnings(self, groups: Sequence[Group]) -> list[str]:
        """Warnings about rewards that failed: the first time, and each time their share has doubled."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        said = []
        for i, component in enumerate(self._components):
            errors = [r.reward_errors[component.name] for r in rollouts if component.name in r.reward_errors]
            if errors and len(errors) / len(rollouts) >= 2 * self._told.get(component.name, 0.0):
                self._told[component.name] = len(errors) / len(rollouts)
                [(commonest, _)] = Counter(errors).most_common(1)
                said.append(
                    f"rewards.components.{i} ({component.name}) failed for {len(errors)} of {len(rollouts)} "
                    f"responses, and counts 0 for them: {commonest}"
                )
        return said

    def _record(self, rollout: Rollout, answer: Sequence[float | str]) -> None:
        named = {c.name: value for c, value in zip(self._components, answer, strict=True)}
        rollout.reward_errors = {name: value for name, value in named.items() if isinstance(value, str)}
        rollout.rewards = {name: 0.0 if isinstance(value, str) else value for name, value in named.items()}
        rollout.reward = sum((c.weight * rollout.rewards[c.name] for c in self._config.components), 0.0)

    def _evaluate(self, jobs: Sequence[Job]) -> list[float | str]:
        """Each job's value, or its error."""
        answers: dict[int, float | str] = {}
        todo = deque(batched(range(len(jobs)), _CHUNK))
        while len(answers) < len(jobs):
            for i, worker in enumerate(self._workers):
                if todo and not worker.pending:
                    numbers = todo.popleft()
                    try:
                        worker.give(numbers, [jobs[number] for number in numbers])
                    except OSError:  # it died while idle, so no job is to blame
                        todo.appendleft(numbers)
                        self._replace(i)
            busy = [worker for worker in self._workers if worker.pending]
            wait([worker.connection for worker in busy], min((w.seconds_left for w in busy), default=0.0))
            for i, worker in enumerate(self._workers):
                answers |= worker.take()
                if worker.failure:
                    answers[worker.pending.popleft()] = worker.failure
                    if worker.pending:
                        todo.appendleft(tuple(worker.pending))
                    self._replace(i)
        return [answers[number] for number in range(len(jobs))]

    def _replace(self, i: int) -> None:
        self._workers[i].stop()
        self._workers[i] = _Worker(self._components, self._config.timeout)
        self._workers[i].wait_until_ready()


class _Worker:
    """The trainer's end of one worker process, and the numbers of the jobs that it has yet to answer."""

    def __init__(self, components: Sequence[Component], timeout: float) -> None:
        self.pending: deque[int] = deque()
        self.failure: str | None = None  # the reason why the first of `pending` gets no answer
        self._components, self._timeout = components, timeout
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_gvpo.rewards.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # so that what a reward started ends with its worker
            )

    def wait_until_ready(self) -> None:
        """Raises ConfigError where a component's function cannot be loaded, or not in time."""
        try:
            self.connection.send((sys.path, self._components))
            if not self.connection.poll(_START):
                functions = [component.function for component in self._components if component.function]
                raise ConfigError(
                    f"rewards: a worker was not ready after {_START:g} seconds: importing "
                    f"{', '.join(functions) or 'its functions'} takes longer, or waits for something"
                )
            problem = self.connection.recv()
        except (EOFError, OSError):
            code = self.stop(patience=5.0)
            raise ConfigError(f"rewards: a worker died while it started (exit code {code})") from None
        if problem is not None:
            index, text = problem
            component = self._components[index]
            key, value = ("function", component.function) if component.function else ("name", component.name)
            raise ConfigError(f"rewards.components.{index}.{key}={value}: {text}")

    def give(self, numbers: Sequence[int], jobs: Sequence[Job]) -> None:
        """Raises OSError where the process is gone."""
        self.connection.send(jobs)
        self.pending.extend(numbers)
        self._deadline = time.monotonic() + self._timeout

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def take(self) -> dict[int, float | str]:
        """The answers that have come; sets `failure` where the next one will not."""
        answers: dict[int, float | str] = {}
        try:
            while self.pending and self.connection.poll():
                value = self.connection.recv()
                answers[self.pending.popleft()] = value
                self._deadline = time.monotonic() + self._timeout
        except (EOFError, OSError):
            self.failure = f"it ended its process (exit code {self.stop(patience=5.0)})"
        else:
            if self.pending and not self.seconds_left:
                self.failure = f"it took longer than rewards.timeout={self._timeout:g} seconds"
        return answers

    def stop(self, patience: float = 0.0) -> int:
        """End the process, after `patience` seconds, and what it started; its exit code (-n: signal n)."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.connection.close()
        return self._process.wait()

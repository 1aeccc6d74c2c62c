"""Runs reward functions in worker processes: a function that hangs or crashes affects only its rollout.

Workers are plain subprocesses, because `multiprocessing` would run the user's script again in each. Workers
answer call by call, so that the pool always knows which call ended a worker.
"""

from __future__ import annotations

import math
import signal
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import batched
from multiprocessing.connection import wait
from typing import Any, NamedTuple, Self

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.plain_values import LARGEST
from megatron_gvpo.core.user_functions import contents
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.rewards.conversation_rewards import NamedCounts
from megatron_gvpo.settings.rewards import BUILT_IN, RewardConfig, RewardsConfig
from megatron_gvpo.workers import rewards as handler
from megatron_gvpo.workers.messages import (
    HUNG_UP,
    CallError,
    CallResult,
    Function,
    Importing,
    Score,
    Scores,
    WireError,
    prompt_bytes,
    rollout_bytes,
)
from megatron_gvpo.workers.output import Printout
from megatron_gvpo.workers.process import NOTICE, START, WorkerProcess, how_it_ended, wrong_message
from megatron_gvpo.workers.reaper import PATIENCE

_CHUNK = 32  # calls in one message: enough to hide its latency, few enough to share the work evenly
_WAIT = 1.0  # seconds of one wait for workers
_DEATHS = 3  # the number of workers in a row that may end without a call that caused it


class _Job(NamedTuple):
    """The evaluation of a rollout by the function of this index."""

    number: int
    function: int
    prompt: bytes
    rollout: bytes


class _Failure(NamedTuple):
    """The reason why a job has no reward. `is_killed`: SIGKILL ended its worker, perhaps the kernel's."""

    reason: str
    is_killed: bool = False


class RewardPool:
    """Worker processes that score rollouts by functions. A context manager: they start and end with it.

    `counts` are the names of the counts that every conversation has, for `check`.
    """

    def __init__(self, config: RewardsConfig, counts: Sequence[str] = ()) -> None:
        self._config = config
        # The functions, by their indices in rewards.components; the other components are models on servers.
        self._components = {i: c for i, c in enumerate(config.components) if c.served is None}
        self._functions = [_function(i, component) for i, component in self._components.items()]
        # Files are read at the start of the run, so that a worker that replaces another loads the same ones.
        self._files = contents([[function.spec, function.options] for function in self._functions])
        self._named_counts = NamedCounts(self._components, counts)
        self._printout = Printout([component.name for component in self._components.values()])
        self._workers: list[_RewardWorker] = []
        self._deaths = 0  # workers in a row that have ended without a job that caused it
        self._warned_shares: dict[str, float] = {}  # the share of failures in each component's last warning

    def __enter__(self) -> Self:
        """Start the workers. Raises ConfigError if a component's function cannot be loaded."""
        try:
            self._workers = [self._start() for _ in range(self._config.workers)]
            for worker in self._workers:
                worker.process.wait_ready()
            self._printout.end_step()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _start(self) -> _RewardWorker:
        return _RewardWorker(self._functions, self._files, self._config.timeout, self._printout)

    def _stop(self) -> None:
        while self._workers:
            self._workers.pop().process.stop()
        self._printout.end_step()

    def check(self, groups: Sequence[Group]) -> None:
        """Raises ConfigError if a component reads a count that no conversation of the first batch has."""
        self._named_counts.check(groups)

    def score(self, groups: list[Group]) -> None:
        """Fill in `rewards`, `reward` and `reward_errors` of every rollout.

        A component that raises, exceeds the time limit, kills its process or returns anything but a finite
        number is 0 for that rollout, and the error is recorded. Equal responses to a prompt are scored once.
        Raises ConfigError if a worker that has ended cannot be replaced.
        """
        equal: dict[Any, list[Rollout]] = {}
        jobs: list[_Job | _Failure] = []
        for g, group in enumerate(groups):
            prompt = _packed(group.prompt)
            for rollout in group.rollouts:
                if rollout.messages or rollout.counts:  # a conversation: the environment may have differed
                    key: tuple[Any, ...] = (g, id(rollout))
                else:
                    key = (g, rollout.text, tuple(rollout.token_ids), rollout.finish_reason)
                if key not in equal:
                    jobs += self._jobs(len(jobs), prompt, rollout)
                equal.setdefault(key, []).append(rollout)
        answers, count = self._evaluate(jobs), len(self._components)
        for number, rollouts in enumerate(equal.values()):
            for rollout in rollouts:
                self._record(rollout, answers[number * count : (number + 1) * count])
        for worker in self._workers:
            worker.process.output.end_step()
        self._printout.end_step()

    def _jobs(self, first: int, prompt: bytes | _Failure, rollout: Rollout) -> list[_Job | _Failure]:
        """A job of every component, numbered from `first`."""
        if isinstance(prompt, _Failure):
            return [prompt] * len(self._components)
        response = rollout_bytes(rollout)
        return [_Job(first + c, c, prompt, response) for c in range(len(self._components))]

    def warnings(self, groups: Sequence[Group]) -> list[str]:
        """Warnings about rewards that failed: the first time, and each time their share has doubled."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        messages = []
        for i, component in self._components.items():
            errors = [r.reward_errors[component.name] for r in rollouts if component.name in r.reward_errors]
            if not errors:
                continue
            share = len(errors) / len(rollouts)
            if share >= 2 * self._warned_shares.get(component.name, 0.0):
                self._warned_shares[component.name] = share
                [(commonest, _)] = Counter(errors).most_common(1)
                messages.append(
                    f"rewards.components.{i} ({component.name}) failed for {len(errors)} of "
                    f"{len(rollouts)} responses, and counts 0 for them: {commonest}"
                )
        return messages

    def _record(self, rollout: Rollout, answers: Sequence[float | _Failure]) -> None:
        """Set the rollout's rewards from the components' answers."""
        rewards, errors, limit = {}, {}, LARGEST / max(1, len(answers))
        components = self._components.values()
        for component, answer in zip(components, answers, strict=True):
            rewards[component.name] = 0.0
            if isinstance(answer, _Failure):
                errors[component.name] = answer.reason
            elif abs(component.weight * answer) > limit:  # the sum could be infinite
                errors[component.name] = (
                    f"{answer:g} times its weight {component.weight:g} is beyond {limit:.2g}"
                )
            else:
                rewards[component.name] = answer
        rollout.rewards, rollout.reward_errors = rewards, errors
        rollout.reward = sum((c.weight * rewards[c.name] for c in components), 0.0)

    def _evaluate(self, jobs: Sequence[_Job | _Failure]) -> list[float | _Failure]:
        """Return the value of each job, or its failure.

        A job whose worker was killed is tried once more, because the kernel may have killed the worker for
        the memory use of other processes.
        """
        answers: dict[int, float | _Failure] = {i: j for i, j in enumerate(jobs) if isinstance(j, _Failure)}
        retried: set[int] = set()
        todo = deque(batched([job for job in jobs if isinstance(job, _Job)], _CHUNK))
        while len(answers) < len(jobs):
            self._give(todo)
            self._wait()
            for i, worker in enumerate(self._workers):
                answers |= (taken := worker.take())
                if taken or worker.pending:
                    self._deaths = 0
                if worker.failure is not None:
                    answers |= self._without_answer(worker.pending, worker.failure, retried)
                    if worker.pending:
                        todo.appendleft(tuple(worker.pending))
                    self._replace(i)
        return [answers[number] for number in range(len(jobs))]

    def _give(self, todo: deque[tuple[_Job, ...]]) -> None:
        """Give each free worker some of the jobs."""
        for i, worker in enumerate(self._workers):
            if todo and worker.is_free:
                chunk = todo.popleft()
                try:
                    worker.give(chunk)
                except OSError as error:  # the worker ended while idle, so no job is the cause
                    todo.appendleft(chunk)
                    self._note_death(f"a worker cannot be given its jobs: {error}")
                    self._replace(i)

    def _without_answer(
        self, pending: deque[_Job], failure: _Failure, retried: set[int]
    ) -> dict[int, _Failure]:
        """Take the job that made a worker fail out of its `pending` jobs; returns the failure by its number.

        Empty if no job is the cause, or if the job is tried again.
        """
        if not pending:
            self._note_death(failure.reason)
            return {}
        if failure.is_killed and pending[0].number not in retried:
            retried.add(pending[0].number)
            return {}
        return {pending.popleft().number: failure}

    def _wait(self) -> None:
        """Wait a second, or until a worker replies, prints, ends or is late."""
        seconds = min(_WAIT, *(worker.seconds_left for worker in self._workers))
        wait([d for worker in self._workers for d in worker.process.descriptors()], seconds)

    def _note_death(self, reason: str) -> None:
        """Raises ConfigError if workers end one after the other without a job as the cause."""
        self._deaths += 1
        if self._deaths > _DEATHS:
            raise ConfigError(f"rewards: {reason}, {self._deaths} times in a row")

    def _replace(self, i: int) -> None:
        self._workers[i].process.stop()
        self._workers[i] = self._start()


class _RewardWorker:
    """One worker process, and the jobs that it has yet to answer."""

    def __init__(
        self, functions: Sequence[Function], files: Mapping[str, bytes], timeout: float, printout: Printout
    ) -> None:
        notice = min(NOTICE, timeout / 4)
        self.process = WorkerProcess(handler, "rewards", functions, files, printout, notice)
        self.pending: deque[_Job] = deque()
        # The reason for which the first job in `pending`, and every later one, gets no answer.
        self.failure: _Failure | None = None
        self._timeout = timeout
        self._deadline = math.inf  # deadline of the first job in `pending`
        self._latest_deadline = math.inf  # deadline of that job, however long its function imports modules

    @property
    def is_free(self) -> bool:
        return self.process.is_ready and not self.pending

    def give(self, jobs: Sequence[_Job]) -> None:
        """Send the jobs. Raises OSError if the process has ended."""
        indices: dict[bytes, int] = {}  # an index for each prompt and rollout; jobs may share them
        scores = [
            Score(
                job.number,
                job.function,
                indices.setdefault(job.prompt, len(indices)),
                indices.setdefault(job.rollout, len(indices)),
            )
            for job in jobs
        ]
        self.process.send(Scores(list(indices), scores))
        self.pending.extend(jobs)
        self._begin_job()

    def _begin_job(self) -> None:
        self._deadline = running_seconds() + self._timeout
        self._latest_deadline = running_seconds() + max(START, self._timeout)

    @property
    def seconds_left(self) -> float:
        """Seconds until a reply is late; infinite while none is due."""
        if not self.process.is_ready:
            return self.process.seconds_to_start()
        return max(0.0, self._deadline - running_seconds()) if self.pending else math.inf

    def take(self) -> dict[int, float | _Failure]:
        """The answers that have arrived, by the jobs' numbers.

        Sets `failure` if the next one will not arrive.

        Raises ConfigError if a component's function cannot be loaded, or not in time.
        """
        answers: dict[int, float | _Failure] = {}
        try:
            for reply in self.process.replies():
                if not self.pending or reply.call != self.pending[0].number:
                    if isinstance(reply, Importing):
                        continue  # the result was already under way when the call was cancelled
                    raise WireError("not an answer to the job")
                match reply:
                    case Importing():
                        self._deadline = min(running_seconds() + self._timeout, self._latest_deadline)
                        continue
                    case CallResult(_, reward):
                        answers[reply.call] = reward
                    case CallError(_, reason):
                        answers[reply.call] = _Failure(reason)
                self.pending.popleft()
                self._begin_job()
        except WireError as error:
            self.failure = _Failure(wrong_message(error))
        except (EOFError, OSError):
            code = self.process.stop(PATIENCE)
            self.failure = _Failure(self._end(code), is_killed=code == -signal.SIGKILL)
        else:
            if not self.seconds_left:
                self.failure = _Failure(f"it took longer than rewards.timeout={self._timeout:g} seconds")
        return answers

    def _end(self, code: int) -> str:
        """The problem of a process that has ended with this exit code."""
        if not self.process.is_ready:
            return self.process.end_of_start(code)
        if code == HUNG_UP:
            return "it closed, or read from, a descriptor of its process that is not its own"
        return f"it ended its process ({how_it_ended(code)})"


def _function(index: int, component: RewardConfig) -> Function:
    """The component's function, as it is sent to a worker."""
    key, value = ("name", component.name) if component.built_in else ("function", component.function)
    spec = component.function or BUILT_IN[component.name].function
    return Function(f"rewards.components.{index}.{key}={value}", spec, component.options)


def _packed(prompt: Prompt) -> bytes | _Failure:
    try:
        return prompt_bytes(prompt)
    except WireError as error:
        return _Failure(f"its data record cannot be sent to a worker: {error}")

"""Counts batches from which the policy cannot learn, and ends a run with too many of them in a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.groups import Group, Rollout

if TYPE_CHECKING:
    from megatron_gvpo.algorithms.config import AlgorithmConfig
    from megatron_gvpo.settings.rewards import RewardsConfig
    from megatron_gvpo.types import TrainBatch

SHAPED = "shaped"  # batches whose groups are all removed by shapers
SKIPPED = "skipped"  # batches whose updates are all skipped


class EmptyBatches:
    """Warns of the first batch of each kind that teaches nothing; too many in a row end the run.

    A batch teaches nothing where shapers leave none of its groups, where the loss has no signal in any group,
    where a component of the reward failed for every response, or where no update had a finite gradient. Every
    rank has the same groups, so all come to the same result.
    """

    def __init__(
        self, algorithm: AlgorithmConfig, rewards: RewardsConfig, max_tokens: int, max_empty_batches: int
    ) -> None:
        """`max_tokens`: `rollout.max_tokens`."""
        self._loss, self._limit = algorithm.loss, max_empty_batches
        self._taught = algorithm.needs_teacher  # a teacher gives a signal even if all rewards are equal
        self._weights = {c.name: c.weight for c in rewards.components}
        self._max_tokens = max_tokens
        self._in_a_row = Counter[str]()  # empty batches in a row, by kind
        self._warned: set[str] = set()
        self._has_ended = False  # true after a response that was not cut off

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the count of the interrupted run.

        If such batches have ended a run and the user has removed the cause, the resumed run gets one more
        batch.
        """
        counts: dict[str, int] = state.get("in_a_row", {})
        self._in_a_row.update({kind: min(count, self._limit - 1) for kind, count in counts.items()})

    def check(self, step: int, groups: Sequence[Group], mini_batches: Sequence[TrainBatch]) -> list[str]:
        """Returns warnings about the batch that a step trains on. Raises RolloutError at the limit."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        sampled = [rollout for rollout in rollouts if rollout.source == "policy"]
        problems = self._failed(sampled)
        has_signal = any(self._taught or self._loss.has_signal(rows) for rows in mini_batches)
        if not has_signal:
            problems["signal"] = lambda: self._no_signal(rollouts, mini_batches)
        warnings = self._count(step, problems, self._in_a_row.keys() - {SHAPED, SKIPPED})
        cut = bool(sampled) and all(rollout.finish_reason == "length" for rollout in sampled)
        if cut and self._first("cut"):
            limit = f"rollout.max_tokens={self._max_tokens}"
            warnings.append(
                f"step {step}: every conversation ended at a limit, {limit} or one of rollout.conversation "
                "(turns, turn_tokens, rollout_timeout): raise it, or see that conversations can end before"
                if any(rollout.turns for rollout in sampled)
                else f"step {step}: every response was cut off at {limit}: {self._why_cut()}"
            )
        self._has_ended |= bool(sampled) and not cut
        return warnings

    def check_shaped(
        self, step: int, groups: Sequence[Group], remaining: Sequence[Group], dropped: Mapping[str, int]
    ) -> list[str]:
        """Returns warnings about groups that went through the shapers. Raises RolloutError at the limit.

        `dropped`: the number of groups, by the shaper.
        """

        def sentence() -> str:
            rewards = [reward for group in groups for reward in group.rewards]
            by = ", ".join(f"{name} dropped {count}" for name, count in dropped.items())
            return (
                f"nothing is left to train on: {by} groups, whose rewards were from {min(rewards):g} to "
                f"{max(rewards):g}. If these are not what they should be, see rewards.components; otherwise "
                "loosen these shapers, take other prompts or a larger rollout.n"
            )

        return self._count(step, {} if remaining else {SHAPED: sentence}, {SHAPED})

    def check_updates(self, step: int, are_skipped: Sequence[bool]) -> list[str]:
        """Returns warnings about updates that were skipped. Raises RolloutError at the limit.

        `are_skipped`: for each update of the step.
        """

        def sentence() -> str:
            return (
                f"the gradient was not finite in {sum(are_skipped)} of {len(are_skipped)} updates, which "
                "left the weights as they were (train/skipped): the loss or the weights gave NaN or infinity"
            )

        is_empty = bool(are_skipped) and all(are_skipped)
        warnings = self._count(step, {SKIPPED: sentence} if is_empty else {}, {SKIPPED})
        if any(are_skipped) and not is_empty and self._first("some skipped"):
            warnings.append(f"step {step}: {sentence()}")
        return warnings

    def _count(self, step: int, problems: Mapping[str, Callable[[], str]], looked_for: Set[str]) -> list[str]:
        """Count how many batches in a row had each kind of problem; returns new warnings.

        `looked_for`: the kinds that this batch could have had. Those that are not in `problems` count from 0.
        """
        for kind in looked_for - problems.keys():
            self._in_a_row.pop(kind, None)
        self._in_a_row.update(problems.keys())
        for kind, text in problems.items():
            if (count := self._in_a_row[kind]) >= self._limit:
                raise RolloutError(
                    f"step {step}: {text()}. It has been so for {count} batches in a row, of which nothing "
                    "can be learned; train.max_empty_batches sets how many there may be"
                )
        limit = f"the run ends after {self._limit} such batches in a row (train.max_empty_batches)"
        return [f"step {step}: {text()}; {limit}" for kind, text in problems.items() if self._first(kind)]

    def _first(self, kind: str) -> bool:
        """True the first time that the run meets this kind."""
        is_new = kind not in self._warned
        self._warned.add(kind)
        return is_new

    def _why_cut(self) -> str:
        """Return the likely cause, which depends on whether earlier responses ended by themselves."""
        if self._has_ended:
            return (
                "responses of earlier steps ended before it, so the policy may have diverged: lower "
                "optimizer.lr, or raise the limit if responses have grown for a reason"
            )
        return "raise it, or see that the model knows its end token"

    def _failed(self, sampled: Sequence[Rollout]) -> dict[str, Callable[[], str]]:
        """The components that count and that failed for every response, each with a sentence about it."""

        def sentence(name: str) -> str:
            [(commonest, _)] = Counter(r.reward_errors[name] for r in sampled).most_common(1)
            return f"the reward {name} failed for all {len(sampled)} responses of the batch: {commonest}"

        return {
            f"reward {name}": lambda name=name: sentence(name)  # type: ignore[misc]
            for name, weight in self._weights.items()
            if weight and sampled and all(name in rollout.reward_errors for rollout in sampled)
        }

    def _no_signal(self, rollouts: Sequence[Rollout], mini_batches: Sequence[TrainBatch]) -> str:
        if not any(len(rows) for rows in mini_batches):
            return "no response of the batch is trained: all are masked"
        rewards = [rollout.reward for rollout in rollouts]
        low, high = min(rewards), max(rewards)
        between = f"all are {low:g}" if low == high else f"they are from {low:g} to {high:g}"
        lacks = "advantages are all 0" if self._loss.signal == "advantage" else "rewards differ in no group"
        return f"the loss {self._loss.name} has no signal in the batch: its {lacks} (rewards: {between})"

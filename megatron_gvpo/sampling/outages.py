"""Takes failed responses out of their groups: the outage of an environment or reward is not a reward of 0."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron_gvpo.core.collectives import is_first_rank
from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.core.redaction import hide
from megatron_gvpo.groups import LOST, Group

log = logging.getLogger(__name__)


class LostTo(NamedTuple):
    """A kind of outage, in messages and metrics."""

    what: str  # the thing that is lost
    cause: str
    key: str  # configuration key of the largest share
    metrics: str  # prefix of the metrics' names


ENVIRONMENTS = LostTo(
    "conversations", "failures of their environment", "rollout.conversation.max_lost", "env"
)
REWARDS = LostTo("responses", "reward models or judges that gave no score", "rewards.max_lost", "reward")


class Outages:
    """Counts what batches lost to a kind of outage.

    A group that keeps fewer than two members of several is dropped. Raises RolloutError, with the commonest
    cause, for a batch that lost all of its responses, or a larger share than `most`. None never raises: it is
    for the few responses that a method's members ask for, of which one is a large share.
    """

    def __init__(self, most: float | None, kind: LostTo = ENVIRONMENTS) -> None:
        self._most, self._kind = most, kind
        self.metrics: dict[str, float] = {}  # metrics of the last sampled batch
        self._told = 0.0  # the largest share that was reported

    def taken_out(self, groups: Sequence[Group]) -> list[Group]:
        """The groups without the responses that were lost. Every rank has the same."""
        if not groups:  # an earlier kind of outage took them all
            return []
        wanted = sum(len(group.rollouts) for group in groups)
        causes = Counter(r.text for group in groups for r in group.rollouts if r.finish_reason == LOST)
        smaller = [
            replace(group, rollouts=[r for r in group.rollouts if r.finish_reason != LOST])
            for group in groups
        ]
        pairs = zip(groups, smaller, strict=True)
        remaining = [small for group, small in pairs if len(small.rollouts) >= min(2, len(group.rollouts))]
        lost = causes.total() / wanted
        name = self._kind.metrics
        self.metrics = {f"{name}/lost": lost, f"{name}/dropped_groups": float(len(groups) - len(remaining))}
        if not causes:
            return remaining
        [(cause, count)] = causes.most_common(1)
        message = (
            f"{causes.total()} of {wanted} {self._kind.what} were lost to {self._kind.cause}, "
            f"{count} of them to: {cause}"
        )
        if self._most is not None and (lost > self._most or not remaining):
            raise RolloutError(hide(f"{message} ({self._kind.key}={self._most:g})"))
        if lost >= 2 * self._told:
            self._told = lost
            if is_first_rank():
                log.warning(hide(message))
        return remaining

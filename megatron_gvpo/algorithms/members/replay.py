"""GVPO's history: earlier responses to a prompt that join its group (arXiv 2504.19599, Figure 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from pydantic import PositiveInt

from megatron_gvpo.algorithms.members.base import Member, MemberContext
from megatron_gvpo.groups import Group, rollout_of


class Replay(Member):
    """`count` earlier responses to the same prompt join each group, the newest first.

    A prompt that was not seen before has none: its group is smaller. Rewards are stored with the response;
    its log-probs under the reference are computed again, as GVPO needs them. `keep`: how many responses a
    prompt are held, and written into checkpoints.
    """

    name: Literal["replay"] = "replay"
    count: PositiveInt = 1
    keep: PositiveInt | None = None  # null: count

    def build(self) -> History:
        return History(self.count, max(self.count, self.keep or self.count))


class History:
    """The newest responses to every prompt, as the fields of their `Rollout`: what a checkpoint writes."""

    def __init__(self, count: int, keep: int) -> None:
        self._count, self._keep = count, keep
        self._held: dict[str, tuple[dict[str, Any], ...]] = {}

    def __call__(self, groups: Sequence[Group], context: MemberContext) -> list[Group]:
        joined = []
        for group in groups:
            stored = self._held.get(group.prompt.id, ())
            own = [r for r in group.rollouts if r.source == "policy"]
            new = tuple(asdict(replace(r, source="replay", routing=None)) for r in own)
            self._held[group.prompt.id] = (*stored, *new)[-self._keep :]
            earlier = [rollout_of(fields) for fields in stored[-self._count :]]
            joined.append(replace(group, rollouts=[*group.rollouts, *earlier]))
        return joined

    def state_dict(self) -> dict[str, Any]:
        return dict(self._held)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._held = {prompt: tuple(stored) for prompt, stored in state.items()}

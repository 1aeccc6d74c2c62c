"""Shapers that keep, mask or drop responses and groups."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field, PositiveInt

from megatron_gvpo.algorithms.base import Component, RunSizes, only_with
from megatron_gvpo.algorithms.shapers.base import Shaper, value_of
from megatron_gvpo.groups import Group, Rollout


class Keep(Shaper):
    """Rejection sampling: keep only the right responses of a group, or its best one (the first of equals).

    A group without such responses is dropped.
    """

    changes_rewards: ClassVar[bool] = False

    name: Literal["keep"] = "keep"
    which: Literal["right", "best"] = "right"  # the responses that stay
    right: float = 0.5
    by: Component | None = None  # a component of the reward; null: all of it

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(right=(self.which == "right", "which=right"))

    @property
    def components_read(self) -> tuple[Component, ...]:
        return () if self.by is None else (self.by,)

    @property
    def reads_rewards(self) -> bool:
        return self.by is None

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        def filtered(group: Group) -> list[Rollout]:
            if self.which == "best":
                return [max(group.rollouts, key=lambda rollout: value_of(rollout, self.by))]
            return [rollout for rollout in group.rollouts if value_of(rollout, self.by) > self.right]

        return [replace(group, rollouts=rollouts) for group in groups if (rollouts := filtered(group))]


class Drop(Shaper):
    """Drop the groups whose responses are `all_right` (NGRPO), `all_wrong` or `all_equal`."""

    changes_rewards: ClassVar[bool] = False

    name: Literal["drop"] = "drop"
    which: Literal["all_right", "all_wrong", "all_equal"] = "all_equal"  # the groups that go
    right: float = 0.5  # a value above this is right
    by: Component | None = None  # the reward component that is judged; null: the reward

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(right=(self.which != "all_equal", "which=all_right or all_wrong"))

    @property
    def drops_equal_rewards(self) -> bool:  # type: ignore[override]
        return self.which == "all_equal"

    @property
    def components_read(self) -> tuple[Component, ...]:
        return () if self.by is None else (self.by,)

    @property
    def reads_rewards(self) -> bool:
        return self.by is None

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        def dropped(group: Group) -> bool:
            values = [value_of(rollout, self.by) for rollout in group.rollouts]
            if self.which == "all_equal":
                return len(set(values)) == 1
            return all((value > self.right) == (self.which == "all_right") for value in values)

        return [group for group in groups if not dropped(group)]


class MaskTruncated(Shaper):
    """Truncated responses have no gradient, and count in their group (DAPO's overlong filtering).

    A loss that reads rewards itself, such as GVPO, does not see these responses: its groups consist of the
    others.

    MicroCoder-GRPO's conditions (arXiv 2603.07777) limit this to wrong responses (`only_wrong`), to those
    whose last `repeat` tokens differ from the `repeat` tokens before, and to a `share` of these, chosen by a
    hash of their tokens.
    """

    changes_rewards: ClassVar[bool] = False
    masks_responses: ClassVar[bool] = True

    name: Literal["mask_truncated"] = "mask_truncated"
    only_wrong: bool = False  # leave right responses alone
    repeat: PositiveInt | None = None
    share: float = Field(1.0, ge=0, le=1)
    right: float = 0.5  # a reward above this is right

    @property
    def ineffective_options(self) -> dict[str, str]:
        return only_with(right=(self.only_wrong, "only_wrong=true"))

    @property
    def reads_rewards(self) -> bool:
        return self.only_wrong

    def idle_in(self, run: RunSizes) -> str | None:
        if self.repeat is None or run.max_tokens is None or 2 * self.repeat <= run.max_tokens:
            return None
        return f"repeat={self.repeat}: no response of rollout.max_tokens={run.max_tokens} has twice as many"

    def __call__(self, groups: Sequence[Group], step: int) -> list[Group]:
        def masked(rollout: Rollout) -> bool:
            if rollout.finish_reason != "length" or (self.only_wrong and rollout.reward > self.right):
                return False
            if self.repeat is not None and _repeats(rollout.token_ids, self.repeat):
                return False
            return _fraction(rollout.token_ids) < self.share

        return [
            replace(group, rollouts=[replace(r, trained=r.trained and not masked(r)) for r in group.rollouts])
            for group in groups
        ]


def _repeats(token_ids: Sequence[int], count: int) -> bool:
    return len(token_ids) >= 2 * count and token_ids[-count:] == token_ids[-2 * count : -count]


def _fraction(token_ids: Sequence[int]) -> float:
    """A number in [0, 1) that depends on the tokens alone, so that every rank decides alike."""
    digest = hashlib.blake2b(",".join(map(str, token_ids)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64

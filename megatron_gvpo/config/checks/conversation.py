"""Checks of `rollout.conversation` against the other settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_gvpo.rewards.registry import COUNT

if TYPE_CHECKING:
    from megatron_gvpo.config.schema import Config


def check_conversation(config: Config) -> None:
    """Raises ValueError, which names the keys, for a combination that cannot work."""
    _components(config)
    if config.rollout.conversation is None:
        _no_reader(config)
    else:
        _possible(config)


def _no_reader(config: Config) -> None:
    """Refuse blocks that read turns if there are none."""
    algorithm = config.algorithm
    reader = next((place for place in algorithm.blocks_inside() if place.block.needs_turns), None)
    if reader is not None:
        raise ValueError(
            f"algorithm.{reader.label} reads the turns of conversations: set rollout.conversation, or "
            "the options with which it reads single responses"
        )


def _possible(config: Config) -> None:
    """Refuse what knows only one response to a prompt."""
    algorithm, reason = config.algorithm, None
    if config.rollout.router_replay:
        reason = "rollout.router_replay=true: the experts of several turns are not recorded"
    elif config.train.share_prompts:
        reason = "train.share_prompts=true: every turn has a context of its own"
    elif single := [member.name for member in algorithm.members if not member.takes_conversations]:
        reason = f"algorithm.members: {single[0]} adds or changes single responses"
    elif algorithm.prior.greedy:
        reason = f"algorithm.prior={algorithm.prior.name}: it takes one response a prompt, which may be lost"
    if reason:
        raise ValueError(f"rollout.conversation is not possible with {reason}")


def _components(config: Config) -> None:
    """Refuse reward components that would be 0 for every response: they read what no conversation counts.

    The names that a user's environment counts are known when it has answered (`rewards.counted.NamedCounts`).
    """
    talks = config.rollout.conversation
    for i, component in enumerate(config.rewards.components):
        key = f"rewards.components.{i}"
        pays, counts = component.pays_turns, component.function == COUNT
        if not pays and not counts:
            continue
        if talks is None:
            raise ValueError(f"{key} ({component.name}) reads conversations: set rollout.conversation")
        if pays and talks.has_tools:
            raise ValueError(
                f"{key}.name={component.name}: tools pay nothing, so it would be 0 for every response: name "
                "a reward that reads rollout.messages"
            )
        of = component.options.get("of")
        if counts and not isinstance(of, str):
            raise ValueError(f"{key}.options.of={of}: want the name of a count, such as turns")
        if counts and talks.has_tools and of not in talks.counts:
            raise ValueError(
                f"{key}.options.of={of}: conversations with tools have no such count; they have: "
                f"{', '.join(talks.counts)}"
            )

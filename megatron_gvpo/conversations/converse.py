"""One conversation: the policy and the environment take turns until one of them, or a limit, ends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from megatron_gvpo.conversations.environments import EnvironmentLost, Episode
from megatron_gvpo.conversations.template import Template
from megatron_gvpo.conversations.worker import too_long
from megatron_gvpo.data.sources import DataError
from megatron_gvpo.groups import Rollout
from megatron_gvpo.rollout.request import Request, derived_seed
from megatron_gvpo.turns import Turn

Say = Callable[[Request], Awaitable[Rollout]]  # the policy's next turn, as the response to a context
LOST = "lost"  # the finish reason of a conversation whose environment failed; `text` says how


@dataclass(frozen=True)
class Limits:
    """Most turns of the policy, and most tokens: in all after the prompt, of a turn, of an observation."""

    turns: int
    max_tokens: int
    turn_tokens: int
    observation_tokens: int


async def converse(
    say: Say, episode: Episode, template: Template, prompt: tuple[int, ...], seed: int, limits: Limits
) -> Rollout:
    """Hold a conversation about `prompt`; turn i of the policy is sampled with a seed made from `seed` and i.

    The policy speaks last. `finish_reason`: "stop" where the policy or the environment ended it, "length"
    where no tokens or turns were left, "lost" where the environment failed.
    """
    rollout = Rollout([], [], "", "stop")
    context, left = list(prompt), limits.max_tokens
    given: tuple[int, ...] = ()
    counts = {"environment_reward": 0.0, "observation_tokens": 0.0}
    try:
        while True:
            said = await say(
                Request(
                    tuple(context),
                    1,
                    derived_seed(seed, len(rollout.turns)),
                    min(left, limits.turn_tokens),
                )
            )
            append_turn(rollout, said, given, after=len(rollout.turns) - 1)
            context += said.token_ids
            left -= len(said.token_ids)
            text = template.text(said.token_ids)
            rollout.messages.append({"role": "assistant", "content": text})
            rollout.finish_reason = said.finish_reason
            if said.finish_reason == "length":
                break
            answer = await episode.step(text)
            rollout.turns[-1] = rollout.turns[-1]._replace(reward=answer.reward)
            for name, number in {**answer.counts, "environment_reward": answer.reward}.items():
                counts[name] = counts.get(name, 0.0) + number
            if answer.says is None:
                break
            messages, given = _observed(template, said.token_ids[-1], answer.says, limits, counts)
            if len(rollout.turns) == limits.turns or len(given) >= left:
                rollout.finish_reason = "length"
                break
            rollout.messages += messages
            context += given
            left -= len(given)
            counts["observation_tokens"] += len(given)
    except EnvironmentLost as error:
        return Rollout([], [], str(error), LOST)
    finally:
        episode.end()
    rollout.counts = counts
    return rollout


def append_turn(
    rollout: Rollout,
    said: Rollout,
    given: tuple[int, ...],
    after: int,
    keep: int | None = None,
    agent: str = "",
) -> None:
    """Add a turn: the policy's tokens, and what was given before them (see `turns.Turn`)."""
    begin = len(rollout.token_ids)
    spans = said.spans or [(said.weight_version, 0, len(said.token_ids))]
    for version, first, end in spans:
        if rollout.spans and rollout.spans[-1][0] == version:
            _, first, _ = rollout.spans.pop()
        else:
            first += begin
        rollout.spans.append((version, first, begin + end))
    rollout.turns.append(Turn(begin, after, keep, given, agent))
    rollout.token_ids += said.token_ids
    rollout.logprobs += said.logprobs
    rollout.weight_version = min(version for version, _, _ in rollout.spans)
    rollout.seconds = (rollout.seconds or 0.0) + (said.seconds or 0.0)
    rollout.server = said.server


def _observed(
    template: Template, last: int, messages: list[dict[str, Any]], limits: Limits, counts: dict[str, float]
) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """The environment's messages and their tokens; a note where they are too long. Raises EnvironmentLost."""
    try:
        given = template.given(last, messages)
    except DataError as error:  # for example, a role that the template does not know
        raise EnvironmentLost(str(error)) from None
    if len(given) <= limits.observation_tokens:
        return messages, given
    counts["observations_dropped"] = counts.get("observations_dropped", 0.0) + 1
    note = too_long(len(given), "tokens")
    messages = [{**messages[0], "content": note}]
    return messages, template.given(last, messages)

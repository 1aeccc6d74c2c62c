"""Prompts, rollouts and groups: plain Python, so that a reward worker holds them without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Source = Literal["policy", "replay", "exit", "demonstration", "file"]


class Scored(NamedTuple):
    """A response that the data set has, end token included, and its reward."""

    token_ids: tuple[int, ...]
    text: str
    reward: float


class Routing(NamedTuple):
    """The experts that an engine sent the tokens of a prompt and its response through, all but the last.

    `ids`: [tokens - 1, layers, per_token] in row order, of `width` bytes (1 or 2) each, little-endian. What
    stands there for a dense layer means nothing.
    """

    layers: int
    per_token: int
    width: int
    ids: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem. `token_ids` is what the engine gets; nothing is ever re-tokenised for training."""

    id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str | None = None
    demonstration: tuple[int, ...] | None = None  # a solution's token ids, end token included
    record: Mapping[str, Any] = field(default_factory=dict)  # the raw data record, for user rewards
    responses: tuple[Scored, ...] = ()  # what `sampler: file` trains on


@dataclass(slots=True)
class Rollout:
    """One response. `logprobs` are the engine's own (fp32, at the sampling temperature), one per token.

    `finish_reason`: "stop" (an end or stop token, which is the last of `token_ids`), "length"
    (truncated) or "abort". `spans` are (weight version, first token, end token), where more than one set of
    weights sampled the response; `weight_version` is the oldest. `rewards` holds the named components,
    `reward` their weighted sum; `reward_errors` says which component failed and how (such a component counts
    as 0). `source` says where it comes from: what no present engine sampled has `logprobs` of its time, or
    none. A response that is not `trained` counts in its group's statistics, and has no gradient. `routing` is
    there with `rollout.router_replay`, as the weights of the response's end routed all of it.
    """

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    weight_version: int = 0
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    reward_errors: dict[str, str] = field(default_factory=dict)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    source: Source = "policy"
    trained: bool = True
    routing: Routing | None = None


@dataclass(slots=True)
class Group:
    """The k rollouts of one prompt; k may differ between groups.

    `prior` is what the reward of this prompt was expected to be before these rollouts were seen: the reward
    of the greedy response, or what earlier rollouts say.
    """

    prompt: Prompt
    rollouts: list[Rollout]
    prior: float | None = None

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]

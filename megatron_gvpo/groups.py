"""Prompts with their images, rollouts and groups, in plain Python, so that reward workers need no torch."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from megatron_gvpo.supports import Support
from megatron_gvpo.turns import Turn, turn_of


class Image(NamedTuple):
    """An image of a prompt. `ImageProcessor.pixels` reads it from its source, on the ranks that need it."""

    source: str  # an absolute path, or a data: URL with the file's content
    digest: str  # BLAKE2b of the file's content, 128 bits in hexadecimal digits
    grid: tuple[int, int, int]  # the patches in time, height and width
    tokens: int  # prompt tokens that stand for the image


def image_of(values: Sequence[Any]) -> Image:
    """Returns an image from its values, after JSON or msgpack has turned tuples into lists."""
    source, digest, (time, height, width), tokens = values
    return Image(source, digest, (time, height, width), tokens)


Source = Literal["policy", "replay", "exit", "demonstration", "file"]


class Scored(NamedTuple):
    """A response from the data set, end token included, with its reward."""

    token_ids: tuple[int, ...]
    text: str
    reward: float


class Routing(NamedTuple):
    """The experts to which an engine sent the tokens of a prompt and its response, except the last token.

    `ids`: [tokens - 1, layers, per_token] in row order, of `width` bytes (1 or 2) each, little-endian. The
    values for a dense layer have no meaning.
    """

    layers: int
    per_token: int
    width: int
    ids: bytes


class Chat(NamedTuple):
    """A solution of several turns: the tokens from outside between its own, and its messages."""

    turns: tuple[Turn, ...]
    messages: tuple[dict[str, Any], ...]

    @property
    def observation_tokens(self) -> list[int]:
        """The number of tokens that are not the solution's own."""
        return [token for turn in self.turns for token in turn.given]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem. The engine and the training use the same `token_ids`; nothing is tokenised again."""

    id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str | None = None
    demonstration: tuple[int, ...] | None = None  # a solution's token ids, end token included
    record: Mapping[str, Any] = field(default_factory=dict)  # the raw data record, for user rewards
    responses: tuple[Scored, ...] = ()  # the responses in the data, for `sampler: file`
    images: tuple[Image, ...] = ()  # `token_ids` have `Image.tokens` placeholders for each, in this order
    demonstration_chat: Chat | None = None  # set for a solution of several turns
    prompt_key: str = "prompt"  # the field of `record` with the prompt, by its data set's `prompt_key`

    @property
    def demonstration_length(self) -> int:
        """Tokens of the solution, with those from outside between its turns."""
        chat = self.demonstration_chat
        return len(self.demonstration or ()) + (len(chat.observation_tokens) if chat is not None else 0)


@dataclass(slots=True)
class Rollout:
    """One response. `logprobs` are the engine's own (fp32, at the sampling temperature), one per token.

    `finish_reason`: "stop" (the last of `token_ids` is an end token, or completes a stop string) or "length"
    (truncated); a response that a push stopped is continued first. `spans` are (weight version, first token,
    end token), where more than one set of weights sampled the response; `weight_version` is the oldest.
    `rewards` holds the named components, `reward` their weighted sum; `reward_errors` holds the error of each
    component that failed (it counts as 0). `source` says where the response comes from; one that the present
    engine did not sample has the `logprobs` of the time when it was sampled, or none. A response that is not
    `trained` counts in its group's statistics and has no gradient. `routing` is set with
    `rollout.router_replay`: the routing of the whole response by the weights that sampled its end. `seconds`
    is the time that sampling took, and `server` the URL of the server that sampled the response's end.

    In a conversation, `token_ids`, `logprobs` and `spans` are the policy's own tokens only, of all its turns;
    `turns` has the environment's tokens. `messages` is the conversation after the prompt, as a chat, for
    judges and rewards. `counts` holds numbers that the environment and its limits gave, such as tool calls. A
    conversation whose environment failed has the `finish_reason` "lost", no tokens, and the cause as its
    text; it leaves its group before rewards are computed. A response that a reward model or a judge could not
    score is lost, too. `explanations` holds the judges', by component.
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
    turns: list[Turn] = field(default_factory=list)  # empty: one response
    messages: list[dict[str, Any]] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    explanations: dict[str, str] = field(default_factory=dict)
    seconds: float | None = None
    server: str | None = None
    support: Support | None = None  # with truncated sampling: the tokens over which `logprobs` are normalised


def joined_supports(first: Rollout, tokens: int, second: Rollout) -> Support | None:
    """The supports of `tokens` tokens of one response, and of another's after them; None without any."""
    if first.support is None and second.support is None:
        return None
    begin = first.support or Support.whole_vocabulary(tokens)
    return begin.then(second.support or Support.whole_vocabulary(len(second.token_ids)))


@dataclass(slots=True)
class Group:
    """The k rollouts of one prompt; k may differ between groups.

    `prior` is the expected reward of this prompt before these rollouts were seen, from the greedy response or
    from earlier rollouts.
    """

    prompt: Prompt
    rollouts: list[Rollout]
    prior: float | None = None

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]


def message_text(message: Mapping[str, Any]) -> str:
    """A chat message as text, also one of a program: its content, then each of its calls of tools as JSON.

    Content that is not a text is JSON, too.
    """
    content = message.get("content")
    parts = [content if isinstance(content, str) or content is None else json.dumps(content, default=str)]
    for call in message.get("tool_calls") or ():
        parts.append(json.dumps(call.get("function", call), ensure_ascii=False, default=str))
    return "\n".join(text for text in parts if text)


def utf8(text: str) -> str:
    """The text without halves of surrogate pairs, which data may have and UTF-8 cannot."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def demonstrated(prompt: Prompt, reward: float, source: Source, weight_version: int) -> Rollout:
    """The prompt's worked solution as a response. Raises ValueError for a prompt without one."""
    if prompt.demonstration is None:
        raise ValueError(f"prompt {prompt.id} has no demonstration")
    rollout = Rollout(
        list(prompt.demonstration), [], "", "stop", weight_version, reward=reward, source=source
    )
    if prompt.demonstration_chat is not None:
        rollout.turns = list(prompt.demonstration_chat.turns)
        rollout.messages = [dict(message) for message in prompt.demonstration_chat.messages]
    return rollout


def group_fields(group: Group) -> dict[str, Any]:
    """The group as JSON values."""
    return {**asdict(replace(group, rollouts=[])), "rollouts": [*map(rollout_fields, group.rollouts)]}


def group_of(values: Mapping[str, Any]) -> Group:
    """The inverse of `group_fields`, after JSON has turned tuples into lists."""
    rollouts = [rollout_of(fields) for fields in values["rollouts"]]
    return Group(prompt_of(values["prompt"]), rollouts, values["prior"])


def prompt_of(fields: Mapping[str, Any]) -> Prompt:
    """A prompt from its fields as JSON values."""
    prompt = dict(fields)
    for key in ("token_ids", "demonstration"):
        prompt[key] = None if prompt[key] is None else tuple(prompt[key])
    prompt["responses"] = tuple(Scored(tuple(ids), text, r) for ids, text, r in prompt["responses"])
    prompt["images"] = tuple(image_of(values) for values in prompt.get("images", ()))
    if (chat := prompt.get("demonstration_chat")) is not None:
        turns, messages = chat
        prompt["demonstration_chat"] = Chat(tuple(map(turn_of, turns)), tuple(messages))
    return Prompt(**prompt)


def rollout_fields(rollout: Rollout) -> dict[str, Any]:
    """The rollout as JSON values."""
    values = asdict(rollout)
    if rollout.routing is not None:
        *shape, ids = rollout.routing
        values["routing"] = [*shape, base64.b64encode(ids).decode()]
    if rollout.support is not None:
        values["support"] = [base64.b64encode(part).decode() for part in rollout.support]
    return values


def rollout_of(fields: Mapping[str, Any]) -> Rollout:
    """A rollout from its fields as JSON values, or as msgpack gives them, which keeps bytes."""
    routing, support = fields.get("routing"), fields.get("support")
    if routing is not None:
        layers, per_token, width, ids = routing
        routing = Routing(layers, per_token, width, _bytes(ids))
    if support is not None:
        support = Support(*map(_bytes, support))
    spans = [tuple(span) for span in fields["spans"]]
    turns = [turn_of(values) for values in fields.get("turns", ())]
    return Rollout(**{**fields, "spans": spans, "routing": routing, "support": support, "turns": turns})


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else base64.b64decode(value)


LOST = "lost"  # the finish reason of a conversation whose environment failed; `text` has the cause

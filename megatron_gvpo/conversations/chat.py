"""Chat completions in the form of OpenAI's interface: reads requests, compares messages, writes answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from megatron_gvpo.data.tool_calls import behind_thoughts, parser_of, thoughts
from megatron_gvpo.groups import Rollout, utf8
from megatron_gvpo.settings.sections import SamplingConfig

Message = dict[str, Any]

# Parameters that change the policy's distribution, and the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "seed": (None,),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "parallel_tool_calls": (None, True),
    "reasoning_effort": (None,),
    # Parameters that only vLLM and SGLang have.
    "chat_template_kwargs": (None, {}),
    "ignore_eos": (None, False),
    "min_tokens": (None, 0),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "json_schema": (None,),
    "continue_final_message": (None, False),
}
_FORMER = ("functions", "function_call")  # OpenAI's own names for tools and calls before there were tools
_DEEPEST = 100  # levels of nesting up to which a call's arguments become values; deeper ones stay a text
_CALL_BEGINS = {"hermes": "<tool_call>", "xml": "<function="}


class RequestRefused(Exception):  # noqa: N818 - an answer to a program
    """A request that is answered with an error: `status` is HTTP's, and `code` OpenAI's."""

    def __init__(self, message: str, code: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


class ChatRequest(BaseModel):
    """The body of a request; the sampling parameters are in `extra`."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = "policy"
    tools: list[dict[str, Any]] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    logprobs: bool | None = None
    user: str | None = None

    @property
    def extra(self) -> dict[str, Any]:
        return self.__pydantic_extra__ or {}

    @property
    def most(self) -> int | None:
        """The largest number of tokens of the answer."""
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(limits, default=None)

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return self.tools or []


def overrides(options: Mapping[str, Any], sampling: SamplingConfig) -> bool:
    """True if a request has options for another distribution than the run's; these are ignored."""
    run: dict[str, tuple[Any, ...]] = {
        "temperature": (None, sampling.temperature),
        "top_p": (None, sampling.top_p),
        "top_k": (None, sampling.top_k) if sampling.top_k else (None, -1, 0),
        "min_p": (None, sampling.min_p),
        "stop_token_ids": (None, [], [*sampling.stop_token_ids]),
    }
    stop = options.get("stop") or []
    return any(name in options and options[name] not in same for name, same in (run | _NEUTRAL).items()) or (
        stop != [] and [stop] != [*sampling.stop] and stop != [*sampling.stop]
    )


def check_former(values: Mapping[str, Any]) -> None:
    """Raises RequestRefused for functions and calls in OpenAI's form before tools, which would be lost."""
    if names := [name for name in _FORMER if values.get(name)]:
        raise RequestRefused(f"{names[0]} is not read: use tools and tool_calls", names[0])


def read_message(message: Mapping[str, Any]) -> Message:
    """A message with its content as text and its calls' arguments as values. Raises RequestRefused.

    Thinking parts beside its content stay, for the chat template.
    """
    check_former(message)
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            raise RequestRefused(
                "a message has content that is not a text, which the policy cannot read", "no_text"
            )
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or not isinstance(content, str | None):
        raise RequestRefused("a message needs a role, and a text as its content", "invalid_messages")
    read: Message = {"role": "system" if role == "developer" else role, "content": content or ""}
    if calls := message.get("tool_calls"):
        read["tool_calls"] = [_read_call(call) for call in calls]
    if thought := thoughts(message):
        read["reasoning_content"] = thought
    named = ("name", "tool_call_id")
    return read | {name: str(message[name]) for name in named if message.get(name) is not None}


def _read_call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
    except (TypeError, KeyError):
        raise RequestRefused(
            "a tool call needs a function with name and arguments", "invalid_messages"
        ) from None
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # otherwise the template writes the text
            values = json.loads(arguments)
            json.dumps(values, ensure_ascii=False).encode()  # refuses half a surrogate pair
            arguments = arguments if _is_deep(values, _DEEPEST) else values
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": str(name), "arguments": arguments},
    }


def _is_deep(values: Any, deepest: int) -> bool:
    """True if lists and objects are nested more than `deepest` levels: too deep for a message."""
    if deepest < 0:
        return True
    inner = values.values() if isinstance(values, dict) else values
    return isinstance(values, dict | list) and any(_is_deep(value, deepest - 1) for value in inner)


def begins_with(chat: Sequence[Message], earlier: Sequence[Message], with_thoughts: bool = True) -> bool:
    """True if a chat begins with an earlier one, apart from calls' numbers and white space around texts.

    Without `with_thoughts`, the thoughts of answers make no difference either.
    """
    return len(earlier) <= len(chat) and all(
        _compared(read_message(a), with_thoughts) == _compared(b, with_thoughts)
        for a, b in zip(earlier, chat, strict=False)
    )


def _compared(message: Message, with_thoughts: bool) -> tuple[Any, ...]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    content, reasoning = message["content"], message.get("reasoning_content")
    if message["role"] == "assistant" and not with_thoughts:
        content, reasoning = behind_thoughts(content), None
    return message["role"], content.strip(), reasoning, calls


def answer_of(text: str, parser: str, tools: bool, number: int) -> tuple[Message, str]:
    """Return the policy's message, and the finish reason "tool_calls" or "stop".

    A call that cannot be parsed stays in the text.

    `number` makes the ids of the calls, in nine digits as Mistral's templates want them.
    """
    calls = parser_of(parser)(text) if tools else []
    if not calls or any(call.problem or utf8(call.name) != call.name for call in calls):
        return {"role": "assistant", "content": text}, "stop"
    answer = behind_thoughts(text)
    before = answer.partition(_CALL_BEGINS[parser])[0] if parser in _CALL_BEGINS else ""
    content = f"{text.removesuffix(answer)}{before}".strip()
    written = [
        {
            "id": f"{(number + i) % 16**9:09x}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for i, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": written}, "tool_calls"


def completion(
    request: ChatRequest, number: int, context: int, response: Rollout, message: Message, reason: str
) -> dict[str, Any]:
    """The body of a chat completion."""
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
    if request.logprobs:
        choice["logprobs"] = token_logprobs(response)
    count = len(response.token_ids)
    usage = {"prompt_tokens": context, "completion_tokens": count, "total_tokens": context + count}
    head = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 0, "model": request.model}
    return {**head, "choices": [choice], "usage": usage}


def token_logprobs(response: Rollout) -> dict[str, Any]:
    """The log-probs of an answer's tokens. A token is named by its id."""
    pairs = zip(response.token_ids, response.logprobs, strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ]
    }


def chunks(body: dict[str, Any], with_usage: bool) -> Iterator[dict[str, Any]]:
    """A completion as the parts of a stream: the message, the reason of its end, the usage."""
    [choice] = body["choices"]
    calls = [{"index": i, **call} for i, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    head = {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    part = {"index": 0, "delta": delta, "logprobs": choice["logprobs"], "finish_reason": None}
    yield {**head, "choices": [part]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    if with_usage:
        yield {**head, "choices": [], "usage": body["usage"]}

"""The items of OpenAI's Responses API, in which NeMo-Gym writes turns, and chat messages of the same content.

The forms are those of `nemo_gym.responses_converter`: the policy's thinking is a separate item, and so is
each call of a tool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_gvpo.data.tool_calls import behind_thoughts

_TEXTS = ("input_text", "output_text", "text")
_ROLES = ("system", "developer", "user", "assistant")


def parameters(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row's `responses_create_params`. Raises ValueError if the row has no parameters with an input."""
    values = row.get("responses_create_params")
    if not isinstance(values, Mapping) or not isinstance(values.get("input"), str | Sequence):
        raise ValueError("it has no responses_create_params with an input, which every row of NeMo-Gym has")
    if values.get("instructions") is not None:
        raise ValueError(
            "responses_create_params.instructions: want a message of the role system in the input"
        )
    return values


def chat(values: str | Sequence[Any]) -> list[dict[str, Any]]:
    """An input as chat messages. Raises ValueError for items that are not of a policy of texts."""
    messages: list[dict[str, Any]] = []
    entries: Sequence[Any] = [{"role": "user", "content": values}] if isinstance(values, str) else values
    for item in entries:
        try:
            kind = item.get("type") or "message"
            if kind == "function_call_output":
                messages.append(
                    {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])}
                )
            elif kind == "message" and item["role"] in _ROLES and item["role"] != "assistant":
                messages.append({"role": item["role"], "content": _text(item["content"])})
            else:
                _add(_assistant(messages), kind, item)
        except (KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{str(item)[:80]!r} in the input: want a message with a role and texts, a function_call, "
                "its function_call_output, or reasoning"
            ) from None
    return messages


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end of the chat, which is added if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add(message: dict[str, Any], kind: str, item: Mapping[str, Any]) -> None:
    """Add the item to the assistant's message. Raises KeyError, TypeError, AttributeError."""
    if kind == "message" and item["role"] == "assistant":
        message["content"] += _text(item["content"])
    elif kind == "reasoning":
        message["content"] += "".join(f"<think>{part['text']}</think>" for part in item["summary"])
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        message.setdefault("tool_calls", []).append(
            {"id": item["call_id"], "type": "function", "function": function}
        )
    else:
        raise KeyError(kind)


def _text(content: Any) -> str:
    """A content of texts. Raises TypeError, KeyError, AttributeError."""
    if isinstance(content, str):
        return content
    if not all(part["type"] in _TEXTS for part in content):
        raise TypeError("a part that is not a text")
    return "".join(part["text"] for part in content)


def tools(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools of a request, as chat completions have them. Raises ValueError if one is not a function."""
    made = []
    for tool in values.get("tools") or ():
        if not isinstance(tool, Mapping) or tool.get("type") != "function" or "name" not in tool:
            raise ValueError(f"the tool {str(tool)[:80]!r}: want a function with a name")
        function = {key: value for key, value in tool.items() if key not in ("type", "strict")}
        made.append({"type": "function", "function": function})
    return made


def answer_items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The items of the policy's message."""
    text, calls = message["content"] or "", message.get("tool_calls") or ()
    answer = behind_thoughts(text)
    thought = text[: len(text) - len(answer)].removesuffix("</think>").removeprefix("<think>")
    made: list[dict[str, Any]] = []
    if thought:
        summary = [{"type": "summary_text", "text": thought}]
        made.append({"type": "reasoning", "id": "rs", "summary": summary})
    if answer or not (made or calls):
        content = [{"type": "output_text", "text": answer, "annotations": []}]
        made.append(
            {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": content}
        )
    for call in calls:
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        identity = {"type": "function_call", "call_id": call["id"], "id": call["id"], "status": "completed"}
        made.append({**identity, **function})
    return made


def response(output: Sequence[Mapping[str, Any]], values: Mapping[str, Any], is_cut: bool) -> dict[str, Any]:
    """A response with these items to a request with the parameters `values`."""
    return {
        "id": "resp",
        "object": "response",
        "created_at": 0.0,
        "model": "policy",
        "output": list(output),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "tools": values.get("tools") or [],
        "tool_choice": values.get("tool_choice", "auto"),
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
    }

"""A conversation's turns and messages, as the rollout files have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_gvpo.groups import Rollout
from megatron_gvpo.turns import ends_of


def utf8(text: str) -> str:
    """The text without halves of surrogate pairs, which data may have and UTF-8 cannot."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def turns(rollout: Rollout) -> list[dict[str, Any]] | None:
    """The policy's turns, with what was said to it before each; None for a single response.

    The texts are those of the messages: null where the messages are not of these turns, as with several
    agents.
    """
    if not rollout.turns:
        return None
    said, heard = _by_turn(rollout.messages)
    linear = all(turn.after == i - 1 and turn.keep is None for i, turn in enumerate(rollout.turns))
    known = linear and len(said) == len(rollout.turns)
    found = []
    for i, (turn, end) in enumerate(
        zip(rollout.turns, ends_of(rollout.turns, len(rollout.token_ids)), strict=True)
    ):
        before, answers = (heard[i], heard[i + 1]) if known else ([], [])
        found.append(
            {
                "agent": turn.agent or None,
                "text": _text([said[i]]) if known else None,
                "tokens": end - turn.begin,
                "reward": turn.reward,
                "after": turn.after,
                "given": _text(before) if before else None,
                "given_ids": list(turn.given),
                "tools": [utf8(str(m.get("name") or "")) for m in answers if m["role"] == "tool"],
            }
        )
    return found


def messages(rollout: Rollout) -> list[dict[str, str | None]] | None:
    """The conversation after the prompt as a chat; None for a single response."""
    if not rollout.turns:
        return None
    return [
        {
            "role": utf8(str(message["role"])),
            "name": utf8(str(message["name"])) if message.get("name") is not None else None,
            "content": _content(message),
            "tool_calls": json.dumps(message["tool_calls"], default=str)
            if message.get("tool_calls")
            else None,
        }
        for message in rollout.messages
    ]


def transcript(rollout: Rollout) -> str:
    """The response in one line; of a conversation, what was said to the policy has its role before it."""
    if not rollout.turns or not rollout.messages:
        return rollout.text
    return " | ".join(
        _content(message) if message["role"] == "assistant" else f"{message['role']}: {_content(message)}"
        for message in rollout.messages
    )


Messages = Sequence[Mapping[str, Any]]


def _by_turn(chat: Messages) -> tuple[list[Mapping[str, Any]], list[list[Mapping[str, Any]]]]:
    """The policy's messages, and those of others before each of them and after the last."""
    said: list[Mapping[str, Any]] = []
    heard: list[list[Mapping[str, Any]]] = [[]]
    for message in chat:
        if message["role"] == "assistant":
            said.append(message)
            heard.append([])
        else:
            heard[-1].append(message)
    return said, heard


def _text(chat: Messages) -> str:
    return "\n".join(map(_content, chat))


def _content(message: Mapping[str, Any]) -> str:
    """The message's text; JSON for content of another form, which a program may send."""
    content = message.get("content")
    return utf8(
        content if isinstance(content, str) else "" if content is None else json.dumps(content, default=str)
    )

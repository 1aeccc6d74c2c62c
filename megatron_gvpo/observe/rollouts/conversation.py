"""A conversation's turns and messages, as the rollout files have them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_gvpo.groups import Rollout, message_text, utf8
from megatron_gvpo.turns import ends_of


def spoken(rollout: Rollout, decode: Callable[..., str]) -> list[str] | None:
    """The text of each turn of the policy; None for a single response.

    The text comes from the messages if they belong to these turns; otherwise it is decoded, because several
    agents have several chats, and a program's message stores calls of tools apart from their text.
    """
    if not rollout.turns:
        return None
    own, _ = _by_turn(rollout.messages)
    if _are_of_turns(own, rollout) and not any(message.get("tool_calls") for message in own):
        return [_content(message) for message in own]
    ends = ends_of(rollout.turns, len(rollout.token_ids))
    return [
        decode(rollout.token_ids[turn.begin : end], skip_special_tokens=True)
        for turn, end in zip(rollout.turns, ends, strict=True)
    ]


def turns(rollout: Rollout, texts: Sequence[str] | None) -> list[dict[str, Any]] | None:
    """The policy's turns with their `texts`, and the messages to it before each; None for a single response.

    The environment's texts come from the messages, and are null if the messages do not belong to these turns.
    """
    if not rollout.turns:
        return None
    own, heard = _by_turn(rollout.messages)
    known = _are_of_turns(own, rollout)
    records = []
    for i, (turn, end) in enumerate(
        zip(rollout.turns, ends_of(rollout.turns, len(rollout.token_ids)), strict=True)
    ):
        before, answers = (heard[i], heard[i + 1]) if known else ([], [])
        records.append(
            {
                "agent": turn.agent or None,
                "text": utf8(texts[i]) if texts is not None else None,
                "tokens": end - turn.begin,
                "reward": turn.reward,
                "after": turn.after,
                "given": _text(before) if before else None,
                "given_ids": list(turn.given),
                "tools": [utf8(str(m.get("name") or "")) for m in answers if m["role"] == "tool"],
            }
        )
    return records


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
    """The response in one line; in a conversation, messages to the policy have their role before them."""
    if not rollout.turns or not rollout.messages:
        return rollout.text
    return " | ".join(
        ("" if message["role"] == "assistant" else f"{message['role']}: ") + utf8(message_text(message))
        for message in rollout.messages
    )


Messages = Sequence[Mapping[str, Any]]


def _by_turn(chat: Messages) -> tuple[list[Mapping[str, Any]], list[list[Mapping[str, Any]]]]:
    """The policy's messages, and the messages of others before each of them and after the last."""
    own: list[Mapping[str, Any]] = []
    heard: list[list[Mapping[str, Any]]] = [[]]
    for message in chat:
        if message["role"] == "assistant":
            own.append(message)
            heard.append([])
        else:
            heard[-1].append(message)
    return own, heard


def _are_of_turns(own: Messages, rollout: Rollout) -> bool:
    """True if each of the policy's messages is one of its turns, in the same order."""
    is_linear = all(turn.after == i - 1 and turn.keep is None for i, turn in enumerate(rollout.turns))
    return is_linear and len(own) == len(rollout.turns)


def _text(chat: Messages) -> str:
    return "\n".join(map(_content, chat))


def _content(message: Mapping[str, Any]) -> str:
    """The message's text without its calls; JSON for content of another form, which a program may send."""
    return utf8(message_text({"content": message.get("content")}))

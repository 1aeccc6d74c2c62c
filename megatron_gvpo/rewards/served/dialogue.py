"""A prompt and its response as a chat, for models that score them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_gvpo.groups import Prompt, Rollout, message_text

Messages = list[dict[str, Any]]


def prompt_messages(prompt: Prompt, keys: Sequence[str]) -> Messages:
    """The prompt's chat as the data has it, under the first of `keys` that its record has.

    A plain text is a message of the user. `data.system_prompt`, which is the policy's, is left out.
    """
    found = next((prompt.record[key] for key in keys if prompt.record.get(key) is not None), prompt.text)
    return [dict(m) for m in found] if isinstance(found, list) else [{"role": "user", "content": str(found)}]


def dialogue(prompt: Prompt, rollout: Rollout, keys: Sequence[str]) -> Messages:
    """The prompt's chat and the response, or the whole conversation that followed the prompt.

    An agent program's last chat is whole: it begins with what the program made of the prompt.
    """
    said = rollout.messages or [{"role": "assistant", "content": rollout.text}]
    return list(said) if said[0]["role"] != "assistant" else [*prompt_messages(prompt, keys), *said]


def as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A single message's content; of several, each after its role."""
    if len(messages) == 1:
        return message_text(messages[0])
    return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in messages)

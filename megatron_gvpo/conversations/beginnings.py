"""Beginnings of conversations as data records: Cobalt trains the next turn of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_gvpo.groups import Rollout


def beginnings(
    record: Mapping[str, Any], rollout: Rollout, prompt_key: str = "prompt", earlier_key: str = "earlier"
) -> list[dict[str, Any]]:
    """A record for every turn of the policy: the chat before it, and what the policy said in earlier turns.

    The fields of `record` stay; `prompt_key` is the prompt there, a text or chat messages, and becomes chat
    messages. `earlier_key` is for `rollout.conversation.earlier_key`. Partial trajectories as contextual
    prompts (OSU-NLP-Group/cobalt).
    """
    prompt = record[prompt_key]
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    found, said = list[dict[str, Any]](), list[str]()
    for message in rollout.messages:
        if message["role"] == "assistant":
            found.append({**record, prompt_key: list(chat), earlier_key: list(said)})
            said.append(message["content"])
        chat.append(dict(message))
    return found

"""Another model's responses, over an OpenAI-compatible URL: for `algorithm.members: [{name: teacher}]`."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_gvpo.types import Group


class TeacherError(RuntimeError):
    """The teacher gave no response."""


def chat(
    groups: Sequence[Group],
    n: int,
    url: str,
    model: str,
    template: str = "{prompt}",
    key: str = "prompt",
    temperature: float = 1.0,
    max_tokens: int = 1024,
    timeout: float = 300.0,
    parallel: int = 16,
    api_key_env: str | None = None,
) -> list[list[str]]:
    """`n` texts of a chat model for each group's prompt, which is the field `key` of its data record.

    `url` is that of the API, as http://localhost:8000/v1. `template` may also use {best}, the best of the
    group's own responses, and {worst}. Raises TeacherError for a request that fails or exceeds `timeout`
    seconds.
    """
    headers = {"Content-Type": "application/json"}
    if api_key_env is not None:
        headers["Authorization"] = f"Bearer {os.environ.get(api_key_env, '')}"

    def ask(group: Group) -> list[str]:
        said = str(group.prompt.record.get(key, group.prompt.text))
        fields = {
            "prompt": said,
            "best": max(group.rollouts, key=lambda rollout: rollout.reward).text,
            "worst": min(group.rollouts, key=lambda rollout: rollout.reward).text,
        }
        text = template
        for name, value in fields.items():
            text = text.replace("{" + name + "}", value)
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "n": n,
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        request = urllib.request.Request(
            f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                choices = json.load(response)["choices"]
            texts = [str(choice["message"]["content"]) for choice in choices]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TeacherError(f"{url}: prompt {group.prompt.id}: {type(error).__name__}: {error}") from error
        if len(texts) != n:
            raise TeacherError(
                f"{url}: prompt {group.prompt.id}: {len(texts)} responses, and {n} were asked for"
            )
        return texts

    with ThreadPoolExecutor(parallel) as pool:
        return list(pool.map(ask, groups))


def repeat_best(groups: Sequence[Group], n: int) -> list[list[str]]:
    """The group's own best response: for trying a recipe out, before a real teacher takes its place."""
    return [[max(group.rollouts, key=lambda rollout: rollout.reward).text] * n for group in groups]

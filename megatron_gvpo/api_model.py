"""Another model, over an OpenAI-compatible URL: its responses and its preferences.

`chat` is for `algorithm.members: [{name: teacher}]`, and `prefers` is the judge of
`algorithm.shapers: [{name: win_rate}]`. `url` is the API's, such as http://localhost:8000/v1; `key` is the
field of the data record that holds the problem. With `plain` the model continues the text (/completions),
without a chat template. A request that an outage fails is repeated while its `timeout` seconds last. All
raise ApiModelError for one that fails otherwise, or has no answer in time. The key is in the environment
variable `api_key_env`. Grades are for judges (`rewards.components.N.judge`), and log-probs for `teacher`.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from megatron_gvpo.core.redaction import hide
from megatron_gvpo.core.secrets import read_variable
from megatron_gvpo.core.template import filled
from megatron_gvpo.core.web import post_json
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.rewards.judge import as_text

log = logging.getLogger(__name__)
_LINE = 300  # characters of an answer in an error message
PAUSE = 1.0  # seconds before a request is repeated
_BUSY = (408, 425, 429)  # statuses of a service that will take the request later, as those from 500 on


class ApiModelError(RuntimeError):
    """The other model gave no response."""


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
    plain: bool = False,
) -> list[list[str | None]]:
    """`n` texts of the model for each group's prompt; None for one that was cut off at `max_tokens`.

    `template` may also use {best}, the best of the group's own responses, and {worst}.
    """

    def ask(group: Group) -> list[str | None]:
        fields = {
            "prompt": _problem(group.prompt, key),
            "best": max(group.rollouts, key=lambda rollout: rollout.reward).text,
            "worst": min(group.rollouts, key=lambda rollout: rollout.reward).text,
        }
        options = {"model": model, "n": n, "temperature": temperature, "max_tokens": max_tokens}
        what = f"{url}: prompt {group.prompt.id}"
        answers = _texts(url, what, filled(template, fields), options, timeout, api_key_env, plain)
        return [text if is_complete else None for text, is_complete in answers]

    with ThreadPoolExecutor(parallel) as pool:
        texts = list(pool.map(ask, groups))
    if cut := sum(text is None for texts_of_group in texts for text in texts_of_group):
        warning = "%s: %d of %d responses were cut off at max_tokens=%d, and are left out"
        log.warning(hide(warning % (url, cut, n * len(groups), max_tokens)))
    return texts


def prefers(
    prompt: Prompt,
    a: Rollout,
    b: Rollout,
    url: str,
    model: str,
    template: str = "{prompt}\n\nA:\n{a}\n\nB:\n{b}\n\nWhich response is better? Say A or B only.",
    key: str = "prompt",
    max_tokens: int = 16,
    timeout: float = 60.0,
    api_key_env: str | None = None,
    plain: bool = False,
) -> float:
    """1 if the model names A first, 0 if B, 0.5 if neither.

    Text before `</think>` does not count. If an answer was cut off, only its beginning counts.
    """
    text = filled(template, {"prompt": _problem(prompt, key), "a": a.text, "b": b.text})
    verdict, is_complete = _verdict(url, prompt, text, model, max_tokens, timeout, api_key_env, plain)
    verdict = verdict.rpartition("</think>")[2]
    letter = re.search(r"\b([AB])\b", verdict) if is_complete else re.match(r"[\W_]*([AB])\b", verdict)
    return 0.5 if letter is None else float(letter[1] == "A")


def repeat_best(groups: Sequence[Group], n: int) -> list[list[str]]:
    """The group's own best response, as a stand-in for a teacher while a recipe is tried out."""
    return [[max(group.rollouts, key=lambda rollout: rollout.reward).text] * n for group in groups]


def _problem(prompt: Prompt, key: str) -> str:
    """The problem as the data have it: a text, or a chat. Raises ApiModelError."""
    problem = prompt.record.get(key)
    if problem is None:
        fields = ", ".join(prompt.record)
        raise ApiModelError(f"prompt {prompt.id}: no field {key!r} (option key); fields there: {fields}")
    return as_text(problem) if isinstance(problem, list) else str(problem)


def _verdict(
    url: str,
    prompt: Prompt,
    text: str,
    model: str,
    max_tokens: int,
    timeout: float,
    api_key_env: str | None,
    plain: bool,
) -> tuple[str, bool]:
    """The one greedy answer, with False if it was cut off."""
    options = {"model": model, "n": 1, "temperature": 0.0, "max_tokens": max_tokens}
    [answer] = _texts(url, f"{url}: prompt {prompt.id}", text, options, timeout, api_key_env, plain)
    return answer


def _texts(
    url: str,
    what: str,
    text: str,
    options: Mapping[str, Any],
    timeout: float,
    api_key_env: str | None,
    plain: bool,
) -> list[tuple[str, bool]]:
    """options["n"] texts of the model, each with False if it was cut off. Raises ApiModelError."""
    request = {"prompt": text} if plain else {"messages": [{"role": "user", "content": text}]}
    endpoint = f"{url.rstrip('/')}/{'completions' if plain else 'chat/completions'}"
    try:
        key = None if api_key_env is None else read_variable(api_key_env, "api_key_env")
        choices = _answer(endpoint, {**options, **request}, timeout, key)["choices"]
        texts = [choice["text"] if plain else choice["message"]["content"] for choice in choices]
        is_complete = [choice.get("finish_reason") != "length" for choice in choices]
    except json.JSONDecodeError as error:
        body = " ".join(error.doc[:_LINE].split()) or "(nothing)"
        raise ApiModelError(hide(f"{what}: no JSON: {body}")) from None
    except (OSError, HTTPException, RecursionError, ValueError, LookupError, TypeError) as error:
        raise ApiModelError(hide(f"{what}: {type(error).__name__}: {error}")) from None
    if len(texts) != options["n"]:
        raise ApiModelError(hide(f"{what}: {len(texts)} responses, and {options['n']} were asked for"))
    if not all(isinstance(text, str) for text in texts):
        raise ApiModelError(hide(f"{what}: a response without text, as of a model that refuses"))
    return list(zip(texts, is_complete, strict=True))


def _answer(endpoint: str, body: Mapping[str, Any], timeout: float, key: str | None) -> Any:
    """The decoded answer. An outage, such as a busy or restarting service, ends no run of many hours.

    Raises as `post_json`.
    """
    deadline, remaining = time.monotonic() + timeout, timeout
    while True:
        try:
            return post_json(endpoint, body, remaining, key)
        except (OSError, HTTPException) as error:
            remaining = deadline - time.monotonic() - PAUSE
            is_refusal = isinstance(error, HTTPError) and error.code < 500 and error.code not in _BUSY
            if is_refusal or remaining <= 0:
                raise
        time.sleep(PAUSE)

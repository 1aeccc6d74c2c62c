"""A language model on servers that reads a response and writes a verdict with a score, the reward."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from megatron_gvpo.core.json_files import unique_keys
from megatron_gvpo.core.plain_values import finite_number
from megatron_gvpo.core.template import filled
from megatron_gvpo.groups import Prompt, Rollout, message_text
from megatron_gvpo.servers.http import Http, ServerRefused
from megatron_gvpo.servers.model_requests import Misfit, Servers, Unanswered, Verdict
from megatron_gvpo.settings.reward_servers import EXPLANATION, MODEL, SCORE, JudgeConfig

_SHOWN = 200  # characters of an invalid verdict that a message shows


class InvalidVerdict(ValueError):  # noqa: N818
    """The judge's answer is not a verdict; the message tells the judge and the user why."""


class Judge:
    """Asks a language model for verdicts. `key` is the configuration's key, for errors."""

    def __init__(self, served: JudgeConfig, key: str) -> None:
        self._served, self._key = served, key
        self.invalid = 0  # number of answers that were not verdicts

    @property
    def metrics(self) -> dict[str, float]:
        return {"invalid": float(self.invalid)}

    async def check(self, http: Http, timeout: float) -> None:
        """Ask the server for its models. Raises Misfit if it does not have the judge."""
        try:
            answer = await http.get("/v1/models", timeout=timeout)
        except ServerRefused as error:
            if not error.is_request:
                raise
            hint = " (servers.api_key_env names the key's variable)" if error.status in (401, 403) else ""
            raise Misfit(f"{self._key}: {error}{hint}") from None
        try:
            names = [model["id"] for model in answer["data"]]
        except (LookupError, TypeError):
            raise ServerRefused(f"{http.url}/v1/models: its answer is not a list of models", 502) from None
        if self._name not in names:
            raise Misfit(f"{self._key}.model={self._name}: {http.url} has {', '.join(map(str, names))}")

    @property
    def _name(self) -> str:
        return self._served.model if self._served.model and self._served.servers.urls else MODEL

    async def verdicts(self, servers: Servers, requests: Sequence[Mapping[str, str]]) -> list[Verdict]:
        """A verdict for each request, which has the values of the template's fields."""
        return await asyncio.gather(*(self._verdict(servers, fields) for fields in requests))

    async def _verdict(self, servers: Servers, fields: Mapping[str, str]) -> Verdict:
        served = self._served
        lowest, highest = (f"{end:g}" for end in served.scale)
        task = filled(served.template, {**fields, "lowest": lowest, "highest": highest})
        messages = [{"role": "user", "content": task}]
        if served.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": served.system_prompt})
        problem = ""
        for _ in range(served.tries):
            try:
                answer = await servers.ask(partial(_complete, self._request(messages), servers.timeout))
            except Unanswered as error:
                return Verdict(None, str(error))
            text = ""
            try:
                text = _text(answer)
                score, explanation = self.read(text)
            except InvalidVerdict as error:
                self.invalid += 1
                problem = str(error)
                hint = f"This is not a valid verdict: {error}. Answer again, in the form that was asked for."
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
            else:
                lowest_score, highest_score = served.scale
                return Verdict((score - lowest_score) / (highest_score - lowest_score), explanation)
        return Verdict(None, f"{self._key}: no valid verdict in {served.tries} tries: {problem}")

    def _request(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        served = self._served
        body: dict[str, Any] = {
            "model": self._name,
            "messages": list(messages),
            "temperature": served.temperature,
            "max_tokens": served.max_tokens,
        }
        if served.regex is not None:
            regex = {"regex": served.regex}
            body |= regex if served.servers.engine == "sglang" else {"structured_outputs": regex}
        else:
            schema = {"name": "verdict", "schema": served.schema_of_verdicts, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {**body, **served.request}

    def read(self, text: str) -> tuple[float, str]:
        """Return the score and the explanation in a judge's answer. Raises InvalidVerdict."""
        if self._served.regex is not None:
            match = re.fullmatch(self._served.regex, text.strip(), re.DOTALL)
            score, explanation = (None, text) if match is None else (match[1], text.strip())
        else:
            try:
                fields = json.loads(text, object_pairs_hook=unique_keys)
            except (ValueError, RecursionError) as error:
                raise InvalidVerdict(f"not JSON ({error}): {_shown(text)}") from None
            if not isinstance(fields, dict):
                raise InvalidVerdict(f"not a JSON object: {_shown(text)}")
            score, explanation = fields.get(SCORE), str(fields.get(EXPLANATION) or "")
        number, (lowest, highest) = _number(score), self._served.scale
        if number is None or not lowest <= number <= highest:
            raise InvalidVerdict(f"no score between {lowest:g} and {highest:g}: {_shown(text)}")
        return number, explanation


async def _complete(body: Mapping[str, Any], timeout: float, http: Http) -> Any:
    return await http.post("/v1/chat/completions", body, timeout=timeout)


def _text(answer: Any) -> str:
    """The text of the judge's answer. Raises InvalidVerdict if it has no text, or was cut off."""
    try:
        choice = answer["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (LookupError, TypeError) as error:
        raise InvalidVerdict(f"not a chat completion ({error!r})") from None
    if reason == "length":
        raise InvalidVerdict(f"it was longer than max_tokens: {_shown(str(text))}")
    if not isinstance(text, str) or not text.strip():
        raise InvalidVerdict("it has no text")
    return text


def _number(score: Any) -> float | None:
    """The score as a finite number, also where the judge wrote it as text; None for anything else."""
    if isinstance(score, str):
        with suppress(ValueError):
            score = float(score)
    return finite_number(score)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."


# Reward models and judges score a prompt and its response as a chat.

Messages = list[dict[str, Any]]


def prompt_messages(prompt: Prompt) -> Messages:
    """The prompt's chat as the data has it; the rendered text where its record lacks the field.

    A plain text is a message of the user. `data.system_prompt`, which is the policy's, is left out.
    """
    chat = prompt.record.get(prompt.prompt_key)
    chat = prompt.text if chat is None else chat
    return [dict(m) for m in chat] if isinstance(chat, list) else [{"role": "user", "content": str(chat)}]


def scored_chat(prompt: Prompt, rollout: Rollout) -> Messages:
    """The prompt's chat and the response, or the conversation that followed the prompt.

    The last chat of an agent program already contains the prompt, as the program wrote it.
    """
    messages = rollout.messages or [{"role": "assistant", "content": rollout.text}]
    is_complete = messages[0]["role"] != "assistant"
    return list(messages) if is_complete else [*prompt_messages(prompt), *messages]


def as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The content of a single message; of several messages, each content after its role."""
    if len(messages) == 1:
        return message_text(messages[0])
    return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in messages)

"""A language model on servers that reads a response and writes a verdict, of which a number is the reward."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.real_number import finite_number
from megatron_gvpo.core.template import filled
from megatron_gvpo.groups import message_text
from megatron_gvpo.servers.http import Http, ServerRefused
from megatron_gvpo.servers.model_requests import Misfit, Servers, Unanswered, Verdict
from megatron_gvpo.settings.reward_servers import EXPLANATION, MODEL, SCORE, JudgeConfig

if TYPE_CHECKING:
    from megatron_gvpo.groups import Prompt, Rollout


_SHOWN = 200  # characters of an invalid verdict that a message shows


class InvalidVerdict(ValueError):  # noqa: N818
    """The judge's answer is none; the message says why, to the judge and to the user."""


class Judge:
    """Asks for verdicts."""

    def __init__(self, served: JudgeConfig, key: str) -> None:
        self._served, self._key = served, key
        self.invalid = 0  # answers that were no verdicts

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
            raise Misfit(f"{self._key}: {error} (servers.api_key_env names the key's variable)") from None
        try:
            names = [model["id"] for model in answer["data"]]
        except (LookupError, TypeError):
            raise ServerRefused(f"{http.url}/v1/models: its answer is no list of models", 502) from None
        if self._name not in names:
            raise Misfit(f"{self._key}.model={self._name}: {http.url} has {', '.join(map(str, names))}")

    @property
    def _name(self) -> str:
        return self._served.model if self._served.model and self._served.servers.urls else MODEL

    async def verdicts(self, servers: Servers, asked: Sequence[Mapping[str, str]]) -> list[Verdict]:
        """A verdict for each set of the template's fields."""
        return await asyncio.gather(*(self._verdict(servers, fields) for fields in asked))

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
            said = ""
            try:
                said = _text(answer)
                score, explanation = self.read(said)
            except InvalidVerdict as error:
                self.invalid += 1
                problem = str(error)
                told = f"This is no valid verdict: {error}. Answer again, in the form that was asked for."
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
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
            own = {"regex": served.regex}
            body |= own if served.servers.engine == "sglang" else {"structured_outputs": own}
        else:
            schema = {"name": "verdict", "schema": served.schema_of_verdicts, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {**body, **served.request}

    def read(self, text: str) -> tuple[float, str]:
        """(score, explanation) of a verdict. Raises InvalidVerdict."""
        if self._served.regex is not None:
            found = re.fullmatch(self._served.regex, text.strip(), re.DOTALL)
            score, explanation = (None, text) if found is None else (found[1], text.strip())
        else:
            try:
                fields = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InvalidVerdict(f"no JSON ({error}): {_shown(text)}") from None
            if not isinstance(fields, dict):
                raise InvalidVerdict(f"no JSON object: {_shown(text)}")
            score, explanation = fields.get(SCORE), str(fields.get(EXPLANATION) or "")
        number, (lowest, highest) = _number(score), self._served.scale
        if number is None or not lowest <= number <= highest:
            raise InvalidVerdict(f"no score between {lowest:g} and {highest:g}: {_shown(text)}")
        return number, explanation


async def _complete(body: Mapping[str, Any], timeout: float, http: Http) -> Any:
    return await http.post("/v1/chat/completions", body, timeout=timeout)


def _text(answer: Any) -> str:
    """The judge's answer. Raises InvalidVerdict for one without text, or one that was cut off."""
    try:
        choice = answer["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (LookupError, TypeError) as error:
        raise InvalidVerdict(f"no chat completion ({error!r})") from None
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


# A prompt and its response as a chat, for models that score them.

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

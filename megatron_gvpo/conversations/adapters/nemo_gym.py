"""Environments of NeMo-Gym: its servers score and answer, and this program acts in place of its agents.

    data: {train: {path: example.jsonl, convert: "megatron_gvpo.conversations.adapters.nemo_gym:record",
                   answer_key: null}}
    rollout: {conversation: {program: "megatron_gvpo.conversations.adapters.nemo_gym:agent",
                             options: {python: gym-env/bin/python,
                                       config: environments/blackjack/config.yaml}}}

NeMo-Gym has two protocols. A server with /seed_session and /verify has a path for each tool, and scores the
messages and calls (`simple_agent`). A server with /reset and /step answers each turn and gives a reward for
it (`gymnasium_agent`). A server that is started here runs in NeMo-Gym's own Python environment
(`nemo_gym_server.py`).
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp

from megatron_gvpo.conversations.adapters import nemo_gym_items as items
from megatron_gvpo.conversations.adapters.local_server import (
    CONNECT,
    MOST_BYTES,
    EnvironmentServer,
    LocalServerFailed,
)
from megatron_gvpo.core.plain_values import LARGEST, finite_number
from megatron_gvpo.groups import Prompt
from megatron_gvpo.workers.environment import TAKEN, Reply
from megatron_gvpo.workers.messages import Endpoint

# Error codes of calls that the limits of turns, time or tokens do not allow.
_LIMITS = ("turns", "time", "context_length_exceeded")
_SCORES, _STEPS = ("/seed_session", "/verify"), ("/reset", "/step")  # the paths of the two protocols
_FIRST = 60.0  # seconds for the first answer of a server that listens
_LAUNCHER = Path(__file__).with_name("nemo_gym_server.py")


def record(row: Mapping[str, Any]) -> dict[str, Any]:
    """The data record of a line of NeMo-Gym's data (`data.train.convert`).

    It has the row as it is, and its input as chat messages in `prompt`. Raises ValueError for input or tools
    that are not text.
    """
    values = items.parameters(row)
    items.tools(values)
    return {"prompt": items.chat(values["input"]), "row": dict(row)}


class Agent:
    """The program: one rollout with an environment's server.

    The server is that of the configuration `config`, which the interpreter `python` of NeMo-Gym's Python
    environment finds in `directory` or among the installed ones; or it runs at `url` already. Each answer of
    the server may take `timeout` seconds.

    The reward is the result of /verify, or the sum of the steps' rewards. A tool's refusal (HTTP 4xx) is its
    answer; any other failure of the server raises LocalServerFailed, so that the rollout is repeated and then
    lost.
    """

    def prepare(
        self,
        python: str | None = None,
        config: str | None = None,
        directory: str = ".",
        url: str | None = None,
        timeout: float = 20.0,
    ) -> None:
        """Start the server of this process if none runs. Raises ValueError if it cannot be started."""
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ValueError(f"timeout={timeout}: want seconds, above 0")
        _server(python, config, directory, url).ensure()

    async def __call__(
        self,
        prompt: Prompt,
        endpoint: Endpoint,
        python: str | None = None,
        config: str | None = None,
        directory: str = ".",
        url: str | None = None,
        timeout: float = 20.0,
    ) -> Reply:
        row = prompt.record.get("row")
        if not isinstance(row, Mapping):
            raise ValueError(
                f"the data record has no row of NeMo-Gym: set data.train.convert={__name__}:record"
            )
        server = _server(python, config, directory, url)
        # The cookies name the session. The jar takes those of addresses that are numbers, too.
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar, trust_env=False) as http:
            rollout = _Rollout(server, http, row, AskedPolicy(http, endpoint, row), timeout)
            return await (rollout.steps() if server.pays_steps else rollout.scored())


agent = Agent()


class GymServer(EnvironmentServer):
    """The server of an environment of NeMo-Gym."""

    pays_steps: bool | None = None  # the protocol; None until it is known

    def ensure(self) -> None:
        super().ensure()
        if self.pays_steps is None:
            is_scored, is_stepped = (all(map(self._takes_posts, paths)) for paths in (_SCORES, _STEPS))
            if not (is_scored or is_stepped):
                raise ValueError(
                    f"{self}: it has neither /seed_session and /verify nor /reset and /step, which "
                    "environments of NeMo-Gym have"
                )
            # a server with /verify may take every path for a tool's, /step among them
            self.pays_steps = not is_scored

    def _takes_posts(self, path: str) -> bool:
        """True if the server has the path: its answer to GET is then 405.

        Raises ValueError if the server does not answer.

        The description of its paths, /openapi.json, can take seconds to be made.
        """
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            direct.open(self.address + path, timeout=_FIRST).close()
        except urllib.error.HTTPError as error:
            return error.code == 405
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ValueError(
                f"{self}: GET {path} was not answered within {_FIRST:g} seconds: {error!r}"
            ) from None
        return False


@cache
def _server(python: str | None, config: str | None, directory: str, url: str | None) -> GymServer:
    """The server with these options: one object in each process. Raises ValueError for wrong ones."""
    return GymServer.of("NeMo-Gym's server", _command, ("config", config), python, directory, url)


def _command(program: str, config: str, port: int) -> list[str]:
    return [program, "-P", str(_LAUNCHER), config, str(port)]


class AskedPolicy:
    """The policy, to which each request sends the chat so far and the row's tools."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: Endpoint, row: Mapping[str, Any]) -> None:
        parameters = items.parameters(row)
        self.chat, self.tools = items.chat(parameters["input"]), items.tools(parameters)
        self.is_cut = False  # true if the last answer was cut off at its limit of tokens
        self._http, self._endpoint = http, endpoint

    async def ask(self) -> list[dict[str, Any]] | None:
        """Return the items of the policy's answer; None if no turns, time or tokens are left.

        The answer is added to the chat.

        The trainer limits how long this takes. Raises RuntimeError.
        """
        body = {"model": "policy", "messages": self.chat, **({"tools": self.tools} if self.tools else {})}
        headers = {"Authorization": f"Bearer {self._endpoint.api_key}"}
        unlimited = aiohttp.ClientTimeout(total=None)
        path = f"{self._endpoint.base_url}/chat/completions"
        async with self._http.post(path, json=body, headers=headers, timeout=unlimited) as answer:
            completion = await answer.json()
        if answer.status != 200:
            error = completion["error"]
            if error["code"] in _LIMITS:
                return None
            raise RuntimeError(f"the policy cannot be asked: {error['message']}")
        [choice] = completion["choices"]
        self.is_cut = choice["finish_reason"] == "length"
        self.chat.append(choice["message"])
        return items.answer_items(choice["message"])


class _Rollout:
    """One rollout with the server, in either protocol."""

    def __init__(
        self,
        server: GymServer,
        http: aiohttp.ClientSession,
        row: Mapping[str, Any],
        policy: AskedPolicy,
        timeout: float,
    ) -> None:
        self._server, self._http, self._row, self._policy = server, http, row, policy
        self._timeout = timeout
        self._names = {tool["function"]["name"] for tool in policy.tools}
        self._counts = {"tool_calls": 0.0, "tool_errors": 0.0}

    async def scored(self) -> Reply:
        """Do as `simple_agent`: call tools until the policy calls none; then the server scores it all."""
        await self._answer("/seed_session", self._row)
        output: list[dict[str, Any]] = []
        while (new := await self._policy.ask()) is not None:
            output += new
            calls = [item for item in new if item["type"] == "function_call"]
            if self._policy.is_cut or not calls:
                break
            for call in calls:
                self._counts["tool_calls"] += 1
                text = await self._call(call["name"], call["arguments"])
                output.append({"type": "function_call_output", "call_id": call["call_id"], "output": text})
                self._hear_tool(call["call_id"], text)
        body = {**self._row, "response": self._response(output)}
        score = await self._answer("/verify", body)
        numbers = ((name, score[name]) for name in score.keys() - {*body, "reward", *TAKEN})
        counts = self._counts | {
            n: float(value) for n, value in numbers if isinstance(value, bool | int | float)
        }
        return Reply(None, self._reward(score, "/verify"), counts)

    async def steps(self) -> Reply:
        """Do as `gymnasium_agent`: the server answers each turn with a reward, until it ends the episode."""
        first = await self._answer("/reset", self._row)
        self._hear(first, "/reset")
        total = 0.0
        while (new := await self._policy.ask()) is not None:
            step = await self._answer("/step", {**self._row, "response": self._response(new)})
            total += self._reward(step, "/step")
            ends = [step.get("terminated"), step.get("truncated")]
            if not all(isinstance(end, bool) for end in ends):
                raise self._wrong("/step", "`terminated` or `truncated` is not a boolean")
            if any(ends):
                break
            if not self._hear(step, "/step"):
                raise self._wrong("/step", "it neither says anything nor ends the episode")
        return Reply(None, total, self._counts)

    def _hear(self, answer: Mapping[str, Any], path: str) -> bool:
        """Add the outputs of tools and the observation in an answer to the policy's chat.

        Return False if there is neither output nor observation.
        """
        try:
            outputs = [
                (str(out["call_id"]), str(out["output"]))
                for out in (answer.get("info") or {}).get("tool_outputs") or ()
            ]
        except (TypeError, KeyError, AttributeError):
            raise self._wrong(path, "its `info.tool_outputs` have no call_id and output") from None
        observation = answer.get("observation")
        if not isinstance(observation, str | None):
            raise self._wrong(path, "`observation` is not a text")
        for identity, text in outputs:
            self._hear_tool(identity, text)
        if observation:
            self._policy.chat.append({"role": "user", "content": observation})
        return bool(outputs or observation)

    def _hear_tool(self, identity: str, text: str) -> None:
        self._policy.chat.append({"role": "tool", "tool_call_id": identity, "content": text})

    async def _call(self, name: str, arguments: str) -> str:
        """Return a tool's answer, which may also say what is wrong with the call. Raises LocalServerFailed.

        Only the row's tools are called, because the policy may not use a server's other paths.
        """
        if name not in self._names:
            self._counts["tool_errors"] += 1
            return json.dumps({"error": f"there is no tool {name!r}; there are: {', '.join(self._names)}"})
        status, text = await self._post(f"/{name}", json.loads(arguments))
        if status >= 500:
            raise LocalServerFailed(f"{self._server}: the tool {name} answered {status}: {text[:300]}")
        self._counts["tool_errors"] += status >= 400
        return text

    async def _answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The server's answer, an object. Raises LocalServerFailed."""
        status, text = await self._post(path, body)
        if status != 200:
            raise LocalServerFailed(f"{self._server}: POST {path} answered {status}: {text[:300]}")
        try:
            answer = json.loads(text)
            if not isinstance(answer, dict):
                raise ValueError("it is not an object")
        except (ValueError, RecursionError) as error:
            raise self._wrong(path, f"{text[:80]!r} ({str(error)[:80]})") from None
        return answer

    async def _post(self, path: str, body: Any) -> tuple[int, str]:
        """Return the status and the text of an answer. Raises LocalServerFailed."""
        limits = aiohttp.ClientTimeout(total=self._timeout, sock_connect=CONNECT)
        try:
            async with self._http.post(
                self._server.address + path, json=body, timeout=limits, allow_redirects=False
            ) as answer:
                content = bytearray()
                async for part in answer.content.iter_any():
                    content += part
                    if len(content) > MOST_BYTES:
                        raise LocalServerFailed(f"{self._server}: POST {path} answered more than 16 MiB")
                return answer.status, content.decode(errors="replace")
        except TimeoutError:
            raise LocalServerFailed(
                f"{self._server}: no answer to POST {path} within {self._timeout:g} seconds "
                "(rollout.conversation.options.timeout)"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise LocalServerFailed(f"{self._server}: POST {path} failed: {error!r}") from None

    def _response(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        return items.response(output, items.parameters(self._row), self._policy.is_cut)

    def _reward(self, answer: Mapping[str, Any], path: str) -> float:
        if (number := finite_number(answer.get("reward"), LARGEST)) is None:
            raise self._wrong(
                path, f"its reward is {str(answer.get('reward'))[:60]!r}, which is not a number"
            )
        return number

    def _wrong(self, path: str, problem: str) -> LocalServerFailed:
        return LocalServerFailed(
            f"{self._server}: POST {path} answered what NeMo-Gym does not have: {problem}"
        )

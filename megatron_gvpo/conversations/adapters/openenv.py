"""Environments of OpenEnv: a server for each process of environments, and a session for each conversation.

rollout: {conversation: {environment: "megatron_gvpo.conversations.adapters.openenv:OpenEnv",
                         options: {python: openenv-env/bin/python, app: "echo.server.app:app",
                                   action: message, observation: echoed_message}}}

The server runs in a Python environment of its own, because OpenEnv's pins are not this package's. This module
uses only its protocol: WebSocket messages `reset`, `step` and `close` at /ws, and the schema at /schema.

    python -m megatron_gvpo.conversations.adapters.openenv games.jsonl --prompts 1000 \
        --python openenv-env/bin/python --app game.server.app:app --observation board

writes data whose prompts are the first observations of an environment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp

from megatron_gvpo.conversations.adapters.local_server import (
    CONNECT,
    MOST_BYTES,
    EnvironmentServer,
    LocalServerFailed,
)
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.named_file import check_named_file, write_named_file
from megatron_gvpo.groups import Prompt
from megatron_gvpo.workers.environment import Reply

_FIRST = 120.0  # seconds for the first observation of an episode, where data are written
_SEEDS = 2**32  # NumPy's generators take smaller ones
_OF_EVERY_ACTION = ("metadata",)


class OpenEnv:
    """One session with an environment of OpenEnv.

    The server is `app`, a `module:name` of an ASGI application that the interpreter `python` finds from
    `directory`, or one that runs at `url` already. `action` names the field of the environment's action that
    gets the policy's text; without `action` the policy writes the action as a JSON object. `observation`
    names the field of the observation that the policy gets; without `observation` the policy gets all of it
    as JSON.

    The record's `reset`, a mapping, is passed to the environment's reset; if it has no seed, the
    conversation's seed is added. If the record has `observation`, the reset must show it.
    """

    def __init__(
        self,
        python: str | None = None,
        app: str | None = None,
        directory: str = ".",
        url: str | None = None,
        action: str | None = None,
        observation: str | None = None,
    ) -> None:
        self._server = server_of(python, app, directory, url)
        self._action, self._observation = action, observation
        self._session: EnvironmentSession | None = None
        self._is_paid = False

    @staticmethod
    def prepare(
        python: str | None = None,
        app: str | None = None,
        directory: str = ".",
        url: str | None = None,
        action: str | None = None,
        observation: str | None = None,
    ) -> None:
        """Start the server of this process. Raises ValueError if it cannot be started, or lacks a field."""
        source = server_of(python, app, directory, url)
        source.ensure()
        source.check_fields(action, observation)

    async def reset(self, prompt: Prompt, seed: int) -> None:
        own = prompt.record.get("reset", {})
        if not isinstance(own, Mapping):
            raise ValueError(f"the record's `reset` is {str(own)[:60]}: want a mapping of reset parameters")
        self._session = EnvironmentSession(self._server)
        await self._session.open()
        observation, _, is_done = await self._session.ask("reset", {"seed": seed % _SEEDS, **own})
        if is_done:
            raise LocalServerFailed(f"{self._server}: its episode is over after the reset")
        text = self._text(observation)
        if (recorded := prompt.record.get("observation")) is not None and recorded != text:
            raise ValueError(
                f"the record's `observation` is not what the environment shows after its reset, {text[:80]!r}"
                ": make the data again with this environment"
            )

    async def step(self, response: str) -> Reply:
        assert self._session is not None
        counts = {"invalid_actions": 0}
        try:
            action = _action(response, self._action)
            observation, reward, is_done = await self._session.ask("step", action)
        except InvalidAction as problem:
            return Reply(f"Error: {problem}", counts={"invalid_actions": 1})
        self._is_paid |= reward is not None
        if not is_done:
            return Reply(self._text(observation), reward or 0.0, counts)
        if not self._is_paid:
            raise LocalServerFailed(f"{self._server}: its episode ended without any reward")
        return Reply(None, reward or 0.0, counts)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _text(self, observation: Mapping[str, Any]) -> str:
        return _text(observation, self._observation, self._server)


class InvalidAction(ValueError):  # noqa: N818 - it is not a fault of this program
    """Raised for an action of the policy that the environment does not know.

    The policy gets the error as its observation.
    """


class OpenEnvServer(EnvironmentServer):
    """The server of an environment of OpenEnv."""

    fields = frozenset[str]()  # names of an action's fields

    def check_fields(self, action: str | None, observation: str | None) -> None:
        """Raises ValueError for a field that the action or the observation lacks, by the server's schema."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(f"{self.address}/schema", timeout=CONNECT) as answer:
                schema = json.loads(answer.read(MOST_BYTES))
            actions, observations = schema["action"], schema["observation"]
            self.fields = frozenset(actions["properties"])
            needed = set(actions.get("required", ()))
            shown = set(observations["properties"])
        except Exception as error:  # a server that is not OpenEnv's may send any answer
            reason = " ".join(repr(error).split())[:300]
            raise ValueError(
                f"{self}: GET /schema gave no schema of an OpenEnv environment: {reason}"
            ) from None
        if action is not None and action not in self.fields:
            names = ", ".join(sorted(self.fields.difference(_OF_EVERY_ACTION)))
            raise ValueError(f"action={action}: the environment's action has the fields {names}")
        if action is not None and (others := needed - {action}):
            raise ValueError(
                f"action={action}: the environment's action needs {', '.join(sorted(others))} too; without "
                "`action` the policy writes actions as JSON objects"
            )
        if observation is not None and observation not in shown:
            names = ", ".join(sorted(shown))
            raise ValueError(
                f"observation={observation}: the environment's observation has the fields {names}"
            )


@cache
def server_of(python: str | None, app: str | None, directory: str, url: str | None) -> OpenEnvServer:
    """The server with these options: one object in each process. Raises ValueError for wrong ones."""
    return OpenEnvServer.of("the OpenEnv server", _command, ("app", app), python, directory, url)


def _command(program: str, app: str, port: int) -> list[str]:
    own = ("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning")
    return [program, "-m", "uvicorn", app, *own]


class EnvironmentSession:
    """A WebSocket session, which has an environment of its own on the server."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT), trust_env=False
        )
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def open(self) -> None:
        """Raises LocalServerFailed."""
        url = await self._server.url()
        try:
            self._socket = await self._http.ws_connect(f"{url}/ws", max_msg_size=MOST_BYTES, heartbeat=None)
        except (aiohttp.ClientError, OSError) as error:
            raise LocalServerFailed(f"{self._server}: no session could be opened: {error!r}") from None

    async def ask(self, kind: str, data: Mapping[str, Any]) -> tuple[dict[str, Any], float | None, bool]:
        """Return the observation, the reward or None, and whether the episode is done.

        Raises LocalServerFailed, InvalidAction.
        """
        assert self._socket is not None
        try:
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
            message = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise LocalServerFailed(f"{self._server}: it did not take a {kind}: {error!r}") from None
        if message.type != aiohttp.WSMsgType.TEXT:
            ended = await self._server.local.ended() if self._server.local else None
            raise LocalServerFailed(ended or f"{self._server}: it closed the session at a {kind}")
        return self._read(message.data, kind, data)

    def _read(
        self, text: str, kind: str, data: Mapping[str, Any]
    ) -> tuple[dict[str, Any], float | None, bool]:
        try:
            answer = json.loads(text)
            body = answer["data"]
            if answer["type"] == "error":
                raise self._error(body, kind, data)
            observation, reward, is_done = body["observation"], body.get("reward"), body.get("done", False)
            if answer["type"] != "observation" or not isinstance(observation, dict):
                raise ValueError("not an observation")
            if not isinstance(reward, int | float | None) or not math.isfinite(reward or 0):
                raise ValueError("its reward is not a finite number")
            if not isinstance(is_done, bool):
                raise ValueError("`done` is not a boolean")
        except (InvalidAction, LocalServerFailed):
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LocalServerFailed(
                f"{self._server}: it answered a {kind} with {text[:80]!r} ({error!r}), which is not an "
                "observation of OpenEnv"
            ) from None
        return observation, reward, is_done

    def _error(self, body: Mapping[str, Any], kind: str, data: Mapping[str, Any]) -> Exception:
        """The exception of a server's error: the policy's mistake, or a failure of the environment."""
        code, message, errors = body.get("code"), str(body.get("message"))[:300], body.get("errors") or []
        own = self._server.fields | set(data)
        if kind == "step" and code == "VALIDATION_ERROR" and all(_concerns(error, own) for error in errors):
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in errors)
            return InvalidAction(f"this is not an action of the environment: {problems[:300]}")
        if code == "CAPACITY_REACHED":
            message += "; raise max_concurrent_envs in the application's create_app"
        return LocalServerFailed(f"{self._server}: {code} at a {kind}: {message}")

    async def close(self) -> None:
        """End the session. The server then closes its environment."""
        if self._socket is not None and not self._socket.closed:
            async with asyncio.timeout(CONNECT):
                await self._socket.send_str('{"type": "close"}')
                await self._socket.close()
        await self._http.close()


def _concerns(error: Mapping[str, Any], fields: frozenset[str] | set[str]) -> bool:
    """True if pydantic's error is about one of these fields of an action, or about the whole action."""
    return not error["loc"] or error["loc"][0] in fields


def _action(response: str, field: str | None) -> dict[str, Any]:
    """The action that the policy's text describes. Raises InvalidAction."""
    if field is not None:
        return {field: response}
    try:
        action = json.loads(response)
    except (ValueError, RecursionError) as error:
        raise InvalidAction(f"an action is a JSON object; this is not JSON: {error}") from None
    if not isinstance(action, dict):
        raise InvalidAction(f"an action is a JSON object; this is a {type(action).__name__}")
    return action


def _text(observation: Mapping[str, Any], field: str | None, server: OpenEnvServer) -> str:
    """The text of an observation. Raises LocalServerFailed if the observation lacks the configured field."""
    if field is not None and field not in observation:
        names = ", ".join(sorted(observation)) or "none"
        raise LocalServerFailed(f"{server}: an observation without the field {field}; it has {names[:300]}")
    without_metadata = {name: value for name, value in observation.items() if name != "metadata"}
    value = without_metadata if field is None else observation[field]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def _first_observations(server: OpenEnvServer, field: str | None, seeds: range) -> list[str]:
    """The first observation of each seed. Raises LocalServerFailed."""
    texts = []
    for seed in seeds:
        session = EnvironmentSession(server)
        try:
            async with asyncio.timeout(_FIRST):
                await session.open()
                observation, _, _ = await session.ask("reset", {"seed": seed})
        except TimeoutError:
            raise LocalServerFailed(
                f"{server}: no first observation for seed {seed} within {_FIRST:g} seconds"
            ) from None
        finally:
            with suppress(TimeoutError):  # the observation has arrived, or another error reports the failure
                await session.close()
        texts.append(_text(observation, field, server))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description="Write data whose prompts are an environment's first texts.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first prompt; each later one adds 1")
    for name in ("python", "app", "url", "observation"):
        parser.add_argument(f"--{name}", help=f"the option {name} of the environment")
    parser.add_argument("--directory", default=".", help="the option directory of the environment")
    options = parser.parse_args()
    target = (options.file, str(options.file), "a new file", None)
    server: OpenEnvServer | None = None
    try:
        check_named_file(*target)
        if options.prompts < 1 or not 0 <= options.seed <= _SEEDS - options.prompts:
            raise ConfigError(
                f"--prompts {options.prompts} --seed {options.seed}: want 1 or more prompts, and seeds from "
                f"0 to {_SEEDS - 1}"
            )
        server = server_of(options.python, options.app, options.directory, options.url)
        server.ensure()
        server.check_fields(None, options.observation)
        seeds = range(options.seed, options.seed + options.prompts)
        texts = asyncio.run(_first_observations(server, options.observation, seeds))
        records = [
            {"prompt": text, "answer": "", "observation": text, "reset": {"seed": seed}}
            for seed, text in zip(seeds, texts, strict=True)
        ]
        write_named_file(*target, "".join(json.dumps(record) + "\n" for record in records))
    except (ConfigError, ValueError, LocalServerFailed) as error:
        parser.error(str(error))
    finally:
        if server is not None and server.local is not None:
            server.local.stop()


if __name__ == "__main__":
    main()

"""Environments of OpenEnv by its released package: real servers, which also die, raise, lie or never start.

`openenv init` makes a whole environment, `echo`, which pays for the length of a message. COUNTDOWN is another
one, on the package's own base classes, with the failures.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import WSMsgType, web
from helpers.machine.processes import command_of
from helpers.servers.library_environments import Talks, library_python, serving
from helpers.suite.real_parts import used
from helpers.tiny_run import GVPO, configure, fit, records

from megatron_gvpo.conversations.adapters import openenv
from megatron_gvpo.conversations.adapters.local_server import LocalServer, LocalServerFailed
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.groups import LOST

ADAPTER = "megatron_gvpo.conversations.adapters.openenv"
OPENENV = f"{ADAPTER}:OpenEnv"
COUNTDOWN = '''
import os
import pathlib
import time
from typing import Literal

from pydantic import BaseModel

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Take(Action):
    number: int
    word: Literal["take", "die", "die once", "raise", "invalid", "unpaid", "slow"] = "take"


class Left(Observation):
    left: int = 0


class Inner(BaseModel):
    depth: int


class Countdown(Environment):
    """Pays for the number that is taken; ends at 0."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, start=None, fault=None, mark="", **more):
        if fault == "raise":
            raise RuntimeError("no board is left")
        self.left, self.mark = start or 3 + seed % 5, pathlib.Path(mark)
        return Left(left=self.left, done=fault == "over")

    def step(self, action):
        if action.word == "die" or (action.word == "die once" and not self.mark.exists()):
            self.mark.touch()
            print("out of memory, perhaps", flush=True)
            os._exit(7)
        if action.word == "raise":
            raise RuntimeError("the board broke")
        if action.word == "slow":
            time.sleep(2)
        if action.word == "invalid":
            Inner(depth="deep")
        self.left -= action.number
        if action.word == "unpaid":
            return Left(left=self.left, done=True)
        return Left(left=self.left, done=self.left <= 0, reward=action.number / 10)

    @property
    def state(self):
        return State()


app = create_app(Countdown, Take, Left, max_concurrent_envs=64)
narrow = create_app(Countdown, Take, Left)
'''


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two environments: `openenv init echo`, and the module countdown."""
    directory = tmp_path_factory.mktemp("openenv")
    command = [str(Path(library_python("openenv")).with_name("openenv")), "init", "echo"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=300)
    app = directory / "echo" / "server" / "app.py"
    one, many = "max_concurrent_envs=1,", "max_concurrent_envs=64,"
    assert one in app.read_text()
    app.write_text(app.read_text().replace(one, many))
    (directory / "countdown.py").write_text(COUNTDOWN)
    return directory


def served(directory: Path, app: str, **options: str) -> dict[str, Any]:
    return {"python": library_python("openenv"), "app": app, "directory": str(directory), **options}


@pytest.fixture(scope="module")
def countdown(directory: Path) -> Iterator[Talks]:
    """The policy writes actions as JSON, and gets observations as JSON."""
    with Talks(OPENENV, served(directory, "countdown:app")) as talks:
        used("OpenEnv")
        yield talks


def take(number: int, word: str = "take") -> str:
    return json.dumps({"number": number, "word": word})


@pytest.mark.usefixtures("leave_the_process_group")
def test_gvpo_trains_in_an_environment_of_openenv(task: Path, tmp_path: Path, directory: Path) -> None:
    options = served(directory, "echo.server.app:app", action="message", observation="echoed_message")
    settings = {"environment": OPENENV, "options": options, "turns": 2, "step_timeout": 60}
    config = configure(
        task,
        tmp_path / "run",
        *GVPO,
        *("train.steps=3", "data.eval=null", "rollout.max_tokens=24", "rollout.stop_token_ids=[6,7,8,9]"),
        f"rollout.conversation={json.dumps(settings)}",
        "rewards.components=[{name: environment}]",
    )
    fit(config)
    used("OpenEnv")
    _, *steps = records(tmp_path / "run")
    assert len(steps) == 3
    for step in steps:
        assert step["env/lost"] == 0 and step["env/turns"] > 1 and step["env/invalid_actions"] == 0
        assert 0 < step["reward/mean"] == pytest.approx(step["env/environment_reward"])
        assert step["train/grad_norm"] > 0, "messages of different lengths earn different rewards"
    assert not _servers("echo.server.app:app"), "the server ends with the run"


def test_an_episode_is_paid_as_the_environment_says(countdown: Talks) -> None:
    for rollout in countdown.hold([take(2), take(1)], n=3, reset={"start": 3}):
        assert [turn.reward for turn in rollout.turns] == [0.2, 0.1] and rollout.finish_reason == "stop"
        assert rollout.messages[1]["content"] == '{"left": 1}'
    [rollout] = countdown.hold([take(1), take(1), take(4)])
    assert json.loads(rollout.messages[1]["content"]) == {"left": 3 + 3 % 5 - 1}, "the seed of the group"


def test_the_policy_hears_of_its_invalid_actions(countdown: Talks) -> None:
    [rollout] = countdown.hold(["nine", "[1]", '{"number": "x"}', '{"a": 1}', take(9)], reset={"start": 3})
    answers = [message["content"] for message in rollout.messages[1::2]]
    assert rollout.counts["invalid_actions"] == 4 and rollout.turns[-1].reward == 0.9
    for answer, part in zip(
        answers, ("not JSON", "a list", "number: Input should be a valid integer", "a: Extra"), strict=True
    ):
        assert answer.startswith("Error: ") and part in answer


@pytest.mark.parametrize(
    ("word", "record", "reason"),
    [
        ("die", {}, "(exit code 7; it printed: out of memory, perhaps)"),
        ("raise", {}, "EXECUTION_ERROR at a step: the board broke"),
        ("invalid", {}, "VALIDATION_ERROR at a step"),
        ("unpaid", {}, "its episode ended without any reward"),
        ("take", {"reset": {"fault": "raise"}}, "EXECUTION_ERROR at a reset: no board is left"),
        ("take", {"reset": {"fault": "over"}}, "its episode is over after the reset"),
        ("take", {"reset": [1]}, "the record's `reset` is [1]: want a mapping"),
        ("take", {"observation": "other"}, "make the data again"),
    ],
)
def test_an_environment_that_fails_loses_the_conversation(
    countdown: Talks, word: str, record: dict[str, Any], reason: str
) -> None:
    [rollout] = countdown.hold([take(1, word), take(9)], **record)
    assert rollout.finish_reason == LOST and reason in rollout.text, rollout.text


def test_a_conversation_survives_the_end_of_its_server(countdown: Talks, tmp_path: Path) -> None:
    record = {"start": 5, "mark": str(tmp_path / "mark")}
    first, second = countdown.hold([take(1), take(1, "die once"), take(9)], n=2, reset=record)
    assert first.finish_reason == second.finish_reason == "stop"
    assert [turn.reward for turn in first.turns] == [0.1, 0.1, 0.9]
    assert first.messages == second.messages


def test_a_full_server_and_a_hung_one_are_failures_of_the_environment(directory: Path) -> None:
    with Talks(OPENENV, served(directory, "countdown:narrow"), step_timeout=5) as talks:
        # The second conversation starts while the first one takes its slow action.
        lost = [r for r in talks.hold([take(1, "slow"), take(9)], n=2) if r.finish_reason == LOST]
        assert lost and "CAPACITY_REACHED" in lost[0].text and "raise max_concurrent_envs" in lost[0].text
        [server] = _servers("countdown:narrow")
        server.send_signal(signal.SIGSTOP)
        [rollout] = talks.hold([take(9)])
        assert rollout.finish_reason == LOST and "took longer than 5 seconds" in rollout.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"python": "no/python"}, "python=no/python: there is no interpreter at"),
        ({"directory": "no"}, "directory=no: there is no such directory"),
        ({"app": "absent:app"}, "the OpenEnv server of absent:app ended"),
        ({"url": "http://127.0.0.1:9"}, "give python and app"),
    ],
)
def test_a_server_that_cannot_start_is_refused_before_the_run(
    directory: Path, options: dict[str, str], reason: str
) -> None:
    wrong = {**served(directory, "countdown:app"), **options}
    with pytest.raises(ConfigError) as refused, Talks(OPENENV, wrong):
        pass
    assert reason in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"action": "numbr"}, "action=numbr: the environment's action has the fields number, word"),
        ({"action": "word"}, "action=word: the environment's action needs number too"),
        (
            {"observation": "board"},
            "observation=board: the environment's observation has the fields done, left",
        ),
    ],
)
@pytest.mark.usefixtures("countdown")
def test_a_field_that_the_environment_lacks_is_refused_before_the_run(
    options: dict[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError) as refused, Talks(OPENENV, {"url": _url("countdown:app"), **options}):
        pass
    assert reason in str(refused.value) and "\n" not in str(refused.value)


def test_a_server_that_never_listens_is_ended_and_named(tmp_path: Path) -> None:
    server = LocalServer(
        "the server", lambda port: [sys.executable, "-c", "import time; time.sleep(99)"], str(tmp_path), 0.5
    )
    with pytest.raises(
        LocalServerFailed, match=r"the server did not listen on 127\.0\.0\.1:\d+ within 0\.5 seconds"
    ):
        server.start()
    assert "signal 9" in str(server.problem())


LIES = {
    "nothing": None,
    "no JSON": "hello",
    "a list": "[1]",
    "no observation": '{"type": "observation", "data": {}}',
    "another type": '{"type": "state", "data": {"observation": {}}}',
    "text as reward": '{"type": "observation", "data": {"observation": {}, "reward": "1"}}',
    "NaN as reward": '{"type": "observation", "data": {"observation": {}, "reward": NaN}}',
    "number as done": '{"type": "observation", "data": {"observation": {}, "reward": 1, "done": 1}}',
    "bytes": b"\x00",
    "no field": '{"type": "observation", "data": {"observation": {"other": 1}, "done": false}}',
    "nested": "[" * 100_000,
}
SHOWN = {"board": "1"}  # what it shows otherwise


@pytest.mark.parametrize("lie", LIES)
def test_garbage_is_a_failure_of_the_environment(liar: str, lie: str) -> None:
    with Talks(OPENENV, {"url": liar, "observation": "board"}) as talks:
        [rollout] = talks.hold([json.dumps({"lie": lie})])
        assert rollout.finish_reason == LOST and f"OpenEnv server {liar}" in rollout.text, rollout.text


@pytest.fixture(scope="module")
def liar() -> Iterator[str]:
    """The URL of a server whose step answers as the action asks: one of LIES."""

    async def schema(request: web.Request) -> web.Response:
        return web.json_response({"action": {"properties": {}}, "observation": {"properties": SHOWN}})

    async def answer(request: web.Request) -> web.WebSocketResponse:
        session = web.WebSocketResponse()
        await session.prepare(request)
        async for message in session:
            assert message.type == WSMsgType.TEXT
            order = json.loads(message.data)
            if order["type"] == "reset":
                await session.send_json(
                    {"type": "observation", "data": {"observation": SHOWN, "done": False}}
                )
            elif order["type"] == "close" or (lie := LIES[order["data"]["lie"]]) is None:
                await session.close()
            else:
                await (session.send_bytes(lie) if isinstance(lie, bytes) else session.send_str(lie))
        return session

    app = web.Application()
    app.add_routes([web.get("/schema", schema), web.get("/ws", answer)])
    with serving(app) as url:
        yield url


def test_data_can_be_written_from_an_environment(countdown: Talks, tmp_path: Path) -> None:
    file = tmp_path / "games.jsonl"
    flags = ("--url", _url("countdown:app"), "--observation", "left")
    command = [sys.executable, "-m", ADAPTER, str(file), "--prompts", "3", "--seed", "1", *flags]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["prompt"] for record in records] == ["4", "5", "6"]
    assert [record["reset"] for record in records] == [{"seed": 1}, {"seed": 2}, {"seed": 3}]
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2 and str(file) in again.stderr.splitlines()[-1]


@pytest.mark.parametrize("flags", [("--prompts", "0"), ("--prompts", "3", "--seed", "-1")])
def test_no_data_are_written_of_no_prompts_or_impossible_seeds(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
) -> None:
    file = tmp_path / "games.jsonl"
    monkeypatch.setattr(sys, "argv", ["openenv", str(file), "--url", "http://127.0.0.1:9", *flags])
    with pytest.raises(SystemExit) as ended:
        openenv.main()
    assert ended.value.code == 2 and " ".join(flags) in capsys.readouterr().err.splitlines()[-1]
    assert not file.exists()


def test_a_server_that_never_shows_anything_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection, and answers nothing."""
    monkeypatch.setattr(openenv, "_FIRST", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = openenv.OpenEnvServer(
            "the OpenEnv server", None, f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        with pytest.raises(LocalServerFailed, match=r"no first observation for seed 3 within 0\.2 seconds"):
            asyncio.run(openenv._first_observations(server, None, range(3, 5)))


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage\r\n\r\n",
        b'HTTP/1.0 200 OK\r\n\r\n{"action": {"properties": {}, "required": 5}, "observation": {}}',
        b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000,
    ],
)
def test_a_schema_that_is_none_is_named(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        server = openenv.OpenEnvServer(
            "the OpenEnv server", None, f"http://127.0.0.1:{listening.getsockname()[1]}"
        )
        with pytest.raises(ValueError, match="GET /schema gave no schema of an OpenEnv environment"):
            server.check_fields("word", None)
        thread.join(10)


def _servers(app: str) -> list[psutil.Process]:
    """The running servers of this application that descend from this process."""
    return [p for p in psutil.Process().children(recursive=True) if app in command_of(p)]


def _url(app: str) -> str:
    [server] = _servers(app)
    command = command_of(server)
    return f"http://127.0.0.1:{command[command.index('--port') + 1]}"

"""A weight push whose trainer is killed: the server goes on with its old weights, or says that it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.paths import HELPERS, IMPORTS
from helpers.servers.real_servers import PROMPTS, SharedServer, checksum

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.versions import REFERENCE
from megatron_gvpo.data.task import Task
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.sampling.server_checks import check_server
from megatron_gvpo.servers.http import PUSHES, TOO_EARLY, ServerRefused
from megatron_gvpo.servers.launch.start import DIALECTS
from megatron_gvpo.servers.server import PLUGINS
from megatron_gvpo.servers.sglang import RESERVED, SGLang
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.settings.sections import SamplingConfig

sys.path.append(str(PLUGINS))
import megatron_gvpo_watch
from megatron_gvpo_watch import HEADER, Watch

SILENCE = 30.0  # seconds
PATHS = {
    "vllm": ("/pause", "/resume", "/update_weights", "/v1/completions"),
    "sglang": ("/pause_generation", "/continue_generation", "/update_weights_from_tensor", "/generate"),
}


class Engine:
    """Stands for an engine's application: it is paused or not, and its pause may fail."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.paused = self.refuses = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.requests.append(path)
        if path in ("/pause", "/pause_generation") and not self.refuses:
            self.paused = True
        if path in ("/resume", "/continue_generation"):
            assert (await receive())["body"] == b"{}" and (b"authorization", b"Bearer key") in scope[
                "headers"
            ]
            self.paused = False
        status = 500 if self.refuses else 200
        if path == "/health" and self.paused and "/pause_generation" in self.requests:
            status = await self._status_of_paused_sglang()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"a key" if path == "/server_info" else b""})

    async def _status_of_paused_sglang(self) -> int:
        """SGLang's /health waits for any answer of its schedulers, which generate nothing now."""
        asked_before = self.requests.count("/server_info")
        await asyncio.sleep(0.05)
        return 200 if self.requests.count("/server_info") > asked_before else 503


class Server:
    """An engine behind the watch."""

    def __init__(self) -> None:
        self.engine = Engine()
        self._app = Watch(self.engine)

    async def post(self, path: str, *, trainer: bool = True, processes: int | None = None) -> tuple[int, str]:
        headers = [(b"authorization", b"Bearer key"), (b"content-length", b"2")]
        headers += [(HEADER, str(SILENCE).encode())] if trainer else []
        sent: list[dict[str, Any]] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        if processes is not None:  # as vLLM's application has it
            arguments = SimpleNamespace(api_server_count=processes)
            scope["app"] = SimpleNamespace(state=SimpleNamespace(args=arguments))
        await self._app(scope, receive, send)
        return sent[0]["status"], sent[1]["body"].decode()


class Clock:
    """Stands for the module time in the watch, which sees it move only when a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    async def pass_by(self, seconds: float) -> None:
        """Let the seconds pass, and then the watch look at the time."""
        self.now += seconds
        for _ in range(20):
            await asyncio.sleep(megatron_gvpo_watch.POLL)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(megatron_gvpo_watch, "POLL", 0.001)
    monkeypatch.setattr(megatron_gvpo_watch, "time", clock)
    return clock


@pytest.fixture(params=["vllm", "sglang"])
def paths(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return PATHS[request.param]


def test_trainers_and_servers_agree_on_the_header_and_the_status():
    assert PUSHES.lower().encode() == HEADER and megatron_gvpo_watch.TOO_EARLY == TOO_EARLY


def test_a_server_that_has_loaded_nothing_serves_as_before(clock: Clock, paths: tuple[str, ...]):
    """A request that came meanwhile is answered; the trainer, if it was only stopped, has to begin again."""
    pause, resume, load, generate = paths

    async def run() -> None:
        server = Server()
        assert (await server.post(pause))[0] == 200
        waiting = asyncio.create_task(server.post(generate, trainer=False))
        await clock.pass_by(0.9 * SILENCE)
        assert server.engine.requests == [pause]
        await clock.pass_by(0.2 * SILENCE)
        assert (await waiting)[0] == 200
        assert server.engine.requests == [pause, resume, generate]
        status, words = await server.post(load)
        assert status == 409 and "begin the push again" in words and server.engine.requests[-1] == generate
        assert [(await server.post(path))[0] for path in (pause, load, resume, generate)] == [200] * 4

    asyncio.run(run())


def test_a_server_with_half_loaded_weights_says_so_until_the_next_push(clock: Clock, paths: tuple[str, ...]):
    pause, resume, load, generate = paths

    async def run() -> None:
        server = Server()
        await server.post(pause)
        await server.post(load)
        waiting = asyncio.create_task(server.post(generate, trainer=False))
        await clock.pass_by(1.1 * SILENCE)
        assert "half loaded" in (await waiting)[1]
        status, _ = await server.post(generate, trainer=False)
        assert status == 503 and server.engine.paused and server.engine.requests == [pause, load]
        for path in (pause, load, resume):
            assert (await server.post(path))[0] == 200
        assert (await server.post(generate, trainer=False))[0] == 200

    asyncio.run(run())


def test_a_push_of_a_trainer_that_lives_is_left_alone(clock: Clock, paths: tuple[str, ...]):
    """Every request of the trainer says that it lives; others' requests to generate wait for the push."""
    pause, resume, _, generate = paths

    async def run() -> None:
        server = Server()
        await server.post(pause)
        waiting = asyncio.create_task(server.post(generate, trainer=False))
        for _ in range(4):
            await clock.pass_by(0.9 * SILENCE)
            await server.post("/health")
        assert server.engine.paused and not waiting.done()
        await server.post(resume)
        assert (await waiting)[0] == 200

    asyncio.run(run())


def test_a_server_paused_by_a_killed_trainer_is_healthy(clock: Clock, paths: tuple[str, ...]):
    """Otherwise the next trainer would wait for ever, and `serve` would restart the server."""
    pause, _, load, _ = paths

    async def run() -> None:
        server = Server()
        await server.post(pause)
        await server.post(load)
        await clock.pass_by(1.1 * SILENCE)
        for is_trainer in (False, True):
            assert await server.post("/health", trainer=is_trainer) == (200, "")

    asyncio.run(run())


def test_a_trainer_that_comes_after_a_killed_one_is_told_to_push_before_it_samples(
    clock: Clock, paths: tuple[str, ...]
):
    """Its request to generate would wait for its own push. Others' requests wait for it."""
    pause, resume, load, generate = paths

    async def run() -> None:
        server = Server()
        await server.post(pause)
        await server.post(load)
        await clock.pass_by(1.1 * SILENCE)
        status, words = await asyncio.wait_for(server.post(generate), 10.0)
        assert status == TOO_EARLY and "push all weights to this server" in words
        waiting = asyncio.create_task(server.post(generate, trainer=False))
        for path in (pause, load, resume):
            assert (await server.post(path))[0] == 200
        assert (await waiting)[0] == 200 and (await server.post(generate))[0] == 200

    asyncio.run(run())


def test_others_pauses_and_pauses_that_fail_are_no_pushes(clock: Clock, paths: tuple[str, ...]):
    pause, _, _, generate = paths

    async def run() -> None:
        server = Server()
        await server.post(pause, trainer=False)
        await clock.pass_by(2 * SILENCE)
        assert server.engine.paused and (await server.post(generate))[0] == 200
        server.engine.refuses = True
        assert (await server.post(pause))[0] == 500
        assert (await server.post(generate))[0] == 500
        assert server.engine.requests == [pause, generate, pause, generate]

    asyncio.run(run())


def test_a_server_of_several_http_processes_takes_no_trainer() -> None:
    """Other clients are served; a trainer is refused at its first request."""

    async def run() -> None:
        server = Server()
        status, words = await server.post("/version", processes=4)
        assert status == 409 and "has 4 HTTP processes" in words and "--api-server-count 1" in words
        assert server.engine.requests == []
        assert (await server.post("/v1/completions", trainer=False, processes=4))[0] == 200
        assert (await server.post("/version", processes=1))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("engine", "option"), [("sglang", "--tokenizer-worker-num"), ("vllm", "--api-server-count")]
)
def test_several_http_processes_are_refused_where_servers_are_started(
    engine: str, option: str, good: Path
) -> None:
    (good.parent / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')

    def command(*words: str) -> list[str]:
        overrides = [f"model.path={good.parent}", f"rollout.engine={engine}"]
        config = load_config([good], [*overrides, f"rollout.servers.args={list(words)}"])
        return (
            DIALECTS[engine].launch(config.model, config.rollout, ModelCards(config), 1, "key", True).command
        )

    for words in ((option, "4"), (f"{option}=4",), (option.replace("-", "_").replace("__", "--"), "4")):
        with pytest.raises(ConfigError, match=rf"^rollout\.servers\.args: {option} would give"):
            command(*words)
    assert option in command(option, "1") and option not in command()


def test_an_sglang_server_of_several_http_processes_is_refused(good: Path) -> None:
    """Its own answer says how many it has; the plugin is in none of them."""

    class Answers:
        url = "http://elsewhere:1"

        async def get(self, path: str, *, timeout: float) -> Any:
            info = {"version": REFERENCE["sglang"], "model_path": "m", "max_req_input_len": 93}
            return info | {"tp_size": 1, "pp_size": 1, "tokenizer_worker_num": 4}

    config = load_config([good], ["rollout.engine=sglang"])
    with pytest.raises(ConfigError, match=r"^rollout server http://elsewhere:1 has 4 HTTP processes"):
        asyncio.run(
            check_server(
                SGLang(Answers()), config.model, config.rollout, ModelCards(config), Task(None, (), [], [])
            )
        )


@pytest.mark.parametrize(("status", "is_refused"), [(TOO_EARLY, False), (500, True)])
def test_a_server_that_waits_for_weights_is_not_asked_for_a_sample(
    good: Path, status: int, is_refused: bool
) -> None:
    class Answers:
        url = "http://elsewhere:1"
        sampled = 0

        async def get(self, path: str, *, timeout: float) -> Any:
            info = {"version": REFERENCE["sglang"], "model_path": "m", "max_req_input_len": 4096}
            return info | {"tp_size": 1, "pp_size": 1}

        async def post(self, path: str, body: Any, *, timeout: float) -> Any:
            self.sampled += 1
            raise ServerRefused(f"status {status}", status)

    config = load_config([good], ["rollout.engine=sglang", "rollout.top_p=0.9", "rollout.top_k=8"])
    answers, task = Answers(), Task(None, (), [], [])
    check = check_server(SGLang(answers), config.model, config.rollout, ModelCards(config), task)
    with pytest.raises(ConfigError, match="status 500") if is_refused else contextlib.nullcontext():
        assert asyncio.run(check) == 4096 + RESERVED
    assert answers.sampled == 1


@pytest.mark.proof
@pytest.mark.parametrize("transport", ["broadcast", "delta"])
def test_a_real_server_outlives_a_killed_trainer(served: SharedServer, task: Path, transport: str):
    """Killed once paused, between two buckets, and while the server waits for one; then another pushes."""

    def push(end: str) -> int:
        command = [sys.executable, str(HELPERS / "programs" / "killed_pusher.py"), served.engine, served.url]
        command += [transport, str(task / "model"), end]
        environment = {**os.environ, "PYTHONPATH": IMPORTS}
        return subprocess.run(command, timeout=240, env=environment).returncode

    def generate() -> Any:
        return served.client("sample", PROMPTS[0], 4, 0, SamplingConfig(), [], timeout=60)

    assert push("whole") == 0  # the model's weights: other tests have left theirs
    before, version = checksum(served.client.loop, served.client.server), served.client("weight_version")
    assert push("paused") == -9
    assert generate().token_ids and served.client("weight_version") == version
    assert checksum(served.client.loop, served.client.server) == before
    for end in ("half", "sending"):
        assert push(end) == -9
        with pytest.raises(ServerRefused, match=r"503: the trainer .* half loaded"):
            generate()
        served.client("check_health", timeout=30)
        assert push("whole") == 0
        assert generate().token_ids and served.client("weight_version") == "7"
        assert checksum(served.client.loop, served.client.server) == before

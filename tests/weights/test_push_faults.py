"""Failed pushes: how often they are tried, and which files they leave alone."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from helpers.parts_of_a_run import weights_directory
from helpers.servers.fake_servers import itself

from megatron_gvpo.sampling.served import ServedEngine
from megatron_gvpo.servers.handle import Pending
from megatron_gvpo.servers.http import PUSHES, ServerRefused
from megatron_gvpo.servers.leader import BackgroundLoop, Failed, Push
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.servers.request import Request
from megatron_gvpo.servers.server import PLUGINS, Completion, ServerInfo
from megatron_gvpo.settings.config import Config, load_config
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.settings.servers import ServersConfig, WeightSyncConfig
from megatron_gvpo.weights import publisher
from megatron_gvpo.weights.bucket import Bucket, TensorSpec
from megatron_gvpo.weights.disk import Disk
from megatron_gvpo.weights.publisher import Publisher, push_until_done

sys.path.append(str(PLUGINS))
from megatron_gvpo_watch import Watch


class Refusing:
    """Stands for a server that answers, but refuses weights."""

    url = "http://server"

    async def info(self, timeout: float) -> ServerInfo:
        return ServerInfo("1", "model", 0, 1)

    async def weight_version(self, timeout: float) -> str:
        return "default"

    async def pause(self, timeout: float) -> None:
        raise ServerRefused(f"{self.url}: no", 400)


class Replaced:
    """Stands for the supervisor of the server's process, and counts its restarts."""

    failed = None

    def __init__(self) -> None:
        self.urls: list[str] = []

    def restart(self, url: str) -> None:
        self.urls.append(url)


def test_a_server_that_was_started_anew_has_all_its_attempts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One more failure does not cost a third start: starts take minutes, and their number is limited."""
    monkeypatch.setattr(publisher, "RETRY_AFTER", 0.0)
    loop, supervisor = BackgroundLoop("test"), Replaced()
    pool = ServerPool([Refusing()], ServersConfig(), [], print, supervisor)  # type: ignore[list-item, arg-type]
    settings = WeightSyncConfig(attempts=2, transport="disk")
    pushes = Publisher(
        pool,
        loop,
        Disk(itself, tmp_path / "weights", 5.0),
        settings,
        dtype=torch.float32,
        device=torch.device("cpu"),
        expected={},
        optional=frozenset(),
        fp8=None,
        colocated=False,
        report=print,
    )

    async def back() -> None:
        pool.handles[0].to(Pending())

    replaced = []
    while True:
        loop.run(back())
        if (command := pushes.next_command(1)) != Push():
            break
        pushes.attempt(iter(()), 1)
        replaced.append(len(supervisor.urls))
    assert replaced == [0, 1, 1, 2]
    assert isinstance(command, Failed)
    assert str(command.error) == "4 weight pushes in a row failed, at last: http://server: no"
    pushes.close()
    loop.close()


class Serving:
    """Stands for a server that samples until it is told to stop, and then ends its responses."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._stopped = asyncio.Event()
        self.prompts: list[list[int]] = []  # of all requests

    async def sample(self, token_ids: list[int], *_: object) -> Completion:
        self.prompts.append(token_ids)
        if not self._stopped.is_set():
            await self._stopped.wait()
            return Completion([5], [-1.0], "abort")
        return Completion([7], [-1.0], "stop")

    async def abort(self, timeout: float) -> None:
        self._stopped.set()

    async def pause(self, timeout: float) -> None: ...

    async def resume(self, timeout: float) -> None: ...

    async def flush_cache(self, timeout: float) -> None: ...


class Nowhere:
    """Stands for a transport, for servers that keep no weights."""

    metrics: ClassVar[dict[str, float]] = {}

    async def begin(self, *_: object) -> None: ...

    async def end(self) -> None: ...

    def over(self) -> None: ...


def test_responses_that_a_push_has_stopped_go_on_where_they_were():
    """The first server that is admitted again must not get the responses of all."""
    loop, servers = BackgroundLoop("test"), [Serving(f"http://server{i}") for i in range(4)]
    pool = ServerPool(servers, ServersConfig(), [7], print)  # type: ignore[arg-type]
    pushes = Publisher(
        pool,
        loop,
        Nowhere(),  # type: ignore[arg-type]
        WeightSyncConfig(in_flight="carry"),
        dtype=torch.float32,
        device=torch.device("cpu"),
        expected={},
        optional=frozenset(),
        fp8=None,
        colocated=False,
        report=print,
    )

    async def healthy() -> None:
        for handle in pool.handles:
            handle.to(Pending())

    async def all_have_begun() -> None:
        while sum(len(server.prompts) for server in servers) < 32:
            await asyncio.sleep(0.001)

    loop.run(healthy())
    requests = [Request((number,), 1, number) for number in range(32)]
    responses = None
    for version in (0, 1):
        while pushes.next_command(version) == Push():
            pushes.attempt(iter(()), version)
        if responses is None:
            responses = loop.submit(pool.generate(requests, SamplingConfig(max_tokens=4)))
            loop.run(all_have_begun())
    assert [[r.token_ids for r in row] for row in responses.result(5.0)] == [[[5, 7]]] * 32
    for server in servers:
        first, second = server.prompts[:8], server.prompts[8:]
        assert sorted([*prompt, 5] for prompt in first) == sorted(second), server.url
    loop.close()


class OnTheTrainersGpus(Serving):
    """A server behind the watch that has the trainer's memory in its turns."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.parts = {"weights", "cache"}  # of its own memory
        self._watch = Watch(self._accepted)

    @staticmethod
    async def _accepted(scope: object, receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def _ask_the_watch(self, path: str) -> None:
        """Send the watch a request of the trainer, and return when it has let the request pass."""
        answer: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            answer.append(message)

        headers = [(PUSHES.lower().encode(), b"90")]
        await self._watch({"type": "http", "path": path, "headers": headers}, None, send)
        if (status := answer[0]["status"]) != 200:
            raise ServerRefused(f"{self.url}: status {status}: {answer[1]['body'].decode()}", status)

    async def sample(self, token_ids: list[int], *how: object) -> Completion:
        await self._ask_the_watch("/v1/completions")
        return await super().sample(token_ids, *how)

    async def pause(self, timeout: float) -> None:
        await self._ask_the_watch("/pause")

    async def resume(self, timeout: float) -> None:
        assert self.parts == {"weights", "cache"}
        await self._ask_the_watch("/resume")

    async def weight_version(self, timeout: float) -> str:
        return "0"

    async def offload_memory(self, timeout: float) -> None:
        await self._ask_the_watch("/sleep")
        self.parts.clear()

    async def onload_memory(self, part: str, timeout: float) -> None:
        self.parts.add(part)


def colocated_engine(servers: list[OnTheTrainersGpus], loop: BackgroundLoop) -> ServedEngine:
    """The engine of these servers, asleep. Its trainer takes a moment to release its memory."""
    pool = ServerPool(servers, ServersConfig(colocated=True, start_timeout=1.0), [7], print)  # type: ignore[arg-type]
    pushes = Publisher(
        pool,
        loop,
        Nowhere(),  # type: ignore[arg-type]
        WeightSyncConfig(transport="colocated"),
        dtype=torch.float32,
        device=torch.device("cpu"),
        expected={},
        optional=frozenset(),
        fp8=None,
        colocated=True,
        report=print,
    )

    def release(part: str) -> None:
        time.sleep(0.2)

    def restore(part: str) -> None:
        assert not any(server.parts for server in servers), part

    engine = ServedEngine.__new__(ServedEngine)
    engine.servers, engine.asleep = SimpleNamespace(pool=pool, loop=loop), False  # type: ignore[assignment]
    engine._memory = SimpleNamespace(release=release, restore=restore, copy_weights_ahead=print)  # type: ignore[assignment]
    engine._weights = SimpleNamespace(  # type: ignore[assignment]
        push=lambda version: push_until_done(pushes, lambda: iter(()), version), open_servers=pushes.open
    )

    async def healthy() -> None:
        for handle in pool.handles:
            handle.to(Pending())

    loop.run(healthy())
    engine._sleep()
    return engine


def test_the_trainers_weights_return_when_no_server_has_their_memory():
    """A server that came back while others generated made the trainer take the memory of the others."""
    loop, servers = BackgroundLoop("test"), [OnTheTrainersGpus(f"http://server{i}") for i in range(2)]
    engine = colocated_engine(servers, loop)
    pool = engine.servers.pool

    async def begun_and_one_came_back() -> None:
        while not servers[0].prompts:
            await asyncio.sleep(0.001)
        pool.lose(pool.handles[1], "it ended")
        pool.handles[1].to(Pending())

    engine._push(1)
    response = loop.submit(pool.generate([Request((1,), 1, 1)], SamplingConfig(max_tokens=4)))
    loop.run(begun_and_one_came_back())
    assert pool.wants_weights
    engine._push(1)
    assert [server.parts for server in servers] == [{"weights", "cache"}] * 2
    [[rollout]] = response.result(5.0)
    assert (rollout.token_ids, rollout.spans) == ([5, 7], [(1, 0, 2)])
    loop.close()


def test_colocated_servers_are_asked_for_carried_responses_when_they_have_resumed():
    """They refuse a trainer that samples in the middle of its push, and would count as lost."""
    loop, servers = BackgroundLoop("test"), [OnTheTrainersGpus(f"http://server{i}") for i in range(2)]
    engine = colocated_engine(servers, loop)
    pool = engine.servers.pool
    engine._push(0)
    requests = [Request((number,), 1, number) for number in range(4)]
    responses = loop.submit(pool.generate(requests, SamplingConfig(max_tokens=4)))

    async def all_have_begun() -> None:
        while sum(len(server.prompts) for server in servers) < 4:
            await asyncio.sleep(0.001)

    loop.run(all_have_begun())
    engine._sleep()
    engine._push(1)
    rollouts = [rollout for row in responses.result(5.0) for rollout in row]
    assert [(r.token_ids, r.spans) for r in rollouts] == [([5, 7], [(0, 0, 1), (1, 1, 2)])] * 4
    assert [len(server.prompts) for server in servers] == [4, 4], "all waited until both had resumed"
    assert [handle.losses for handle in pool.handles] == [0, 0]
    loop.close()


def config_of(good: Path, out: Path, shared: Path | None) -> Config:
    where = f"rollout.weights.directory={shared or 'null'}"
    return load_config([good], ["rollout.engine=sglang", f"output_dir={out}", where])


def test_a_run_removes_nothing_of_others_from_a_directory_that_they_share(good: Path, tmp_path: Path):
    """Another run's weights stay, and so do the user's own files, whatever their names."""
    shared = tmp_path / "scratch"
    (shared / "version_0").mkdir(parents=True)
    (shared / "version_0" / "mine").write_text("years of work")
    runs = [
        Disk(itself, weights_directory(config_of(good, tmp_path / name, shared)), 5.0) for name in ("a", "b")
    ]
    bucket = Bucket([TensorSpec("w", "uint8", (4,))], torch.zeros(4, dtype=torch.uint8))

    async def pushed(run: Disk, version: int) -> None:
        await run.begin([], version)
        await run.send(bucket)
        await run.end()

    for version in range(2):
        for run in runs:
            asyncio.run(pushed(run, version))
    files = {str(file.relative_to(shared)) for file in shared.rglob("*.safetensors")}
    assert len(files) == 2 and all("version_1/" in file for file in files)
    asyncio.run(runs[0].close())
    assert len(list(shared.rglob("*.safetensors"))) == 1
    asyncio.run(runs[1].close())
    assert [file.read_text() for file in shared.rglob("*") if file.is_file()] == ["years of work"]


def test_a_folder_of_the_user_s_in_the_output_directory_stays(good: Path, tmp_path: Path):
    folder = weights_directory(config_of(good, tmp_path, None))
    folder.mkdir()
    (folder / "resnet.pt").write_text("years of work")
    run = Disk(itself, folder, 5.0)
    asyncio.run(run.begin([], 0))
    asyncio.run(run.close())
    assert [path.name for path in folder.iterdir()] == ["resnet.pt"]


def test_the_weights_of_a_run_that_goes_on_are_where_they_were(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(good, tmp_path / "run", tmp_path / "scratch")
    assert weights_directory(config) == weights_directory(config) != tmp_path / "scratch"
    monkeypatch.chdir(tmp_path)  # a server need not have been started there
    assert weights_directory(config_of(good, Path("run"), None)) == tmp_path / "run" / "weights"
    assert weights_directory(config_of(good, Path("run"), Path("scratch"))) == weights_directory(config)

"""Real SGLang and vLLM servers on the tiny model, for tests.

tools/engines/make_env.sh builds their environments once, in minutes, in the user's cache. Where an
environment cannot be built, the tests that need it fail and say why: a real part that silently did not run is
a defect.
"""

from __future__ import annotations

import functools
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.paths import HELPERS, ROOT
from helpers.servers.fake_servers import admit_at_once
from helpers.suite.real_parts import used
from helpers.tiny_run import configure
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers.http import Http, open_session
from megatron_gvpo.servers.launch.start import DIALECTS, start_servers
from megatron_gvpo.servers.launch.supervise import Supervisor, is_healthy
from megatron_gvpo.servers.leader import BackgroundLoop
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.servers.server import Server
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.servers import ServersConfig
from megatron_gvpo.weights.receivers import receiver_class

ENGINES = ("sglang", "vllm")
PROMPTS = [[9, 16, 10, 17, 8, 16, 7, 19], [5, 5, 5], [12, 3, 4, 14, 9, 10]]
# Parameters for tests that need servers of their own, which take half a minute to start: one engine in
# `make test`, the other one in `make proof`.
SGLANG_FIRST = ["sglang", pytest.param("vllm", marks=pytest.mark.proof)]
VLLM_FIRST = ["vllm", pytest.param("sglang", marks=pytest.mark.proof)]
BUILD_SECONDS = 1200.0
START_SECONDS = 300.0


@functools.cache
def engine_python(engine: str) -> str:
    """The interpreter of the engine's own environment, built where it is missing."""
    script = ROOT / "tools" / "engines" / "make_env.sh"
    built = subprocess.run([script, engine], capture_output=True, text=True, timeout=BUILD_SECONDS)
    assert built.returncode == 0, f"no environment for {engine}:\n{built.stderr[-3000:]}"
    return built.stdout.strip().splitlines()[-1]


def engine_with(plugin: str, engine: str, directory: Path) -> str:
    """An override that runs the engine with a plugin of helpers/on_cpu, through a script in `directory`."""
    python, folder = directory / "python", HELPERS / "on_cpu" / plugin
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{folder}" exec {engine_python(engine)} "$@"\n')
    python.chmod(0o755)
    return f"rollout.servers.python={python}"


def served_config(engine: str, task: Path, out: Path, *overrides: str) -> Config:
    """The tiny run's configuration with rollouts from `engine`'s servers."""
    own = (
        f"rollout.engine={engine}",
        f"rollout.servers.python={engine_python(engine)}",
        "rollout.servers.context_length=256",
    )
    return configure(task, out, *own, *overrides)


@contextmanager
def running(
    engine: str, task: Path, out: Path, *overrides: str, key: str | None = None
) -> Iterator[Supervisor]:
    """Context in which healthy servers of `engine` run on the tiny model, under a supervisor."""
    with served(served_config(engine, task, out, *overrides), key) as supervisor:
        yield supervisor


@contextmanager
def served(config: Config, key: str | None = None) -> Iterator[Supervisor]:
    """Context in which the configuration's servers run, healthy, under a supervisor."""
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as environment:  # lets a server load checkpoints of the test
        environment.setenv("MEGATRON_GVPO_WEIGHTS", tempfile.gettempdir())
        supervisor = start_servers(
            config.model, config.rollout, config.output_dir, ModelCards(config), key, messages.append
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not all(is_healthy(process.url, 5.0) for process in supervisor.processes):
            logs = "\n".join(process.tail() for process in supervisor.processes)
            assert supervisor.failed is None and time.monotonic() < deadline, "\n".join([*messages, logs])
            time.sleep(0.5)
        used(f"{config.rollout.engine} server")
        yield supervisor
    finally:
        supervisor.close()


@contextmanager
def another_node() -> Iterator[tuple[int, str]]:
    """A process with its own /dev/shm, and the command prefix that enters it."""
    script = "mount -t tmpfs tmpfs /dev/shm && echo there && exec sleep infinity"
    process = subprocess.Popen(["unshare", "--mount", "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        yield process.pid, f"nsenter --target {process.pid} --mount --"
    finally:
        process.kill()
        process.wait()


class Client:
    """Synchronous client of a server's dialect."""

    def __init__(self, engine: str, url: str) -> None:
        self.loop = BackgroundLoop("test client")
        self._session = self.loop.run(open_session())
        self.server: Server = DIALECTS[engine](Http(self._session, url))

    def __call__(self, name: str, *arguments: object, timeout: float = 120.0) -> object:
        return self.loop.run(getattr(self.server, name)(*arguments, timeout))

    def receiver(self, transport: str, name: str, *arguments: object, timeout: float = 120.0) -> object:
        """A call of the server's receiver for a transport."""
        return self.loop.run(getattr(receiver(self.server, transport), name)(*arguments, timeout))

    def http(self, path: str, body: object = None, timeout: float = 60.0) -> object:
        return self.loop.run(self.server.http.post(path, body, timeout=timeout))

    def close(self) -> None:
        self.loop.run(self._session.close())
        self.loop.close()


@dataclass
class SharedServer:
    """A server that the fixture `served` has started, and a client of it."""

    engine: str
    url: str
    pid: int  # the leader of its process group
    client: Client


def pool_of(client: Client, stop_ids: list[int]) -> ServerPool:
    """A pool of the client's server alone, on the client's loop, with weights of version 0."""

    async def make() -> ServerPool:
        pool = ServerPool([client.server], ServersConfig(start_timeout=60), stop_ids, print)
        await pool.start()
        await admit(pool, 0)
        return pool

    return client.loop.run(make())


async def admit(pool: ServerPool, version: int) -> None:
    """Admit the pool's only server as after a push of this version, with the weights that it has."""
    [handle] = pool.handles
    weights = receiver(handle.server, "broadcast")
    await weights.begin_update(30)
    await weights.end_update(str(version), 30)
    admit_at_once(pool, version)


def receiver(server: Server, transport: str) -> Any:
    """The receiver that a push over the transport has for the server."""
    engine = next(name for name, dialect in DIALECTS.items() if isinstance(server, dialect))
    return receiver_class(engine, transport)(server)


def logprobs(
    model: Path, prompt: list[int], response: list[int], temperature: float = 1.0, loaded: Any = None
) -> torch.Tensor:
    """Log-probs of the response's tokens by transformers, in fp32; `loaded`: the model, if it is loaded."""
    with torch.no_grad():
        model_of = loaded or reference(model)
        logits = model_of(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, torch.tensor(response)[:, None]).squeeze(1)


def reference(model: Path) -> Any:
    """The model of transformers, in fp32."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def checksum(loop: BackgroundLoop, server: Server) -> dict[str, str]:
    """The server's own checksums of the tensors that it computes with."""
    sglang = isinstance(server, DIALECTS["sglang"])
    path = "/weights_checker" if sglang else "/weight_checker"
    answer = loop.run(server.http.post(path, {"action": "checksum"}, timeout=60))
    return {str(i): rank["checksums"] for i, rank in enumerate(answer["ranks"])} if sglang else answer

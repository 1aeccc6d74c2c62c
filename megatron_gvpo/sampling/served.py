"""Rollouts from servers: rank 0 asks them, all ranks get the answers.

While rank 0 waits for responses the other ranks wait for its word, at most a heartbeat long, on the CPU: a
colocated engine has the GPUs to itself. A word may be "push": a server came back and needs the weights, which
takes all ranks.
"""

from __future__ import annotations

import concurrent.futures
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import torch
import torch.distributed as dist

from megatron_gvpo.config.schema import Config, ConfigError, SamplingConfig, ServersConfig
from megatron_gvpo.rollout.background_loop import BackgroundLoop
from megatron_gvpo.rollout.checks import check_server
from megatron_gvpo.rollout.http import Http, ServerGone, open_session
from megatron_gvpo.rollout.nccl import check_nccl
from megatron_gvpo.rollout.pool import RolloutError, ServerPool
from megatron_gvpo.rollout.routed_experts import Routers
from megatron_gvpo.rollout.server import Server
from megatron_gvpo.rollout.sglang import SGLang
from megatron_gvpo.rollout.supervise import ServerProcess, Supervisor, free_ports
from megatron_gvpo.rollout.vllm import VLLM
from megatron_gvpo.runtime.collectives import broadcast_msgpack
from megatron_gvpo.sampling.collect import TrainerMemory, pack_rollout
from megatron_gvpo.sampling.engine import Request, check_request, derived_seed
from megatron_gvpo.types import Group, Prompt, Rollout

DIALECTS: dict[str, type[Server]] = {"sglang": SGLang, "vllm": VLLM}
HEARTBEAT = 5.0  # seconds that the other ranks wait at most without a word from rank 0


@dataclass(frozen=True)
class Ticket:
    """Responses that were asked for; `future` is rank 0's."""

    prompts: Sequence[Prompt]
    future: concurrent.futures.Future[list[list[Rollout]]] | None


class ServedRollouts:
    """The rollout servers of a run; a context manager, in which they are healthy. Collective throughout.

    `push` gives the current weights to servers that lack them, on all ranks. Colocated servers rest but
    between a push and the end of `collect`: whenever they do not, `memory`'s "training" part is theirs.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        end_token_id: int,
        model: dict[str, Any],
        memory: TrainerMemory | None = None,
    ) -> None:
        self.config = config
        self.memory = memory if config.rollout.servers.colocated else None
        self.resting = False  # the servers, on every rank
        self._tokenizer, self._end, self._model = tokenizer, end_token_id, model
        self.push: Callable[[], None] = _no_push
        self.on_heartbeat: Callable[[], None] = _nothing  # on every rank at once, while responses are awaited
        self.fleet: ServerPool | None = None  # rank 0's, from here on
        self.loop: BackgroundLoop | None = None
        self._supervisor: Supervisor | None = None
        self._session: aiohttp.ClientSession | None = None

    def __enter__(self) -> Self:
        """Start or find the servers. Raises ConfigError for one that does not fit, RolloutError for none."""
        if self.memory is not None:
            self.memory.release("training")
            self.memory.release("weights")
        try:
            opening = self._open() if dist.get_rank() == 0 else None
            while (word := broadcast_msgpack(_how(opening)))[0] == "wait":
                pass
            if word[0] != "open":
                raise (ConfigError if word[0] == "config" else RolloutError)(word[1])
            self.rest()
        except BaseException:  # nobody calls __exit__ then
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, seed: int) -> Ticket:
        """Ask for `n` responses to each prompt; returns at once. Raises ValueError for an impossible one."""
        requests = [Request(p.token_ids, n, derived_seed(seed, i)) for i, p in enumerate(prompts)]
        for prompt, request in zip(prompts, requests, strict=True):
            room = self._model.get("max_position_embeddings")
            if problem := check_request(request, sampling, self._model["vocab_size"], room):
                raise ValueError(f"prompt {prompt.id}: {problem}")
        if self.fleet is None or self.loop is None:
            return Ticket(prompts, None)
        return Ticket(prompts, self.loop.submit(self.fleet.generate(requests, sampling)))

    def collect(self, ticket: Ticket) -> list[Group]:
        """The complete groups, in prompt order, the same on every rank. Raises RolloutError."""
        try:
            return self._collect(ticket)
        finally:
            if ticket.future is not None:
                ticket.future.cancel()  # without effect but where something was raised
            self.rest()

    def rest(self) -> None:
        """Colocated servers give their memory back, and the trainer takes its own. Collective."""
        if self.memory is None or self.resting:
            return
        if self.fleet is not None and self.loop is not None:
            self.loop.run(self.fleet.rest())
        broadcast_msgpack(None)  # the others begin when rank 0 has ended
        self.memory.restore("weights")
        self.memory.restore("training")
        self.resting = True

    def _collect(self, ticket: Ticket) -> list[Group]:
        while True:
            match broadcast_msgpack(self._next(ticket)):
                case ["wait", _]:
                    self.on_heartbeat()
                case ["push", _]:
                    self.push()
                case ["done", rows]:
                    rollouts = [[Rollout(**r) for r in row] for row in rows]
                    return [Group(p, row) for p, row in zip(ticket.prompts, rollouts, strict=True)]
                case [_, problem]:
                    raise RolloutError(problem)

    def _next(self, ticket: Ticket) -> tuple[str, Any] | None:
        """Rank 0's next word about a ticket."""
        if ticket.future is None or self.fleet is None:
            return None
        deadline = time.monotonic() + HEARTBEAT
        while time.monotonic() < deadline:
            done, _ = concurrent.futures.wait([ticket.future], timeout=0.2)
            if done:
                try:
                    rows = ticket.future.result()
                except RolloutError as error:
                    return "error", str(error)
                self._decode(rows)
                return "done", [[pack_rollout(r) for r in row] for row in rows]
            if self.fleet.wants_weights:
                return "push", None
        return "wait", None

    def _decode(self, rows: list[list[Rollout]]) -> None:
        flat = [rollout for row in rows for rollout in row]
        texts = self._tokenizer.batch_decode([r.token_ids for r in flat], skip_special_tokens=True)
        for rollout, text in zip(flat, texts, strict=True):
            rollout.text = text

    def _open(self) -> concurrent.futures.Future[None]:
        """Rank 0: processes, session, fleet. The future is done when all servers are healthy and fit."""
        servers, config = self.config.rollout.servers, self.config
        dialect = DIALECTS[config.rollout.engine]
        self.loop = BackgroundLoop("rollout client")
        try:
            if servers.urls:
                urls, key = list(servers.urls), os.environ.get(servers.api_key_env or "")
                if servers.api_key_env and not key:
                    raise ConfigError(f"rollout.servers.api_key_env: ${servers.api_key_env} is not set")
            else:
                key = secrets.token_hex(16)
                self._supervisor = start_servers(config, key, report)
                urls = [process.url for process in self._supervisor.processes]
        except (ConfigError, OSError) as error:
            failed: concurrent.futures.Future[None] = concurrent.futures.Future()
            failed.set_exception(error)
            return failed
        self._session = self.loop.run(open_session())
        members = [dialect(Http(self._session, url, key)) for url in urls]
        stop_ids = (self._end, *config.rollout.stop_token_ids)
        routers = Routers.of(self._model) if config.rollout.router_replay else None
        self.fleet = ServerPool(members, servers, stop_ids, report, self._supervisor, routers)
        return self.loop.submit(self._ready(self.fleet))

    async def _ready(self, fleet: ServerPool) -> None:
        await fleet.start()
        for member in fleet.members:
            await check_server(member.server, self.config, self._model)

    def _close(self) -> None:
        if self.loop is not None and self.fleet is not None:
            self.loop.run(self.fleet.stop())
            self.loop.cancel_all()
        if self.loop is not None:
            if self._session is not None:
                self.loop.run(self._session.close())
            self.loop.close()
        if self._supervisor is not None:  # last, so that nobody waits for what it ends
            self._supervisor.close()
        self.fleet = self.loop = self._supervisor = self._session = None


def _how(opening: concurrent.futures.Future[None] | None) -> tuple[str, str] | None:
    """How rank 0's opening goes: "wait", after a heartbeat; "open"; or whose error it is, and its text."""
    if opening is None:
        return None
    concurrent.futures.wait([opening], timeout=HEARTBEAT)
    if not opening.done():
        return "wait", ""
    try:
        opening.result()
    except ConfigError as error:
        return "config", str(error)
    except (RolloutError, ServerGone, OSError) as error:
        return "rollout", str(error)
    return "open", ""


def start_servers(config: Config, key: str | None, report: Callable[[str], None]) -> Supervisor:
    """Start `rollout.servers.count` servers on this machine, under a supervisor."""
    servers = config.rollout.servers
    dialect = DIALECTS[config.rollout.engine]
    first = servers.port
    ports = [first + i for i in range(servers.count)] if first else free_ports(servers.count, servers.host)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        check_nccl(config, ".".join(map(str, torch.cuda.nccl.version())))
    gpus = server_gpus(servers, torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    logs = Path(config.output_dir) / "servers"
    processes = []
    for i, port in enumerate(ports):
        launch = dialect.launch(config, port, key, on_gpu)
        if on_gpu:
            launch.environment["CUDA_VISIBLE_DEVICES"] = visible(gpus[i])
            if servers.colocated:  # which SGLang's memory saver refuses, whatever is good for the trainer
                names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
                launch.environment.update(dict.fromkeys(names, "expandable_segments:False"))
        else:  # memory that a server frees stays its own: for large tensors fresh pages cost more than a copy
            large = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
            launch.environment.update(large)
        processes.append(ServerProcess(launch, f"http://{servers.host}:{port}", logs / f"{port}.log"))
    supervisor = Supervisor(processes, servers, report)
    try:
        supervisor.start()
    except OSError as error:
        supervisor.close()
        raise ConfigError(
            f"rollout servers cannot be started: {error}. Their logs go to {logs}; "
            f"rollout.servers.python={servers.python} is to be the interpreter of the engine's environment"
        ) from None
    return supervisor


def server_gpus(servers: ServersConfig, present: int, ranks: int) -> list[range]:
    """Each server's GPUs of this machine, which has `present`, the first `ranks` of them with the trainer's.

    Raises ConfigError where there are too few; on a machine without any, nobody asks which.
    """
    first = 0 if servers.colocated else ranks
    wanted = servers.count * servers.tp
    if present and first + wanted > present:
        needed = f"{wanted} GPUs beside the trainer's {first}" if first else f"{wanted} GPUs"
        raise ConfigError(
            f"rollout.servers.count={servers.count} x rollout.servers.tp={servers.tp}: {needed}, "
            f"and this machine has {present}; use fewer, let them share with the trainer "
            "(rollout.servers.colocated=true), or start them elsewhere (megatron-gvpo serve)"
        )
    return [range(first + i * servers.tp, first + (i + 1) * servers.tp) for i in range(servers.count)]


def visible(gpus: Sequence[int]) -> str:
    """CUDA_VISIBLE_DEVICES for these, of the GPUs that this process may see."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return ",".join(ours[i].strip() if ours != [""] else str(i) for i in gpus)


def report(message: str) -> None:
    """Say something to the user, beside the progress display."""
    print(message, file=sys.stderr, flush=True)


def _nothing() -> None:
    pass


def _no_push() -> None:
    raise RuntimeError("no weights were pushed yet")

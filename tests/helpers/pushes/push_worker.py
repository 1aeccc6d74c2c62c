"""Rank functions of a trainer that pushes weights to a real server."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from helpers.inputs.rows import make_rows
from helpers.servers.real_servers import PROMPTS, checksum, receiver
from helpers.tiny_run import configure
from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Prompt
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.sampling.served import ServedEngine
from megatron_gvpo.servers import leader
from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.session import ServerSession
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.sections import SamplingConfig

PUSHES = ("broadcast", "broadcast", "disk", "delta", "delta", "shared")  # the transport of each push
LAYOUTS = {"single": (), "tp2": ("parallel.tp=2",), "pp2": ("parallel.pp=2",), "dp2": ()}
LAYOUTS["adapter"] = ("model.adapter={rank: 4, alpha: 8}",)  # the merged weights are pushed
GREEDY = SamplingConfig(top_p=1e-6, max_tokens=12)
SAMPLED = SamplingConfig(max_tokens=24)


def served_engine(config: Config, policy: Policy) -> ServedEngine:
    """The engine of a run whose prompts are PROMPTS."""
    prompts = [Prompt(str(i), tuple(prompt), "") for i, prompt in enumerate(PROMPTS)]
    task = Task(load_tokenizer(config.model.path), (1,), prompts, [])
    return ServedEngine(config.model, config.rollout, config.output_dir, ModelCards(config), task, policy)


def run(engine: str, url: str, task: str, out: str, layout: str) -> None:
    """Push before and after training steps, over each transport; write the server's answers.

    The delta transport sends everything the first time, and a few changed elements the second time.
    """
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    directory = Path(out)
    overrides = [f"rollout.engine={engine}", f"rollout.servers.urls=[{url}]", "algorithm=grpo"]
    overrides += ["rollout.weights.bucket_mb=1", "optimizer.lr=1.0e-2"]
    for step, transport in enumerate(PUSHES):
        if step == 0 or transport != PUSHES[step - 1]:
            if step:
                end(rollouts)  # noqa: F821 - of the step before
            config = configure(
                Path(task),
                directory,
                *overrides,
                *LAYOUTS[layout],
                f"rollout.weights.transport={transport}",
                f"rollout.weights.directory={directory}/weights",
            )
            policy = Policy.of(config) if step == 0 else policy  # noqa: F821
            rollouts = served_engine(config, policy).__enter__()
        if step == 4:
            _nudge(policy)
        elif step:
            policy.update(make_rows([[1.0, 0.0, 0.5]]), at_step_start=True)
        rollouts.sync(step)
        if rollouts.servers is not None and transport == "delta":
            assert (rollouts.metrics["sync/bytes"] < 50_000) == (step == 4), rollouts.metrics
        policy.model.save_hf(directory / f"export-{step}")
        if rollouts.servers is not None:
            _ask(rollouts.servers, directory, step)
        dist.barrier()
    end(rollouts)


def _nudge(policy: Policy) -> None:
    """Change a few elements of every parameter; each rank changes its own shard.

    In an adapter it changes one element of each B, and so one row of the merged weights.
    """
    with torch.no_grad():
        for chunk in policy.model.chunks:
            for name, parameter in chunk.named_parameters():
                if policy.model.adapters is None:
                    parameter.view(-1)[1:40:13] += 0.5
                elif parameter.requires_grad and "linear_out" in name:
                    parameter.view(-1)[0] += 0.5


def _ask(servers: ServerSession, directory: Path, step: int) -> None:
    [handle] = servers.pool.handles
    server, call = handle.server, servers.loop.run
    for i, prompt in enumerate(PROMPTS):
        sample = call(server.sample(prompt, 12, 0, GREEDY, [1], 60))
        (directory / f"greedy-{step}-{i}").write_text(repr(sample.token_ids))
        (directory / f"score-{step}-{i}").write_text(json.dumps(call(server.score(prompt, 60))))
        sample = call(server.sample(prompt, 24, step, SAMPLED, [], 60))
        sampled = json.dumps([list(sample.token_ids), list(sample.logprobs)])
        (directory / f"sample-{step}-{i}").write_text(sampled)
    _compare(servers, handle, directory / f"export-{step}", directory, step)


def _compare(servers: ServerSession, handle: ServerHandle, export: Path, directory: Path, step: int) -> None:
    """Write the server's checksums and scores after the push, and after it has loaded the export."""
    server, call = handle.server, servers.loop.run
    assert handle.has(step) and call(server.weight_version(10)) == str(step)
    for suffix in ("", "-from-files"):
        if suffix:
            call(server.pause(30))
            call(receiver(server, "disk").load_directory(export, str(step), 60))
            call(server.flush_cache(30))
            call(server.resume(30))
        checksums = json.dumps(checksum(servers.loop, server), indent=1)
        (directory / f"checksum-{step}{suffix}").write_text(checksums)
        scores = [call(server.score(prompt, 60)) for prompt in PROMPTS]
        (directory / f"scores-{step}{suffix}").write_text(json.dumps(scores))


def end(rollouts: ServedEngine) -> None:
    rollouts.__exit__(None, None, None)
    torch.manual_seed(0)


def on_two_nodes(engine: str, urls: str, task: str, out: str, elsewhere: str) -> None:
    """Push before and after an update to a server on each of two nodes; write their checksums.

    `elsewhere` is the id of a process of the second node, which has shared memory of its own. Rank 1 goes
    there.
    """
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": "0"}
    if dist.get_rank() == 1:
        os.unshare(os.CLONE_FS)  # gives this thread its own root directory, which setns requires
        with open(f"/proc/{elsewhere}/ns/mnt") as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNS)
    directory = Path(out)
    overrides = [f"rollout.engine={engine}", f"rollout.servers.urls=[{urls}]", "algorithm=grpo"]
    overrides += ["rollout.weights.bucket_mb=1", "optimizer.lr=1.0e-2", "rollout.weights.transport=shared"]
    config = configure(Path(task), directory, *overrides)
    policy = Policy.of(config)
    with served_engine(config, policy) as rollouts:
        for step in range(2):
            if step:
                policy.update(make_rows([[1.0, 0.0], [0.5, 0.0]]), at_step_start=True)
            rollouts.sync(step)
            policy.model.save_hf(directory / f"export-{step}")
            if rollouts.servers is not None:
                homes = rollouts._weights._publisher._transport._homes
                assert sorted(homes.values()) == [(0, ()), (1, ())]
                for i, handle in enumerate(rollouts.servers.pool.handles):
                    (directory / str(i)).mkdir(exist_ok=True)
                    _compare(rollouts.servers, handle, directory / f"export-{step}", directory / str(i), step)
            dist.barrier()
        rollouts._weights.close()
        assert not list(Path("/dev/shm").glob("megatron_gvpo-*")) or dist.get_rank() == 0


class Nowhere:
    """A transport that sends nothing and reports success."""

    metrics: dict[str, float] = {}  # noqa: RUF012

    async def begin(self, handles: object, version: int) -> None: ...

    async def send(self, bucket: object) -> int:
        return 0

    async def end(self) -> None: ...

    def over(self) -> None: ...

    async def close(self) -> None: ...


def unheard(engine: str, url: str, task: str, out: str) -> None:
    """Push after an update through a transport that sends nothing; write the error that ends the run."""
    overrides = [f"rollout.engine={engine}", f"rollout.servers.urls=[{url}]", "algorithm=grpo"]
    config = configure(Path(task), Path(out), *overrides, "optimizer.lr=1.0e-2")
    policy = Policy.of(config)
    with served_engine(config, policy) as rollouts:
        rollouts.sync(0)
        policy.update(make_rows([[1.0, 0.0, 0.5]]), at_step_start=True)
        rollouts._weights._publisher._transport = Nowhere()
        try:
            rollouts.sync(1)
        except RolloutError as error:
            (Path(out) / "error").write_text(str(error))


def ended(engine: str, url: str, task: str, out: str, pid: str) -> None:
    """End the server's process between a push and its probe; the next push waits until it has restarted."""
    overrides = [f"rollout.engine={engine}", f"rollout.servers.urls=[{url}]", "algorithm=grpo"]
    config = configure(Path(task), Path(out), *overrides)
    policy = Policy.of(config)
    with served_engine(config, policy) as rollouts:
        push = rollouts._push

        def push_and_end(version: int) -> None:
            push(version)
            os.killpg(int(pid), signal.SIGKILL)

        rollouts._push = push_and_end
        rollouts.sync(0)
        handles = rollouts.servers.pool.handles
        assert [m.is_lost for m in handles] == [True] and rollouts._weights.probe.proved == 0
        rollouts._push = push
        rollouts.sync(1)
        assert [m.has(1) for m in handles] == [True] and rollouts._weights.probe.proved == 1


def unopened(task: str, out: str) -> None:
    """Wait for a server at an address where nobody listens, for longer than a collective's timeout."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    meet, timeout = f"file://{out}/meet", timedelta(seconds=5)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=timeout)
    leader.HEARTBEAT = 1.0
    overrides = ["rollout.engine=sglang", "rollout.servers.urls=[http://127.0.0.1:9]"]
    config = configure(Path(task), Path(out), *overrides, "rollout.servers.start_timeout=15")
    rollouts = ServedEngine(
        config.model, config.rollout, config.output_dir, ModelCards(config), Task(None, (1,), [], []), None
    )
    try:
        rollouts.__enter__()
    except RolloutError as error:
        (Path(out) / f"error-{rank}").write_text(str(error))

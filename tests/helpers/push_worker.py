"""Rank functions of a trainer that pushes weights to a real server."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rows import make_rows
from servers import PROMPTS, checksum, receiver
from tiny_run import configure

from megatron_gvpo.config.schema import SamplingConfig, read_model_config
from megatron_gvpo.data.tokenizer import load_tokenizer
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.rollout.pool import Member, RolloutError
from megatron_gvpo.sampling import served
from megatron_gvpo.sampling.served import ServedRollouts
from megatron_gvpo.types import Prompt
from megatron_gvpo.weights.sync import ServedWeights

PUSHES = ("broadcast", "broadcast", "disk", "delta", "delta", "shared")  # the transport of each push
LAYOUTS = {"single": (), "tp2": ("parallel.tp=2",), "pp2": ("parallel.pp=2",), "dp2": ()}
GREEDY = SamplingConfig(top_p=1e-6, max_tokens=12)


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
                end(weights, rollouts)  # noqa: F821 - of the step before
            config = configure(
                Path(task),
                directory,
                *overrides,
                *LAYOUTS[layout],
                f"rollout.weights.transport={transport}",
                f"rollout.weights.directory={directory}/weights",
            )
            policy = Policy(config) if step == 0 else policy  # noqa: F821
            model = read_model_config(config.model.path)
            rollouts = ServedRollouts(config, load_tokenizer(config.model.path), 1, model).__enter__()
            prompts = [Prompt(str(i), tuple(prompt), "") for i, prompt in enumerate(PROMPTS)]
            score = partial(policy.score, temperature=1.0)
            weights = ServedWeights(config, rollouts, policy.weights, score, prompts)
        if step == 4:
            _nudge(policy)
        elif step:
            policy.update(make_rows([[1.0, 0.0, 0.5]]), at_step_start=True)
        weights.push(step)
        if rollouts.fleet is not None and transport == "delta":
            assert (weights.metrics["sync/bytes"] < 20_000) == (step == 4), weights.metrics
        policy.model.save_hf(directory / f"export-{step}")
        if rollouts.fleet is not None:
            _ask(engine, rollouts, directory, step)
        dist.barrier()
    end(weights, rollouts)


def _nudge(policy: Policy) -> None:
    """Change a few elements of every parameter; each rank changes its own shard."""
    with torch.no_grad():
        for chunk in policy.model.chunks:
            for parameter in chunk.parameters():
                parameter.view(-1)[1:40:13] += 0.5


def _ask(engine: str, rollouts: ServedRollouts, directory: Path, step: int) -> None:
    [member] = rollouts.fleet.members
    server, call = member.server, rollouts.loop.run
    for i, prompt in enumerate(PROMPTS):
        sample = call(server.sample(prompt, 12, 0, GREEDY, [1], 60))
        (directory / f"greedy-{step}-{i}").write_text(repr(sample.token_ids))
        (directory / f"score-{step}-{i}").write_text(json.dumps(call(server.score(prompt, 60))))
    _compare(rollouts, member, directory / f"export-{step}", directory, step)


def _compare(rollouts: ServedRollouts, member: Member, export: Path, directory: Path, step: int) -> None:
    """Write the server's checksums after the push, and after it has loaded the export."""
    server, call = member.server, rollouts.loop.run
    assert member.has(step) and call(server.weight_version(10)) == str(step)
    pushed = checksum(rollouts.loop, server)
    call(server.pause(30))
    call(receiver(server, "disk").load_directory(export, str(step), 60))
    call(server.flush_cache(30))
    call(server.resume(30))
    (directory / f"checksum-{step}").write_text(json.dumps(pushed, indent=1))
    from_files = json.dumps(checksum(rollouts.loop, server), indent=1)
    (directory / f"checksum-{step}-from-files").write_text(from_files)


def end(weights: ServedWeights, rollouts: ServedRollouts) -> None:
    weights.close()
    rollouts.__exit__(None, None, None)
    torch.manual_seed(0)


def on_two_nodes(engine: str, urls: str, task: str, out: str, elsewhere: str) -> None:
    """Push before and after an update to a server on each of two nodes; write their checksums.

    `elsewhere` is the id of a process of the second node, which has shared memory of its own. Rank 1 goes
    there.
    """
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": "0"}
    if dist.get_rank() == 1:
        os.unshare(os.CLONE_FS)  # this thread's, as namespaces are
        with open(f"/proc/{elsewhere}/ns/mnt") as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNS)
    directory = Path(out)
    overrides = [f"rollout.engine={engine}", f"rollout.servers.urls=[{urls}]", "algorithm=grpo"]
    overrides += ["rollout.weights.bucket_mb=1", "optimizer.lr=1.0e-2", "rollout.weights.transport=shared"]
    config = configure(Path(task), directory, *overrides)
    policy, model = Policy(config), read_model_config(config.model.path)
    prompts = [Prompt(str(i), tuple(prompt), "") for i, prompt in enumerate(PROMPTS)]
    with ServedRollouts(config, load_tokenizer(config.model.path), 1, model) as rollouts:
        score = partial(policy.score, temperature=1.0)
        weights = ServedWeights(config, rollouts, policy.weights, score, prompts)
        for step in range(2):
            if step:
                policy.update(make_rows([[1.0, 0.0], [0.5, 0.0]]), at_step_start=True)
            weights.push(step)
            policy.model.save_hf(directory / f"export-{step}")
            if rollouts.fleet is not None:
                homes = weights._publisher._transport._homes
                assert sorted(homes.values()) == [(0, ()), (1, ())]
                for i, member in enumerate(rollouts.fleet.members):
                    (directory / str(i)).mkdir(exist_ok=True)
                    _compare(rollouts, member, directory / f"export-{step}", directory / str(i), step)
            dist.barrier()
        weights.close()
        assert not list(Path("/dev/shm").glob("megatron_gvpo-*")) or dist.get_rank() == 0


class Nowhere:
    """A transport that claims to have sent everything."""

    metrics: dict[str, float] = {}  # noqa: RUF012

    async def begin(self, members: object, version: int) -> None: ...

    async def send(self, bucket: object) -> int:
        return 0

    async def end(self) -> None: ...

    def over(self) -> None: ...

    async def close(self) -> None: ...


def unheard(engine: str, url: str, task: str, out: str) -> None:
    """Make a push after an update that never arrives; write the error that the run ends with."""
    overrides = [f"rollout.engine={engine}", f"rollout.servers.urls=[{url}]", "algorithm=grpo"]
    config = configure(Path(task), Path(out), *overrides, "optimizer.lr=1.0e-2")
    policy, model = Policy(config), read_model_config(config.model.path)
    prompts = [Prompt(str(i), tuple(prompt), "") for i, prompt in enumerate(PROMPTS)]
    with ServedRollouts(config, load_tokenizer(config.model.path), 1, model) as rollouts:
        score = partial(policy.score, temperature=1.0)
        weights = ServedWeights(config, rollouts, policy.weights, score, prompts)
        weights.push(0)
        policy.update(make_rows([[1.0, 0.0, 0.5]]), at_step_start=True)
        weights._publisher._transport = Nowhere()
        try:
            weights.push(1)
        except RolloutError as error:
            (Path(out) / "error").write_text(str(error))
        finally:
            weights.close()


def ended(engine: str, url: str, task: str, out: str, pid: str) -> None:
    """End the server's process between a push and its proof; the next push waits until it is back."""
    overrides = [f"rollout.engine={engine}", f"rollout.servers.urls=[{url}]", "algorithm=grpo"]
    config = configure(Path(task), Path(out), *overrides)
    policy, model = Policy(config), read_model_config(config.model.path)
    prompts = [Prompt(str(i), tuple(prompt), "") for i, prompt in enumerate(PROMPTS)]
    with ServedRollouts(config, load_tokenizer(config.model.path), 1, model) as rollouts:
        score = partial(policy.score, temperature=1.0)
        weights = ServedWeights(config, rollouts, policy.weights, score, prompts)
        push = weights._push

        def push_and_end(version: int) -> None:
            push(version)
            os.killpg(int(pid), signal.SIGKILL)

        weights._push = push_and_end
        weights.push(0)
        assert [m.state for m in rollouts.fleet.members] == ["lost"] and weights._proved == 0
        weights._push = push
        weights.push(1)
        assert [m.has(1) for m in rollouts.fleet.members] == [True] and weights._proved == 1
        weights.close()


def unopened(task: str, out: str) -> None:
    """Wait for a server at an address where nobody listens, for longer than a collective's timeout."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    meet, timeout = f"file://{out}/meet", timedelta(seconds=5)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=timeout)
    served.HEARTBEAT = 1.0
    overrides = ["rollout.engine=sglang", "rollout.servers.urls=[http://127.0.0.1:9]"]
    config = configure(Path(task), Path(out), *overrides, "rollout.servers.start_timeout=15")
    rollouts = ServedRollouts(config, None, 1, read_model_config(config.model.path))
    try:
        rollouts.__enter__()
    except RolloutError as error:
        (Path(out) / f"error-{rank}").write_text(str(error))

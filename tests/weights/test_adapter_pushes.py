"""Pushes of adapters alone to real servers: each version is served exactly, and no other is left there."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import torch
from helpers.parts_of_a_run import server_check
from helpers.pushes.adapter_pushes import ADAPTERS, RANK, AdapterRun, adapted_logprobs, make_adapter
from helpers.servers.faults import Fault, check, faulty_run, kill
from helpers.servers.real_servers import (
    ENGINES,
    PROMPTS,
    SGLANG_FIRST,
    Client,
    logprobs,
    running,
    served_config,
)
from helpers.tiny_run import fit, records
from safetensors.torch import load_file

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.servers.handle import Pending
from megatron_gvpo.servers.http import ServerGone, ServerRefused
from megatron_gvpo.servers.launch.supervise import Supervisor
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.settings.servers import ServersConfig

# Updates so large that the adapter of the step before would give clearly other log-probs.
STEPS = ("train.steps=3", "optimizer.lr=2.0e-2")
CLOSE = 2e-4  # nats, as for samples of servers with whole weights


@dataclass
class Serving:
    """A server that takes adapters, and the adapters of three versions."""

    engine: str
    task: Path
    out: Path
    supervisor: Supervisor
    client: Client
    adapters: list[Path]

    def configured(self, *overrides: str) -> Config:
        return served_config(self.engine, self.task, self.out, *ADAPTERS, *overrides)

    @property
    def model(self) -> Path:
        return self.task / "model"

    def names(self) -> list[str]:
        """The adapters that the server says it has."""
        return self.client.receiver("adapter", "adapters")

    def gap(self, adapter: Path | None) -> float:
        """The largest difference between the server's log-probs and PEFT's, or those of the base, in nats."""
        gaps = [0.0]
        for prompt in PROMPTS:
            served = torch.tensor(self.client("score", prompt))
            parts = (prompt[:1], prompt[1:])
            expected = (
                logprobs(self.model, *parts)
                if adapter is None
                else adapted_logprobs(self.model, adapter, *parts)
            )
            gaps.append((served - expected).abs().max().item())
        return max(gaps)


@pytest.fixture(scope="module", params=SGLANG_FIRST)
def serving(
    request: pytest.FixtureRequest, task: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    out = tmp_path_factory.mktemp("adapters")
    adapters = [make_adapter(task / "model", out / f"adapter-{seed}", seed) for seed in range(3)]
    with running(request.param, task, out, *ADAPTERS, "rollout.servers.restarts=9") as supervisor:
        client = Client(request.param, supervisor.processes[0].url)
        yield Serving(request.param, task, out, supervisor, client, adapters)
        client.close()


@pytest.fixture
def pool(serving: Serving) -> Iterator[ServerPool]:
    """A pool of a new client of the server, which has no weights yet."""

    async def make() -> ServerPool:
        settings = ServersConfig(start_timeout=900)
        pool = ServerPool([serving.client.server], settings, [1], print)
        await pool.start()
        return pool

    pool = serving.client.loop.run(make())
    yield pool
    serving.client.loop.run(pool.stop())


def test_each_version_is_served_exactly_and_the_one_before_is_gone(serving: Serving, pool: ServerPool):
    """The log-probs of scores and of samples are those of PEFT, and bytes are the adapter's."""
    run = AdapterRun(serving.configured(), pool, serving.client.loop)
    seen = set()
    for version, adapter in enumerate([*serving.adapters, serving.adapters[0]]):
        sent = run.push(adapter, version)
        assert serving.gap(adapter) < CLOSE < 0.05 < serving.gap(None)
        [name] = serving.names()
        assert name.endswith(f"-v{version}") and name not in seen
        seen.add(name)
        assert serving.client("weight_version") == str(version)
        elements = sum(t.numel() for t in adapter_tensors(adapter).values())
        assert sent == 4 * elements
        requests = [Request(tuple(PROMPTS[0]), 3, seed=version)]
        sampling = SamplingConfig(temperature=0.7, max_tokens=12)
        [group] = serving.client.loop.run(pool.generate(requests, sampling))
        for rollout in group:
            assert rollout.spans == [(version, 0, len(rollout.token_ids))]
            expected = adapted_logprobs(serving.model, adapter, PROMPTS[0], rollout.token_ids, 0.7)
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0, atol=CLOSE)
    files = list(serving.out.glob("weights/*"))
    assert [file.name for file in files] == serving.names()
    shutil.rmtree(files[0])
    assert serving.gap(adapter) < CLOSE, "the server reads the files once, in the push"
    run.close()


def adapter_tensors(adapter: Path) -> dict[str, torch.Tensor]:
    return load_file(adapter / "adapter_model.safetensors")


@pytest.mark.parametrize("in_flight", ["carry", pytest.param("wait", marks=pytest.mark.proof)])
def test_responses_under_way_when_an_adapter_comes(serving: Serving, pool: ServerPool, in_flight: str):
    """Carried on under the new one, or finished first: each part has the log-probs of its version."""
    config = serving.configured(f"rollout.weights.in_flight={in_flight}")
    run, loop, adapters = AdapterRun(config, pool, serving.client.loop), serving.client.loop, serving.adapters
    run.push(adapters[0], 0)
    sampling = SamplingConfig(max_tokens=200)
    requests = [Request(tuple(prompt), 4, seed=3) for prompt in PROMPTS]
    for version, delay in zip(count(1), (0.3, 0.1, 0.05, 0.02, 1.0, 2.0, 4.0), strict=False):
        future = loop.submit(pool.generate(requests, sampling))
        loop.run(asyncio.sleep(delay))
        under_way = not future.done()
        run.push(adapters[version % 3], version)
        groups = future.result(timeout=240)
        responses = [(p, r) for p, group in zip(PROMPTS, groups, strict=True) for r in group]
        carried = [pair for pair in responses if len(pair[1].spans) > 1]
        if carried or (in_flight == "wait" and under_way):
            break
    run.close()
    assert under_way and bool(carried) == (in_flight == "carry")
    for prompt, rollout in carried or responses:
        assert [span[0] for span in rollout.spans] in ([version - 1, version], [version - 1])
        for of_version, begin, end in rollout.spans:
            before, part = prompt + rollout.token_ids[:begin], rollout.token_ids[begin:end]
            expected = adapted_logprobs(serving.model, adapters[of_version % 3], before, part)
            reported = torch.tensor(rollout.logprobs[begin:end])
            torch.testing.assert_close(reported, expected, rtol=0, atol=CLOSE)


def test_a_server_without_the_adapter_is_lost_rather_than_sampled_from(serving: Serving):
    """The engine refuses a name that it does not have, as after a restart that nobody has seen."""
    serving.client.server.use_adapter("gvpo-00000000-v7")
    for call in (("score", PROMPTS[0]), ("sample", PROMPTS[0], 4, 0, SamplingConfig(), [])):
        with pytest.raises(ServerGone, match="has restarted, without the adapter gvpo-00000000-v7"):
            serving.client(*call)


def test_adapters_of_an_earlier_run_and_of_a_push_that_broke_off_are_gone(serving: Serving, pool: ServerPool):
    """Another client's adapter, which has another kind of name, stays."""
    run = AdapterRun(serving.configured(), pool, serving.client.loop)
    run.push(serving.adapters[0], 4)
    [name] = serving.names()
    for other in ("gvpo-00000000-v9", "theirs"):
        serving.client.receiver("adapter", "load_adapter", other, serving.adapters[2])
    [handle] = pool.handles
    handle.to(Pending())  # as after a push that broke off when the adapter was loaded
    run.push(serving.adapters[1], 4)
    assert sorted(serving.names()) == sorted([name, "theirs"]) and serving.gap(serving.adapters[1]) < CLOSE
    serving.client.receiver("adapter", "unload_adapter", "theirs")
    run.close()


def test_a_server_that_cannot_take_the_adapters_is_refused_by_its_own_settings(
    serving: Serving,
):
    client = serving.client

    def check(adapter: str) -> None:
        config = serving.configured(f"model.adapter={adapter}")
        client.loop.run(server_check(client.server, config, [1]))

    check("{rank: 4, targets: [q_proj, v_proj]}")
    with pytest.raises(ConfigError, match=r"takes no such adapters: --max-lora-rank \d+.*rank=32"):
        check("{rank: 32}")


def test_adapters_of_some_layers_are_served_exactly(serving: Serving, tmp_path: Path):
    """Engines make one layer of q, k and v, and one of gate and up; vLLM takes any part of them."""
    parts = [("q_proj", "v_proj"), ("gate_proj",), ("o_proj", "down_proj")]
    if serving.engine == "vllm":
        parts += [("k_proj",), ("up_proj", "q_proj")]
    for i, layers in enumerate(parts):
        adapter = make_adapter(serving.model, tmp_path / str(i), i, rank=3, layers=layers)
        serving.client.receiver("adapter", "load_adapter", f"gvpo-part-{i}", adapter)
        serving.client.server.use_adapter(f"gvpo-part-{i}")
        assert serving.gap(adapter) < CLOSE < 0.01 < serving.gap(None), layers
        serving.client.receiver("adapter", "unload_adapter", f"gvpo-part-{i}")


def test_the_engines_words_about_an_adapter_that_it_refuses_reach_the_user(serving: Serving, tmp_path: Path):
    large = make_adapter(serving.model, tmp_path / "large", 0, rank=5 * RANK)
    with pytest.raises(ServerRefused, match="rank"):
        serving.client.receiver("adapter", "load_adapter", "gvpo-large", large)
    with pytest.raises(ServerRefused):
        serving.client.receiver("adapter", "load_adapter", "gvpo-none", tmp_path / "nowhere")
    assert "gvpo-large" not in serving.names()


@pytest.mark.proof  # it waits for a start of the server
def test_a_killed_server_gets_the_current_adapter_on_the_base(serving: Serving, pool: ServerPool):
    """Requests that were under way are answered, each part from the version that it names."""
    run, loop = AdapterRun(serving.configured(), pool, serving.client.loop), serving.client.loop
    run.push(serving.adapters[0], 0)
    run.push(serving.adapters[1], 1)
    requests = [Request(tuple(prompt), 2, seed=5) for prompt in PROMPTS]
    future = loop.submit(pool.generate(requests, SamplingConfig(max_tokens=100)))
    loop.run(asyncio.sleep(0.2))
    pid = serving.supervisor.processes[0].pid
    assert pid is not None
    os.killpg(pid, signal.SIGKILL)

    async def lost() -> None:
        while not pool.handles[0].is_lost:
            await asyncio.sleep(0.05)

    loop.run(lost())
    run.push(serving.adapters[1], 1)
    assert serving.supervisor.processes[0].pid != pid and serving.gap(serving.adapters[1]) < CLOSE
    for prompt, group in zip(PROMPTS, future.result(timeout=240), strict=True):
        for rollout in group:
            assert rollout.spans == [(1, 0, len(rollout.token_ids))]
            expected = adapted_logprobs(serving.model, serving.adapters[1], prompt, rollout.token_ids)
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0, atol=CLOSE)
    run.close()


@pytest.mark.proof
def test_a_run_samples_each_step_from_its_own_adapter(serving: Serving, tmp_path: Path):
    """The trainer's log-probs are the server's in every step, and the last adapter alone is left there."""
    urls = [process.url for process in serving.supervisor.processes]
    trainer, watched = faulty_run(serving.engine, serving.task, tmp_path / "run", urls, [], *STEPS, *ADAPTERS)
    check(trainer, watched, records(tmp_path / "run"))
    [name] = serving.names()
    assert name.endswith("-v3")  # after the last step too
    pushed = [record["sync/bytes"] for record in records(tmp_path / "run") if "sync/bytes" in record]
    elements = sum(tensor.numel() for tensor in adapter_tensors(serving.adapters[0]).values())
    assert set(pushed) == {4.0 * elements}


@pytest.mark.proof  # it waits for a start of the server
def test_a_run_outlives_its_server(serving: Serving, tmp_path: Path):
    [process] = serving.supervisor.processes
    fault = Fault(2, "generating", kill(process), delay=0.05)
    run = (serving.engine, serving.task, tmp_path / "run", [process.url], [fault])
    trainer, saboteur = faulty_run(*run, *STEPS, *ADAPTERS)
    check(trainer, saboteur, records(tmp_path / "run"))


@pytest.mark.proof
def test_a_run_that_samples_ahead_carries_responses_over_to_the_next_adapter(
    serving: Serving, tmp_path: Path
):
    urls = [process.url for process in serving.supervisor.processes]
    run = (serving.engine, serving.task, tmp_path / "run", urls, [])
    ahead = ("rollout.async_steps=1", "train.steps=5", "rollout.max_tokens=200", "optimizer.lr=1.0e-3")
    _, watched = faulty_run(*run, *ahead, *ADAPTERS)
    rollouts = [r for groups in watched.groups.values() for group in groups for r in group.rollouts]
    spans = [[version for version, _, _ in rollout.spans] for rollout in rollouts]
    assert all(versions == sorted(versions) for versions in spans)
    assert any(len(versions) > 1 for versions in spans)


@pytest.mark.proof
@pytest.mark.parametrize("engine", ENGINES)
def test_a_colocated_server_takes_turns_with_the_trainer(engine: str, task: Path, tmp_path: Path):
    """On a CPU the server's own memory stays; the order of the turns is that of a GPU."""
    config = served_config(engine, task, tmp_path, *ADAPTERS, *STEPS, "rollout.servers.colocated=true")
    fit(config)
    gaps = [record["mismatch/abs_max"] for record in records(tmp_path) if record["step"]]
    assert len(gaps) == 3 and max(gaps) < 2e-3

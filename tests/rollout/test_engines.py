"""Real SGLang and vLLM servers: their samples, refusals and pauses, against transformers on their weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import urllib.error
import urllib.request
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from socket import SOCK_DGRAM

import moe_task
import psutil
import pytest
import torch
from distributed import launch
from groups import make_group
from push_worker import PUSHES
from safetensors.torch import load_file, save_file
from servers import (
    ENGINES,
    PROMPTS,
    SGLANG_FIRST,
    SharedServer,
    another_node,
    checksum,
    engine_python,
    logprobs,
    pool_of,
    receiver,
    running,
    served_config,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gvpo import teacher
from megatron_gvpo.config.schema import Config, ConfigError, SamplingConfig, read_model_config
from megatron_gvpo.rollout.checks import check_server
from megatron_gvpo.rollout.http import ServerGone, ServerRefused
from megatron_gvpo.rollout.launch.start import DIALECTS
from megatron_gvpo.rollout.pool import ServerHandle
from megatron_gvpo.rollout.request import Request
from megatron_gvpo.weights.broadcast import Broadcast
from megatron_gvpo.weights.bucket import DoubleBuffer, buckets
from megatron_gvpo.weights.delta import Delta
from megatron_gvpo.weights.node import NodeMemory, new_name


def test_samples_are_complete_and_their_logprobs_are_those_of_transformers(served: SharedServer, task: Path):
    """Token ids go in and out, log-probs are at the sampling temperature, and the stop token is the last
    one.
    """
    sampling = SamplingConfig(temperature=0.7, max_tokens=40)
    pool = pool_of(served.client, [1])
    requests = [Request(tuple(prompt), 3, seed=7 + i) for i, prompt in enumerate(PROMPTS)]
    groups = served.client.loop.run(pool.generate(requests, sampling))
    served.client.loop.run(pool.stop())
    assert [len(group) for group in groups] == [3, 3, 3]
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for rollout in group:
            assert rollout.finish_reason == ("stop" if rollout.token_ids[-1] == 1 else "length")
            assert 1 not in rollout.token_ids[:-1]
            assert len(rollout.token_ids) == 40 or rollout.finish_reason == "stop"
            expected = logprobs(task / "model", prompt, rollout.token_ids, temperature=0.7)
            assert torch.allclose(torch.tensor(rollout.logprobs), expected, atol=2e-4)


def test_scores_are_those_of_transformers(served: SharedServer, task: Path):
    for prompt in PROMPTS:
        score = served.client("score", prompt)
        assert torch.allclose(
            torch.tensor(score), logprobs(task / "model", prompt[:1], prompt[1:]), atol=2e-4
        )


def test_a_servers_ranks_tell_which_gpus_they_see_in_a_runs_directory_alone(
    served: SharedServer, tmp_path: Path
):
    memory = NodeMemory(new_name(), torch.device("cpu"))
    served.client.receiver("shared", "begin_update")
    served.client.receiver("shared", "tell_gpus", memory.directory / "7.told")
    if served.engine == "vllm":  # SGLang ends where a loader raises an error
        with pytest.raises(ServerRefused, match="takes weights from runs' directories"):
            served.client.receiver("shared", "tell_gpus", tmp_path / "7.told")
        served.client.receiver("shared", "begin_update")  # vLLM has ended the update that failed
    served.client.receiver("shared", "end_update", "0")
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    assert memory.seen()["told"] == {"7": [seen]} and list(tmp_path.iterdir()) == []
    memory.close()


def test_a_server_that_tells_no_experts_is_refused(served: SharedServer, task: Path, tmp_path: Path):
    config = served_config(served.engine, task, tmp_path, "rollout.router_replay=true")
    model = read_model_config(config.model.path)
    with pytest.raises(ConfigError, match="no experts: start it with --enable-return-routed-experts"):
        served.client.loop.run(check_server(served.client.server, config, model))


def test_a_served_model_teaches_grades_and_judges(served: SharedServer, task: Path):
    """The requests go to the OpenAI-compatible URL without a chat template, which the tiny tokenizer
    lacks.
    """
    problems = [f"{a}+{b}=" for a in (1, 12, 305) for b in (2, 47)]
    groups = [make_group([0, 1], p, texts=["1", "2"], record={"prompt": p}) for p in problems]
    asked = {"url": f"{served.url}/v1", "model": served_model(served.url), "plain": True, "max_tokens": 8}
    said = [texts for (texts,) in teacher.chat(groups, 1, temperature=0.0, **asked)]
    assert said == [greedy(task / "model", problem, 8) for problem in problems] and any(said)
    assert [len(of_group) for of_group in teacher.chat(groups, 3, **asked)] == [3] * len(groups)

    prompt, (a, b) = groups[0].prompt, groups[0].rollouts
    number = re.search(r"-?\d+(?:\.\d+)?", greedy(task / "model", f"{problems[0]}{a.text}", 8))
    wanted = 0.0 if number is None else min(max(float(number[0]) / 10, 0.0), 1.0)
    assert teacher.grade(prompt, a, template="{prompt}{response}", **asked) == wanted
    assert teacher.prefers(prompt, a, b, template="{prompt}{a}{b}", **asked) == 0.5  # it knows no letters
    with pytest.raises(teacher.TeacherError, match="HTTP Error 4"):
        teacher.chat(groups[:1], 1, **{**asked, "url": f"{served.url}/v2"})


def greedy(directory: Path, text: str, max_tokens: int) -> str:
    """The greedy response of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = tokenizer([text], return_tensors="pt", add_special_tokens=False)["input_ids"]
    said = model.generate(ids, do_sample=False, max_new_tokens=max_tokens)[0, ids.shape[1] :]
    return str(tokenizer.decode(said, skip_special_tokens=True))


def served_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


@pytest.mark.parametrize("engine", SGLANG_FIRST)
def test_a_servers_key_is_wanted_and_nobody_else_can_read_it(engine: str, task: Path, tmp_path: Path):
    """The key is neither in the processes' command lines (ps) nor in any file. Only /health needs none."""
    key = "0x1f00ff00"  # which YAML would take for a number
    with running(engine, task, tmp_path, key=key) as supervisor:
        [process] = supervisor.processes
        for path in (
            "/v1/models",
            "/server_info",
            "/update_weights",
            "/collective_rpc",
            "/pause",
            "/nowhere",
        ):
            for headers in ({}, {"Authorization": f"Bearer {key}0"}, {"Authorization": key}):
                asked = urllib.request.Request(f"{process.url}{path}", headers=headers)
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    urllib.request.urlopen(asked, timeout=30)
        headers = {"Authorization": f"Bearer {key}"}
        asked = urllib.request.Request(f"{process.url}/v1/models", headers=headers)
        assert urllib.request.urlopen(asked, timeout=30).status == 200
        assert_listens_on_loopback(process.pid)
        lines = command_lines(process.pid)
        assert len(lines) > 1 and not any(key in line for line in lines)
        assert [file for file in (tmp_path / "servers").iterdir() if key in file.read_text()] == []
        assert process.log.stat().st_mode & 0o777 == 0o600
    assert list((tmp_path / "servers").iterdir()) == [process.log]


def assert_listens_on_loopback(group: int | None) -> None:
    """All processes of the group listen on loopback alone."""
    leader = psutil.Process(group)
    sockets = [
        (each.name(), socket.laddr)
        for each in (leader, *leader.children(recursive=True))
        for socket in each.net_connections("inet")
        if socket.status == psutil.CONN_LISTEN or (socket.type == SOCK_DGRAM and not socket.raddr)
    ]
    assert sockets and [each for each in sockets if not ip_address(each[1].ip).is_loopback] == []


def command_lines(group: int | None) -> list[str]:
    """The command lines of a process group's processes."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            if os.getpgid(int(place.name)) == group:
                found.append((place / "cmdline").read_text())
    return found


def test_the_servers_own_words_reach_the_user(served: SharedServer):
    with pytest.raises(ServerRefused, match=r"(?s)400.*256") as refused:
        served.client("sample", [5] * 8, 1000, 0, SamplingConfig(), [1])
    assert refused.value.is_request


def test_a_silent_server_is_a_named_wait(served: SharedServer):
    os.killpg(served.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ServerGone, match=r"(/v1/completions|/generate).*no answer within 0\.5 s"):
            served.client("sample", PROMPTS[0], 1, 0, SamplingConfig(), [], timeout=0.5)
    finally:
        os.killpg(served.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(name, marks=pytest.mark.proof) for name in ("single", "pp2", "dp2"))]
)
def test_what_arrives_is_what_was_exported_byte_for_byte(
    served: SharedServer, task: Path, tmp_path: Path, layout: str
):
    """After a push from the sharded trainer, every checksum of the server equals that of the trainer's
    export.

    This holds before and after training steps, over every transport; greedy tokens and log-probs equal those
    of transformers on the export.
    """
    ranks = 1 if layout == "single" else 2
    launch("push_worker:run", [ranks], served.engine, served.url, str(task), str(tmp_path), layout)
    assert_exported(tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_of_two_ranks_gets_its_shards(engine: str, task: Path, tmp_path: Path):
    """The same holds for a tensor-parallel server with both ranks in the group."""
    with running(engine, task, tmp_path, "rollout.servers.tp=2") as supervisor:
        url = supervisor.processes[0].url
        launch("push_worker:run", [1], engine, url, str(task), str(tmp_path), "single")
    assert_exported(tmp_path)


@pytest.mark.proof  # in `make test`, the run of test_router_replay.py pushes such weights to vLLM
@pytest.mark.parametrize("engine", ENGINES)
def test_a_mixture_of_experts_gets_its_weights(engine: str, task: Path, tmp_path: Path):
    """The same holds for weights that a server arranges differently, as vLLM does with experts."""
    moe = moe_task.make(task, tmp_path / "task")
    with running(engine, moe, tmp_path) as supervisor:
        url = supervisor.processes[0].url
        launch("push_worker:run", [1], engine, url, str(moe), str(tmp_path), "single")
    assert_exported(tmp_path)


@pytest.mark.proof  # test_relay.py has the two nodes without servers
def test_a_server_of_another_node_has_the_weights_from_the_rank_beside_it(
    served: SharedServer, task: Path, tmp_path: Path
):
    """Two ranks and two servers: one of each has shared memory of its own, like a second node."""
    with another_node() as (pid, inside):
        python = tmp_path / "python"
        python.write_text(f'#!/bin/sh\nexec {inside} {engine_python(served.engine)} "$@"\n')
        python.chmod(0o755)
        override = f"rollout.servers.python={python}"
        with running(served.engine, task, tmp_path / "second", override) as supervisor:
            urls = f"{served.url},{supervisor.processes[0].url}"
            launch("push_worker:on_two_nodes", [2], served.engine, urls, str(task), str(tmp_path), str(pid))
    for server in ("0", "1"):
        before, after = ((tmp_path / server / f"checksum-{step}").read_text() for step in range(2))
        assert before != after
        for step, pushed in enumerate((before, after)):
            assert pushed == (tmp_path / server / f"checksum-{step}-from-files").read_text()


def assert_exported(directory: Path) -> None:
    """Check the files of push_worker: each push gave the server the export, and changed its weights."""
    for step in range(len(PUSHES)):
        export = directory / f"export-{step}"
        pushed = (directory / f"checksum-{step}").read_text()
        assert pushed == (directory / f"checksum-{step}-from-files").read_text()
        assert step == 0 or pushed != (directory / f"checksum-{step - 1}").read_text()
        for i, prompt in enumerate(PROMPTS):
            response = eval((directory / f"greedy-{step}-{i}").read_text())
            score = torch.tensor(json.loads((directory / f"score-{step}-{i}").read_text()))
            torch.testing.assert_close(score, logprobs(export, prompt[:1], prompt[1:]), rtol=0, atol=1e-3)
            reference = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
            ids = torch.tensor([prompt])
            greedy = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
            )
            assert response == greedy[0, len(prompt) :].tolist()


def check(served: SharedServer, config: Config) -> None:
    model = read_model_config(config.model.path)
    served.client.loop.run(check_server(served.client.server, config, model))


def test_a_fitting_server_is_accepted(served: SharedServer, task: Path, tmp_path: Path):
    check(served, served_config(served.engine, task, tmp_path))


def test_a_context_that_is_too_short_is_refused(served: SharedServer, task: Path, tmp_path: Path):
    config = served_config(served.engine, task, tmp_path, "rollout.max_tokens=250")
    with pytest.raises(ConfigError, match=r"context length of 256.*max_tokens=250 need 282"):
        check(served, config)


def test_an_untested_release_is_refused_unless_allowed(
    served: SharedServer, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(type(served.client.server), "tested", ("9.9",))
    with pytest.raises(ConfigError, match=r"runs (sglang 0\.5|vllm 0\.32).*tested: 9\.9"):
        check(served, served_config(served.engine, task, tmp_path))
    allowed = "rollout.servers.allow_untested_version=true"
    check(served, served_config(served.engine, task, tmp_path, allowed))


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("config.json", '"num_hidden_layers": 4', '"num_hidden_layers": 2', "num_hidden_layers=4.*has.*=2"),
        ("config.json", '"eos_token_id": 1', '"eos_token_id": 2', "eos_token_id=1.*has.*=2"),
        ("tokenizer.json", '"9": ', '"ninth": ', "another tokenizer.*differ in.*'9'"),
    ],
)
def test_another_model_or_tokenizer_is_refused(
    served: SharedServer, task: Path, tmp_path: Path, file: str, old: str, new: str, message: str
):
    other = tmp_path / "model"
    shutil.copytree(task / "model", other)
    text = (other / file).read_text()
    assert old in text
    (other / file).write_text(text.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        check(served, served_config(served.engine, task, tmp_path, f"model.path={other}"))


def test_a_server_of_another_engine_is_said_to_be_one(served: SharedServer, task: Path, tmp_path: Path):
    other = next(engine for engine in ENGINES if engine != served.engine)
    config = served_config(other, task, tmp_path, f"rollout.servers.urls=[{served.url}]")
    model = read_model_config(config.model.path)
    with pytest.raises(ConfigError, match=f"{served.url} does not speak as rollout.engine={other} does"):
        served.client.loop.run(check_server(DIALECTS[other](served.client.server.http), config, model))


@pytest.mark.parametrize("served", SGLANG_FIRST, indirect=True)
def test_the_probe_tells_other_weights(served: SharedServer, task: Path, tmp_path: Path):
    """The run refuses to continue with a server that has not taken the push."""
    launch("push_worker:unheard", [1], served.engine, served.url, str(task), str(tmp_path))
    assert "does not have the weights that were sent" in (tmp_path / "error").read_text()


def test_a_push_that_failed_half_way_does_not_hinder_the_next(served: SharedServer, task: Path):
    """The failed push began its update, sent half of a layer, and never ended it."""
    tensors = list(load_file(task / "model" / "model.safetensors").items())
    half = next(i for i, (name, _) in enumerate(tensors) if "k_proj" in name)
    assert served.client.receiver("broadcast", "begin_update") is None
    served.client.loop.run(_push(served, tensors[:half], 4, ends=False))
    served.client.loop.run(_push(served, tensors, 5))
    assert served.client("weight_version") == "5"
    pushed = checksum(served.client.loop, served.client.server)
    served.client.receiver("disk", "load_directory", task / "model", "6")
    assert pushed == checksum(served.client.loop, served.client.server)


def test_what_changed_is_enough_for_a_server_that_is_in_another_group(
    served: SharedServer, task: Path, tmp_path: Path
):
    """A new group, as after the return of another server, still sends only the changes to this server."""
    tensors = load_file(task / "model" / "model.safetensors")
    handle = ServerHandle(served.client.server)
    transport = Delta(partial(receiver, transport="delta"), "127.0.0.1", "gloo", 60.0)

    async def pushed(version: int) -> None:
        await served.client.server.pause(30)
        await transport.begin([handle], version)
        for bucket in buckets(tensors.items(), DoubleBuffer(1 << 20, torch.device("cpu")), torch.float32):
            await transport.send(bucket)
        await transport.end()
        handle.version = version
        await served.client.server.resume(30)

    served.client.loop.run(pushed(7))
    for tensor in tensors.values():
        tensor.view(-1)[::50] += 0.5
    handle.regroup = True
    served.client.loop.run(pushed(8))
    assert 0 < transport.metrics["sync/changed"] < 0.1
    arrived = checksum(served.client.loop, served.client.server)
    served.client.loop.run(transport.close())
    shutil.copytree(task / "model", tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    served.client.receiver("disk", "load_directory", tmp_path / "model", "9")
    assert arrived == checksum(served.client.loop, served.client.server)
    served.client.receiver("disk", "load_directory", task / "model", "10")


async def _push(served: SharedServer, tensors: list, version: int, ends: bool = True) -> None:
    transport = Broadcast(partial(receiver, transport="broadcast"), "127.0.0.1", "gloo", 60.0)
    await served.client.server.pause(30)
    await transport.begin([ServerHandle(served.client.server)], version)
    for bucket in buckets(tensors, DoubleBuffer(1 << 20, torch.device("cpu")), torch.float32):
        await transport.send(bucket)
    if ends:
        await transport.end()
    await transport.close()
    await served.client.server.resume(30)

"""Real SGLang and vLLM servers: their samples, refusals and pauses, against transformers on their weights."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.distributed import launch
from helpers.inputs import moe_task
from helpers.inputs.rows import make_group
from helpers.parts_of_a_run import server_check
from helpers.pushes.pushed import assert_exported
from helpers.servers.real_servers import (
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
from helpers.servers.server_keys import assert_key_is_hidden, assert_key_is_wanted
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gvpo import api_model
from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.http import ServerGone, ServerRefused
from megatron_gvpo.servers.launch.start import DIALECTS
from megatron_gvpo.servers.pool import METRIC
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.sections import SamplingConfig
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


def test_a_server_stops_at_the_tokens_that_it_is_told_and_nowhere_else(served: SharedServer):
    """Its model's files name token 1; requests name all tokens at which a run's responses end."""
    # SGLang does not repeat its draws: with as many responses, each end comes up.
    requests = [Request(tuple(prompt), 32, seed=7 + i) for i, prompt in enumerate(PROMPTS)]
    pool = pool_of(served.client, [1, 5, 6, 7])
    groups = served.client.loop.run(
        pool.generate(requests, SamplingConfig(max_tokens=40, stop_token_ids=[8]))
    )
    served.client.loop.run(pool.stop())
    rollouts, ends = [rollout for group in groups for rollout in group], {1, 5, 6, 7, 8}
    assert all(ends.isdisjoint(rollout.token_ids[:-1]) for rollout in rollouts)
    assert all((r.finish_reason == "stop") == (r.token_ids[-1] in ends) for r in rollouts)
    last = {rollout.token_ids[-1] for rollout in rollouts}
    assert last & {5, 6, 7} and 8 in last

    pool = pool_of(served.client, [5])
    with pytest.raises(
        RolloutError, match=r"ended a response at token 1, and the run's end at 5: its model has"
    ):
        served.client.loop.run(pool.generate(requests, SamplingConfig(max_tokens=40)))
    served.client.loop.run(pool.stop())


def test_servers_tell_how_much_of_their_prompts_they_had(served: SharedServer):
    """The same prompt of 200 tokens twice: vLLM keeps whole blocks, of 128 tokens on CPUs."""
    pool = pool_of(served.client, [1])
    numbers = random.Random(3)
    request = Request(tuple(numbers.randrange(2, 20) for _ in range(200)), 1, seed=1)
    shares = []
    for _ in range(2):
        served.client.loop.run(pool.generate([request], SamplingConfig(max_tokens=4)))
        shares.append(pool.prefix_cache.take()[METRIC])
    served.client.loop.run(pool.stop())
    assert shares[0] < 0.05 and shares[1] >= 128 / 200
    assert pool.prefix_cache.take() == {}, "nothing was asked since"


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
    with pytest.raises(ConfigError, match="no experts: start it with --enable-return-routed-experts"):
        served.client.loop.run(server_check(served.client.server, config, [1]))


def test_a_served_model_teaches_and_judges(served: SharedServer, task: Path):
    """The requests go to the OpenAI-compatible URL without a chat template, which the tiny tokenizer
    lacks.
    """
    problems = [f"{a}+{b}=" for a in (1, 12, 305) for b in (2, 47)]
    groups = [make_group([0, 1], p, texts=["1", "2"], record={"prompt": p}) for p in problems]
    server = {"url": f"{served.url}/v1", "model": served_model(served.url), "plain": True, "max_tokens": 8}
    url, options = server["url"], {"model": server["model"], "n": 1, "temperature": 0.0, "max_tokens": 8}
    answers = [api_model._texts(url, "a test", p, options, 300.0, None, True)[0] for p in problems]
    texts = [text for text, _ in answers]
    assert texts == [greedy(task / "model", p, 8, served.engine) for p in problems] and any(texts)
    complete_answers = [[text if ended else None] for text, ended in answers]
    assert api_model.chat(groups, 1, temperature=0.0, **server) == complete_answers
    assert [len(of_group) for of_group in api_model.chat(groups, 3, **server)] == [3] * len(groups)

    prompt, (a, b) = groups[0].prompt, groups[0].rollouts
    assert api_model.prefers(prompt, a, b, template="{prompt}{a}{b}", **server) == 0.5  # it knows no letters
    with pytest.raises(api_model.ApiModelError, match="HTTP Error 4"):
        api_model.chat(groups[:1], 1, **{**server, "url": f"{served.url}/v2"})


def greedy(directory: Path, text: str, max_tokens: int, engine: str) -> str:
    """The greedy response of transformers, with the penalty that the model recommends and vLLM adopts.

    SGLang adopts it for chats alone.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if engine == "sglang":
        model.generation_config.repetition_penalty = 1.0
    ids = tokenizer([text], return_tensors="pt", add_special_tokens=False)["input_ids"]
    output = model.generate(ids, do_sample=False, max_new_tokens=max_tokens)[0, ids.shape[1] :]
    return str(tokenizer.decode(output, skip_special_tokens=True))


def served_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


@pytest.mark.proof  # in `make test`, tests/rewards/test_reward_servers.py asks the servers that it starts
@pytest.mark.parametrize("engine", ENGINES)
def test_a_servers_key_is_wanted_and_nobody_else_can_read_it(engine: str, task: Path, tmp_path: Path):
    key = "0x1f00ff00"  # which YAML would take for a number
    with running(engine, task, tmp_path, key=key) as supervisor:
        [process] = supervisor.processes
        assert_key_is_wanted(process, key)
        assert_key_is_hidden(process, key)
    assert list((tmp_path / "servers").iterdir()) == [process.log]


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
    "layout",
    ["tp2", *(pytest.param(name, marks=pytest.mark.proof) for name in ("single", "pp2", "dp2", "adapter"))],
)
def test_what_arrives_is_what_was_exported_byte_for_byte(
    served: SharedServer, task: Path, tmp_path: Path, layout: str
):
    """After a push from the sharded trainer, every checksum of the server equals that of the trainer's
    export.

    This holds before and after training steps, over every transport; greedy tokens and log-probs equal those
    of transformers on the export. Adapters are merged in both.
    """
    ranks = 1 if layout in ("single", "adapter") else 2
    launch(
        "helpers.pushes.push_worker:run", [ranks], served.engine, served.url, str(task), str(tmp_path), layout
    )
    assert_exported(tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_of_two_ranks_gets_its_shards(engine: str, task: Path, tmp_path: Path):
    """The same holds for a tensor-parallel server with both ranks in the group."""
    with running(engine, task, tmp_path, "rollout.servers.tp=2") as supervisor:
        url = supervisor.processes[0].url
        launch("helpers.pushes.push_worker:run", [1], engine, url, str(task), str(tmp_path), "single")
    assert_exported(tmp_path)


@pytest.mark.proof  # in `make test`, the run of test_router_replay.py pushes such weights to vLLM
@pytest.mark.parametrize("engine", ENGINES)
def test_a_mixture_of_experts_gets_its_weights(engine: str, task: Path, tmp_path: Path):
    """The same holds for weights that a server arranges differently, as vLLM does with experts."""
    moe = moe_task.make(task, tmp_path / "task")
    with running(engine, moe, tmp_path) as supervisor:
        url = supervisor.processes[0].url
        launch("helpers.pushes.push_worker:run", [1], engine, url, str(moe), str(tmp_path), "single")
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
            arguments = (served.engine, urls, str(task), str(tmp_path), str(pid))
            launch("helpers.pushes.push_worker:on_two_nodes", [2], *arguments)
    for server in ("0", "1"):
        before, after = ((tmp_path / server / f"checksum-{step}").read_text() for step in range(2))
        assert before != after
        for step, pushed in enumerate((before, after)):
            assert pushed == (tmp_path / server / f"checksum-{step}-from-files").read_text()


def check(served: SharedServer, config: Config) -> None:
    served.client.loop.run(server_check(served.client.server, config, [1]))


def test_a_fitting_server_is_accepted(served: SharedServer, task: Path, tmp_path: Path):
    check(served, served_config(served.engine, task, tmp_path))


def test_a_context_that_is_too_short_is_refused(served: SharedServer, task: Path, tmp_path: Path):
    config = served_config(served.engine, task, tmp_path, "rollout.max_tokens=250")
    with pytest.raises(ConfigError, match=r"room for 256 tokens.*max_tokens=250 need 282"):
        check(served, config)


def test_an_untested_release_is_refused_unless_allowed(
    served: SharedServer, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(type(served.client.server), "tested", ("9.9",))
    with pytest.raises(ConfigError, match=r"runs (sglang 0\.5|vllm 0\.32).*tested: 9\.9"):
        check(served, served_config(served.engine, task, tmp_path))
    allowed = "rollout.servers.allow_untested_version=true"
    check(served, served_config(served.engine, task, tmp_path, allowed))


def test_further_end_tokens_of_a_server_are_refused(served: SharedServer, task: Path, tmp_path: Path):
    config = served_config(served.engine, task, tmp_path)
    with pytest.raises(ConfigError, match=r"serves .*, whose eos_token_id .* has 1, at which responses of"):
        served.client.loop.run(server_check(served.client.server, config, [5]))


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
    with pytest.raises(ConfigError, match=f"{served.url} does not speak as rollout.engine={other} does"):
        served.client.loop.run(server_check(DIALECTS[other](served.client.server.http), config, [1]))


@pytest.mark.parametrize("served", SGLANG_FIRST, indirect=True)
def test_the_probe_tells_other_weights(served: SharedServer, task: Path, tmp_path: Path):
    """The run refuses to continue with a server that has not taken the push."""
    launch("helpers.pushes.push_worker:unheard", [1], served.engine, served.url, str(task), str(tmp_path))
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
    handle.losses += 1
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

"""New weights stop responses half-way, on real servers of a model that never ends a response itself."""

from __future__ import annotations

import asyncio
import json
import shutil
from itertools import count
from pathlib import Path

import pytest
import torch
from servers.real_servers import Client, admit, logprobs, pool_of, running

from megatron_gvpo.servers.request import Request
from megatron_gvpo.servers.speculation import DraftCounter
from megatron_gvpo.settings.sections import SamplingConfig

PROMPTS = [[9, 16, 10, 17, 8, 16, 7, 19], [5, 5, 5], [12, 3, 4, 14, 9, 10]]


@pytest.fixture(scope="module")
def endless(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The task with a model that has no end token."""
    directory = tmp_path_factory.mktemp("endless") / "task"
    shutil.copytree(task, directory)
    for file, key in (
        ("config.json", "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
        ("tokenizer_config.json", "eos_token"),
    ):
        content = json.loads((directory / "model" / file).read_text())
        del content[key]
        (directory / "model" / file).write_text(json.dumps(content))
    run = directory / "run.yaml"
    run.write_text(run.read_text().replace(str(task), str(directory)))
    return directory


NGRAM = "rollout.speculation.method=ngram"


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        ("sglang", ()),
        pytest.param("vllm", (), marks=pytest.mark.proof),
        pytest.param("vllm", (NGRAM,), marks=pytest.mark.proof),
    ],
    ids=["sglang", "vllm", "vllm that speculates"],
)
def test_a_response_stopped_for_new_weights_goes_on_where_it_was(
    engine: str, more: tuple[str, ...], endless: Path, tmp_path: Path
):
    """Spans name the weights that sampled each part; the log-probs are those of one uninterrupted
    response.
    """
    sampling = SamplingConfig(max_tokens=240)
    requests = [Request(tuple(prompt), 8, seed=1) for prompt in PROMPTS]
    with running(engine, endless, tmp_path, *more) as supervisor:
        client = Client(engine, supervisor.processes[0].url)
        pool, loop = pool_of(client, []), client.loop
        # A fast server may be done by then, and one on a busy machine not have begun.
        for version, delay in zip(count(1), (0.2, 0.1, 0.05, 0.5, 1.0, 2.0, 4.0, 8.0), strict=False):
            future = loop.submit(pool.generate(requests, sampling))
            loop.run(asyncio.sleep(delay))
            [handle] = loop.run(pool.take_out(version, abort=True))
            assert not handle.calls
            loop.run(admit(pool, version))
            groups = future.result(timeout=120)
            responses = [(p, r) for p, group in zip(PROMPTS, groups, strict=True) for r in group]
            carried = [(p, r) for p, r in responses if len(r.spans) > 1]
            assert all(len(r.token_ids) == 240 for _, r in responses)
            if carried:
                break
        if more:
            assert loop.run(DraftCounter().take([client.server])).accepted > 0
        loop.run(pool.stop())
        client.close()
    assert carried
    for prompt, rollout in carried:
        assert [span[0] for span in rollout.spans] == [version - 1, version]
        assert rollout.weight_version == version - 1
        assert rollout.spans[0][2] == rollout.spans[1][1] and rollout.spans[1][2] == len(rollout.token_ids)
        expected = logprobs(endless / "model", prompt, rollout.token_ids)
        assert torch.allclose(torch.tensor(rollout.logprobs), expected, atol=2e-4)

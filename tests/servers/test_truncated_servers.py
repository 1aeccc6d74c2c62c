"""Real servers say what every truncated token was sampled from, and give log-probs over that."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.servers.real_servers import PROMPTS, Client, admit, engine_with, pool_of, reference, running

from megatron_gvpo.groups import Rollout
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.sections import RolloutConfig, SamplingConfig

TOP_K = 6
# Top-p cuts among the top-k's tokens in vLLM, and in all of the vocabulary in SGLang.
TOP_P = {"vllm": 0.8, "sglang": 0.3}


# The plugins let the engines report supports on a CPU (tests/helpers/on_cpu/PLUGIN).
@pytest.mark.parametrize(
    ("engine", "plugin"),
    [("vllm", "triton_on_cpu"), pytest.param("sglang", "pinning_on_cpu", marks=pytest.mark.proof)],
)
def test_supports_and_log_probs_of_stopped_and_continued_responses(
    engine: str, plugin: str, task: Path, tmp_path: Path
):
    """Evaluation and scoring, which want no supports, go on beside it."""
    keys = {"top_p": TOP_P[engine], "top_k": TOP_K, "min_p": 0.02}
    sampling = RolloutConfig(engine=engine, max_tokens=100, temperature=0.8, **keys)
    requests = [Request(tuple(prompt), 8, seed=1) for prompt in PROMPTS]
    more = [engine_with(plugin, engine, tmp_path), *(f"rollout.{key}={value}" for key, value in keys.items())]
    with running(engine, task, tmp_path, *more) as supervisor:
        client = Client(engine, supervisor.processes[0].url)
        pool, loop = pool_of(client, [1]), client.loop
        future = loop.submit(pool.generate(requests, sampling))
        loop.run(asyncio.sleep(0.2))
        loop.run(pool.take_out(1, abort=True))
        loop.run(admit(pool, 1))
        groups = future.result(timeout=120)
        plain = loop.run(pool.generate(requests[:1], SamplingConfig(max_tokens=20)))
        scored = loop.run(client.server.score([*PROMPTS[0], *plain[0][0].token_ids], 60))
        loop.run(pool.stop())
        client.close()
    model = reference(task / "model")
    sizes = [n for p, row in zip(PROMPTS, groups, strict=True) for r in row for n in check(model, p, r)]
    assert len(set(sizes)) > 2 and max(sizes) <= TOP_K
    assert plain[0][0].support is None
    assert len(scored) == len(PROMPTS[0]) + len(plain[0][0].token_ids) - 1


def check(model: torch.nn.Module, prompt: list[int], rollout: Rollout) -> list[int]:
    """Compare with transformers; returns the sizes of the supports.

    Members are the likeliest tokens: their number depends on the engine's order of top-k, top-p and min-p.
    """
    assert rollout.support is not None
    counts, ids = rollout.support.arrays
    with torch.no_grad():
        logits = model(torch.tensor([prompt + rollout.token_ids])).logits[0, len(prompt) - 1 : -1] / 0.8
    of_tokens = np.split(ids, np.cumsum(counts))
    for z, token, logprob, members in zip(
        logits, rollout.token_ids, rollout.logprobs, of_tokens, strict=False
    ):
        assert token in members
        assert z[members].min() >= z.sort(descending=True).values[len(members) - 1] - 1e-3
        expected = float(z[token] - z[members].logsumexp(0))
        assert logprob == pytest.approx(expected, abs=2e-4)
        p = torch.softmax(z, 0)[members]
        assert p.min() >= 0.019 * p.max()
    return counts.tolist()

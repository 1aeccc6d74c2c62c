"""Real servers whose prompts, batches and caches exceed every size: what they answer is still exact.

A tiny model's prompts are computed at once, and its responses fit into the cache. Real ones do not: a long
prompt is computed in parts, the log-probs of a prompt in parts, and responses that the cache has no room for
are taken back and computed again.
"""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
import torch
from helpers.parts_of_a_run import server_check
from helpers.servers.real_servers import Client, logprobs, pool_of, running, served_config
from helpers.small_constants import SERVER_OPTIONS, small_servers

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.sections import SamplingConfig


def taken_back(engine: str, url: str, log: str) -> bool:
    """True if the server has taken back a response for lack of cache."""
    if engine == "sglang":
        return "kv cache pool is full. retract requests" in log.lower()
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        counts = re.findall(r"^vllm:num_preemptions_total{.*} (\S+)$", answer.read().decode(), re.MULTILINE)
    return sum(map(float, counts)) > 0


@pytest.mark.proof  # a fast machine may finish the responses before the cache is full
@pytest.mark.parametrize("engine", SERVER_OPTIONS)
def test_answers_are_exact_above_every_size(
    engine: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    override, variables = small_servers(engine)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    prompts = [torch.randint(2, 20, (length,), generator=generator).tolist() for length in (3, 40, 70, 120)]
    with running(engine, task, tmp_path, override) as supervisor:
        client = Client(engine, supervisor.processes[0].url)
        config = served_config(engine, task, tmp_path, override, "rollout.max_tokens=230")
        # SGLang would cut a response off where its cache ends, and call it as long as it may be.
        room = {"sglang": 240, "vllm": 256}[engine]
        with pytest.raises(ConfigError, match=rf"has room for {room} tokens.*max_tokens=230 need 262"):
            client.loop.run(server_check(client.server, config, [1]))
        pool = pool_of(client, [1])
        sampling = SamplingConfig(temperature=0.7, max_tokens=90)
        requests = [Request(tuple(prompt), 8, seed=7 + i) for i, prompt in enumerate(prompts)]
        groups = client.loop.run(pool.generate(requests, sampling))
        scores = [client("score", prompt) for prompt in prompts]
        client.loop.run(pool.stop())
        client.close()
        [server] = supervisor.processes
        assert taken_back(engine, server.url, server.log.read_text()), "the cache had room for all"
    for prompt, score, group in zip(prompts, scores, groups, strict=True):
        expected = logprobs(task / "model", prompt[:1], prompt[1:])
        torch.testing.assert_close(torch.tensor(score), expected, rtol=0, atol=2e-4)
        for rollout in group:
            assert len(rollout.token_ids) == 90 or rollout.token_ids[-1] == 1
            expected = logprobs(task / "model", prompt, rollout.token_ids, temperature=0.7)
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0, atol=2e-4)

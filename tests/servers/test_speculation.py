"""Speculative decoding on real servers: samples, log-probs and weights are the policy's, as without it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inputs import mtp_task
from helpers.parts_of_a_run import server_check
from helpers.servers.faults import Fault, check, faulty_run, kill
from helpers.servers.real_servers import PROMPTS, Client, admit, pool_of, running, served_config
from helpers.tiny_run import fit, records, weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.groups import Rollout
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.huggingface.end_tokens import end_token_ids
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.observe import read_metrics
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.servers.request import Request
from megatron_gvpo.servers.speculation import DraftCounter, check_draft
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.settings.sections import SamplingConfig

Model = Any  # of transformers
SAMPLES = 150  # of each prompt, for statistics
BINS = 20
ENDS = (1, 0)  # by the models' generation_config.json; config.json and the tokenizer name 1 alone


@dataclass
class Speculating:
    """A vLLM server that speculates, and two sets of weights for it: those it starts with, and newer ones."""

    client: Client
    models: tuple[Path, Path]


def sharper(source: Path, target: Path, factor: float) -> Path:
    """A copy of a model whose distributions are far from even, so that drafts are often accepted."""
    shutil.copytree(source, target)
    [file] = target.glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * factor}, file)
    recommended = target / "generation_config.json"
    recommended.write_text(json.dumps(json.loads(recommended.read_text()) | {"eos_token_id": list(ENDS)}))
    return target


@pytest.fixture(scope="module", params=["ngram", pytest.param("draft", marks=pytest.mark.proof)])
def speculating(
    request: pytest.FixtureRequest, task: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Speculating]:
    directory = tmp_path_factory.mktemp(request.param)
    models = sharper(task / "model", directory / "old", 5.0), sharper(task / "model", directory / "new", -4.0)
    options = [f"model.path={models[0]}", f"rollout.speculation.method={request.param}"]
    options += [f"rollout.speculation.model={task / 'model'}"] if request.param == "draft" else []
    with running("vllm", task, directory, *options) as supervisor:
        client = Client("vllm", supervisor.processes[0].url)
        config = served_config("vllm", task, directory, *options)
        client.loop.run(server_check(client.server, config, ENDS))
        yield Speculating(client, models)
        client.close()


def test_samples_and_log_probs_are_the_policys_before_and_after_a_push(speculating: Speculating):
    client, counter = speculating.client, DraftCounter()
    own = str(speculating.models[0])
    ends = end_token_ids(own, ModelCard.read(own), load_tokenizer(own))
    assert sorted(ends) == sorted(ENDS)
    pool = pool_of(client, list(ends))
    for version, directory in enumerate(speculating.models):
        if version:
            client.receiver("disk", "load_directory", directory, str(version))
            client("flush_cache")
            client.loop.run(admit(pool, version))
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        sampled = sample(client, pool, SAMPLES, SamplingConfig(max_tokens=24))
        assert {rollout.token_ids[-1] for _, rollout in sampled} >= {*ENDS}
        assert_distributed_as(model, sampled)
        cooler = SamplingConfig(temperature=0.6, max_tokens=40)
        for temperature, few in ((1.0, sampled[::25]), (0.6, sample(client, pool, 2, cooler))):
            for prompt, rollout in few:
                longest = 24 if temperature == 1 else 40
                assert rollout.weight_version == version
                assert len(rollout.token_ids) == longest or rollout.finish_reason == "stop"
                assert not {*ENDS} & {*rollout.token_ids[:-1]}
                assert (rollout.finish_reason == "stop") == (rollout.token_ids[-1] in ENDS)
                expected = logprobs_by(model, prompt, rollout.token_ids, temperature)
                torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0, atol=1e-3)
        for prompt, rollout in sample(client, pool, 1, SamplingConfig(top_p=1e-6, max_tokens=20)):
            assert rollout.token_ids == greedy_by(model, prompt, 20)
        for prompt, rollout in sampled[::100]:  # as the probe of a push and teachers ask
            scores = client.loop.run(client.server.score([*prompt, *rollout.token_ids], 60.0, len(prompt)))
            expected = logprobs_by(model, prompt, rollout.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(scores), expected, rtol=0, atol=1e-3)
        drafts = client.loop.run(counter.take([client.server]))
        assert drafts.drafted > 1000 and drafts.metrics["speculation/acceptance"] < 0.95
        # The draft model stays as it is, and the second weights prefer what it finds unlikely.
        assert drafts.metrics["speculation/length"] > 1.1 or version
    first, again = (sample(client, pool, 2, SamplingConfig(max_tokens=24)) for _ in range(2))
    assert [r.token_ids for _, r in first] == [r.token_ids for _, r in again], "the same seeds"
    client.loop.run(pool.stop())


@pytest.mark.proof
def test_a_run_outlives_its_speculating_server(task: Path, tmp_path: Path):
    """The server is killed while weights are pushed, speculates when it is back, and serves no old ones."""
    chosen = ("rollout.speculation.method=ngram", "rollout.servers.restarts=5")
    with running("vllm", task, tmp_path / "server", *chosen) as supervisor:
        [process] = supervisor.processes
        fault = Fault(2, "pushing", kill(process), delay=0.01)
        trainer, saboteur = faulty_run(
            "vllm", task, tmp_path / "run", [process.url], [fault], chosen[0], "train.steps=4"
        )
        client = Client("vllm", process.url)
        assert client("speculates")
        client.close()
    steps = [record for record in records(tmp_path / "run") if record["step"]]
    check(trainer, saboteur, steps)
    assert 0 <= steps[0]["speculation/acceptance"] < 1, "later responses may be too short to draft"
    assert all(
        record["throughput/response_tokens_per_s"] > 0
        for record in read_metrics(tmp_path / "run/metrics.jsonl")[1:]
    )


@pytest.mark.proof
def test_a_models_own_head_proposes_and_is_kept_as_it_was(task: Path, tmp_path: Path):
    """The head has no part in training or pushes; the exported checkpoint has it, and can be served again."""
    glm = mtp_task.make(task, tmp_path / "task")
    chosen = ("rollout.speculation={method: mtp, tokens: 2}", "train.steps=3", "data.eval=null")
    fit(served_config("vllm", glm, tmp_path / "run", *chosen, "optimizer.lr=3.0e-3"))
    for record in (record for record in records(tmp_path / "run") if record["step"]):
        assert record["mismatch/abs_max"] < 2e-3, record
        assert 0 < record["speculation/acceptance"] < 1
    before, after = load_file(glm / "model" / "model.safetensors"), weights(tmp_path / "run")
    assert before.keys() == after.keys()
    of_head = {name for name in before if name.startswith(f"model.layers.{mtp_task.LAYERS}.")}
    assert len(of_head) > 20 and all(torch.equal(before[name], after[name]) for name in of_head)
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    config = load_config([glm / "run.yaml"], ["output_dir=x", "rollout.engine=vllm", chosen[0]])
    check_draft(config.rollout.speculation, ModelCards(config))


@pytest.mark.proof
def test_pushes_of_the_trunk_keep_its_own_head_in_step(task: Path, tmp_path: Path):
    """A head proposes by the trunk's embedding and output layer, so a push changes these for it, too.

    The pushed trunks number the tokens in another way. If the head went on with the old rows, none of its
    proposals would mean what they did, and hardly one would be accepted.
    """
    glm = mtp_task.make(task, tmp_path / "task")
    models = [mtp_task.agreeing(glm / "model", tmp_path / "model0")]
    size = ModelCard.read(str(models[0]))["vocab_size"]
    orders = [torch.arange(size)]
    for push in (1, 2):
        order = torch.arange(size)
        order[2:] = 2 + torch.randperm(size - 2, generator=torch.Generator().manual_seed(push))
        orders.append(order)
        models.append(mtp_task.renumbered(models[0], tmp_path / f"model{push}", order))
    chosen = (f"model.path={models[0]}", "rollout.speculation={method: mtp, tokens: 2}")
    with running("vllm", glm, tmp_path / "server", *chosen) as supervisor:
        client = Client("vllm", supervisor.processes[0].url)
        pool, counter = pool_of(client, [1]), DraftCounter()
        accepted, responses = [], []
        for version, (directory, order) in enumerate(zip(models, orders, strict=True)):
            if version:
                client.receiver("disk", "load_directory", directory, str(version))
                client("flush_cache")
                client.loop.run(admit(pool, version))
            client.loop.run(counter.take([client.server]))
            prompts = [order[torch.tensor(prompt)].tolist() for prompt in PROMPTS]
            sampled = sample(client, pool, 30, SamplingConfig(max_tokens=24), prompts)
            counts = client.loop.run(counter.take([client.server]))
            accepted.append(counts.metrics["speculation/acceptance"])
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            for prompt, rollout in sampled[::5]:
                expected = logprobs_by(model, prompt, rollout.token_ids, 1.0)
                torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0, atol=1e-3)
            greedy = sample(client, pool, 1, SamplingConfig(top_p=1e-6, max_tokens=20), prompts)
            assert all(rollout.token_ids == greedy_by(model, prompt, 20) for prompt, rollout in greedy)
            responses.append([order.argsort()[torch.tensor(r.token_ids)].tolist() for _, r in greedy])
        client.loop.run(pool.stop())
        client.close()
    assert responses[0] == responses[1] == responses[2], "the same responses, in other numbers"
    assert min(accepted) > 0.3 and max(accepted) - min(accepted) < 0.1


def sample(
    client: Client,
    pool: ServerPool,
    n: int,
    sampling: SamplingConfig,
    prompts: Sequence[list[int]] = PROMPTS,
) -> list[tuple[list[int], Rollout]]:
    requests = [Request(tuple(prompt), n, seed=7 + i) for i, prompt in enumerate(prompts)]
    groups = client.loop.run(pool.generate(requests, sampling))
    return [(prompt, rollout) for prompt, group in zip(prompts, groups, strict=True) for rollout in group]


def logprobs_by(model: Model, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """Log-probs of the response's tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    logp = torch.log_softmax(logits / temperature, -1)
    return logp.gather(1, torch.tensor(response)[:, None]).squeeze(1)


def greedy_by(model: Model, prompt: list[int], max_tokens: int) -> list[int]:
    """The greedy response, without the penalty that the model's generation_config.json recommends."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def assert_distributed_as(model: Model, sampled: list[tuple[list[int], Rollout]]) -> None:
    """Two tests of the sampled tokens against transformers' distributions.

    The first is a chi-square test of their positions in the cumulative distributions, which are uniform if
    the tokens are samples. The second compares the sum of their log-probs with its mean, which is minus the
    sum of entropies: greedier sampling gives a larger sum.
    """
    random = torch.Generator().manual_seed(0)
    longest = max(len(prompt) + len(rollout.token_ids) for prompt, rollout in sampled)
    rows = torch.zeros(len(sampled), longest, dtype=torch.long)
    for row, (prompt, rollout) in zip(rows, sampled, strict=True):
        row[: len(prompt) + len(rollout.token_ids)] = torch.tensor([*prompt, *rollout.token_ids])
    with torch.no_grad():
        all_logp = torch.log_softmax(model(rows).logits, -1)
    quantiles, surplus, variance = [], 0.0, 0.0
    for i, (prompt, rollout) in enumerate(sampled):
        end = len(prompt) + len(rollout.token_ids)
        logp, tokens = all_logp[i, len(prompt) - 1 : end - 1], rows[i, len(prompt) : end, None]
        p = logp.exp()
        own = p.gather(1, tokens).squeeze(1)
        before = p.cumsum(1).gather(1, tokens).squeeze(1) - own
        quantiles.append(before + own * torch.rand(len(own), generator=random))
        mean = (p * logp).sum(1)
        surplus += float((logp.gather(1, tokens).squeeze(1) - mean).sum())
        variance += float(((p * logp.square()).sum(1) - mean.square()).sum())
    counts = torch.histc(torch.cat(quantiles), BINS, 0.0, 1.0)
    expected = counts.sum() / BINS
    chi_square = float(((counts - expected).square() / expected).sum())
    assert chi_square < 75, "19 degrees of freedom: 1 in 80,000,000"
    assert abs(surplus) < 6 * math.sqrt(variance)


def test_a_server_that_does_not_speculate_is_told_from_one_that_does(
    speculating: Speculating, task: Path, tmp_path: Path
):
    config = served_config("vllm", task, tmp_path, f"model.path={speculating.models[0]}")
    with pytest.raises(ConfigError, match=r"speculates, and rollout\.speculation is not set"):
        speculating.client.loop.run(server_check(speculating.client.server, config, ENDS))

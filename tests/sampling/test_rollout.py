"""The embedded engine against plain transformers: same tokens, same log-probs, same distribution."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.distributed import launch
from helpers.suite.real_parts import used
from scipy.stats import chisquare
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from megatron_gvpo.core.collectives import all_gather_msgpack, broadcast_msgpack
from megatron_gvpo.groups import Prompt
from megatron_gvpo.sampling.draws import draw, outside_support, running_sum_by_products
from megatron_gvpo.sampling.embedded import QueuedPrompts, generate_groups
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.servers.request import Request, derived_seed
from megatron_gvpo.settings.sections import RolloutConfig, SamplingConfig

END = 1
CHARACTERS = "0123456789+-*=()x.,; "
RAGGED = [(5, 6, 7), (9,), (3, 4, 5, 6, 7, 8, 9, 10, 11), (20, 2, 20, 2, 14), (12, 13)]


@pytest.fixture(scope="module", params=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random Qwen2 whose distributions are far from uniform, and its character tokenizer."""
    path = tmp_path_factory.mktemp(request.param)
    config = Qwen2Config(
        vocab_size=2 + len(CHARACTERS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=request.param == "tied",
        initializer_range=0.3,
        eos_token_id=END,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(path)
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.save_pretrained(path)
    return str(path)


@pytest.fixture
def reference(checkpoint: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture
def engine(checkpoint: str) -> LocalModel:
    return loaded_engine(checkpoint)


def loaded_engine(checkpoint: str, batch_size: int = 4096) -> LocalModel:
    engine = empty_engine(checkpoint, batch_size)
    used("embedded rollout engine")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    engine.load(model.state_dict().items(), version=1)
    return engine


def empty_engine(checkpoint: str, batch_size: int = 4096) -> LocalModel:
    return LocalModel(
        checkpoint,
        PreTrainedTokenizerFast.from_pretrained(checkpoint),
        device="cpu",
        dtype=torch.float32,
        batch_size=batch_size,
        end_token_ids=(END,),
    )


def ragged_requests(n: int) -> list[Request]:
    return [Request(ids, n, seed=i) for i, ids in enumerate(RAGGED)]


def token_ids(rollouts: list) -> list[list[list[int]]]:
    return [[rollout.token_ids for rollout in group] for group in rollouts]


def full_forward_logits(model: torch.nn.Module, prompt: tuple[int, ...], response: list[int]) -> torch.Tensor:
    """Logits [r, v] that predicted each response token, from one forward without cache or padding."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0]
    return logits[len(prompt) - 1 : -1]


# ---------------------------------------------------------------- what is sampled


def test_near_zero_temperature_is_transformers_greedy(engine, reference):
    sampling = SamplingConfig(temperature=0.01, top_p=1e-6, max_tokens=20)
    sampled = engine.generate(ragged_requests(n=1), sampling)
    for prompt, [rollout] in zip(RAGGED, sampled, strict=True):
        ids = torch.tensor([prompt])
        greedy = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        assert rollout.token_ids == greedy[0, len(prompt) :].tolist()


def test_logprobs_are_at_the_temperature_and_before_top_p(checkpoint, reference):
    engine = loaded_engine(checkpoint, batch_size=7)  # batches that cut through requests, ragged within
    sampling = SamplingConfig(temperature=0.7, top_p=0.9, max_tokens=30, stop_token_ids=(7, 8, 9))
    sampled = engine.generate(ragged_requests(n=4), sampling)
    lengths = set()
    for prompt, group in zip(RAGGED, sampled, strict=True):
        assert len(group) == 4
        for rollout in group:
            lengths.add(len(rollout.token_ids))
            logits = full_forward_logits(reference, prompt, rollout.token_ids)
            expected = torch.log_softmax(logits / 0.7, -1).gather(1, torch.tensor([rollout.token_ids]).T)[
                :, 0
            ]
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-5, rtol=0)
    assert len(lengths) > 5, "the test should see responses of many lengths"


def truncated(p: np.ndarray, min_p: float, top_k: int, top_p: float) -> list[int]:
    """The tokens that min-p, then top-k, then top-p leave, token by token."""
    likeliest = [i for i in np.argsort(-p) if p[i] >= min_p * p.max()][:top_k]
    mass, members = 0.0, []
    for token in likeliest:
        if mass >= top_p * p[likeliest].sum():
            break
        mass += p[token]
        members.append(int(token))
    return sorted(members)


def test_truncated_tokens_have_their_support_and_log_probs_over_it(checkpoint, reference):
    engine = loaded_engine(checkpoint, batch_size=7)
    keys = {"top_p": 0.8, "top_k": 6, "min_p": 0.05}
    sampling = RolloutConfig(temperature=0.7, max_tokens=30, stop_token_ids=(7, 8, 9), **keys)
    sampled = engine.generate(ragged_requests(n=4), sampling)
    sizes = set()
    for prompt, group in zip(RAGGED, sampled, strict=True):
        for rollout in group:
            logits = full_forward_logits(reference, prompt, rollout.token_ids).double() / 0.7
            counts, ids = rollout.support.arrays
            assert len(counts) == len(rollout.token_ids)
            parts = zip(*(logits, rollout.token_ids, rollout.logprobs), strict=True)
            for (z, token, logprob), members in zip(parts, np.split(ids, np.cumsum(counts)), strict=False):
                assert members.tolist() == truncated(torch.softmax(z, -1).numpy(), **keys)
                expected = z[token] - z[members].logsumexp(0)
                assert logprob == pytest.approx(float(expected), abs=1e-5)
                sizes.add(len(members))
    assert len(sizes) > 3
    plain = SamplingConfig(max_tokens=9, **keys)
    assert engine.generate(ragged_requests(n=1), plain)[0][0].support is None


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_first_token_follows_the_softmax(engine, reference, top_p):
    n = 4000
    [rollouts] = engine.generate([Request(RAGGED[0], n, 0)], SamplingConfig(top_p=top_p, max_tokens=1))
    drawn = np.bincount([r.token_ids[0] for r in rollouts], minlength=2 + len(CHARACTERS))
    p = torch.softmax(full_forward_logits(reference, RAGGED[0], [0])[0].double(), -1).numpy()
    # The nucleus: the fewest most likely tokens that hold at least top_p of the mass.
    order = np.argsort(-p)
    nucleus = order[: int(np.searchsorted(np.cumsum(p[order]), top_p) + 1)]
    outside = np.setdiff1d(order, nucleus)
    assert drawn[outside].sum() == 0
    common = nucleus[p[nucleus] * n >= 5]
    rest = np.setdiff1d(nucleus, common)
    expected = np.array([*p[common], p[rest].sum()]) * n / p[nucleus].sum()
    observed = np.array([*drawn[common], drawn[rest].sum()])
    populated = expected > 0
    assert chisquare(observed[populated], expected[populated]).pvalue > 1e-3


def test_later_tokens_follow_the_softmax_too(engine, reference):
    """A finished row must not shift its neighbours onto another row's cache, mask or random stream."""
    n = 6000
    [rollouts] = engine.generate([Request(RAGGED[1], n, 0)], SamplingConfig(max_tokens=2))
    first = np.bincount([r.token_ids[0] for r in rollouts])
    first[END] = 0
    prefix = int(first.argmax())
    seconds = [r.token_ids[1] for r in rollouts if r.token_ids[0] == prefix]
    assert any(r.token_ids == [END] for r in rollouts)
    p = torch.softmax(full_forward_logits(reference, RAGGED[1], [prefix, 0])[1].double(), -1).numpy()
    drawn = np.bincount(seconds, minlength=len(p))
    common = p * len(seconds) >= 5
    expected = np.array([*p[common], p[~common].sum()]) * len(seconds)
    assert chisquare([*drawn[common], drawn[~common].sum()], expected).pvalue > 1e-3


def test_stop_tokens_end_a_response_and_belong_to_it(engine):
    sampling = SamplingConfig(max_tokens=12, stop_token_ids=(7, 8))
    rollouts = [r for group in engine.generate(ragged_requests(n=16), sampling) for r in group]
    for rollout in rollouts:
        stops = [i for i, token in enumerate(rollout.token_ids) if token in (END, 7, 8)]
        assert len(rollout.logprobs) == len(rollout.token_ids)
        if rollout.finish_reason == "stop":
            assert stops == [len(rollout.token_ids) - 1]
        else:
            assert (rollout.finish_reason, stops, len(rollout.token_ids)) == ("length", [], 12)
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    assert {r.token_ids[-1] for r in rollouts if r.finish_reason == "stop"} == {END, 7, 8}


def test_text_is_decoded_without_the_end_token(engine):
    rollouts = [
        r for group in engine.generate(ragged_requests(n=8), SamplingConfig(max_tokens=9)) for r in group
    ]
    for rollout in rollouts:
        assert rollout.text == "".join(CHARACTERS[i - 2] for i in rollout.token_ids if i >= 2)


# ---------------------------------------------------------------- seeds


def test_seeds_reproduce_and_global_random_state_is_left_alone(checkpoint):
    sampling = SamplingConfig(max_tokens=10)
    before = torch.get_rng_state()
    engine = loaded_engine(checkpoint)
    first = token_ids(engine.generate(ragged_requests(n=3), sampling))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert token_ids(engine.generate(ragged_requests(n=3), sampling)) == first
    other = token_ids(
        engine.generate([Request(r.prompt_ids, 3, r.seed + 1) for r in ragged_requests(3)], sampling)
    )
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_samples_of_a_prompt_differ_but_do_not_depend_on_company(checkpoint):
    """Prompt and seed alone choose the samples; the batch, its padding and other requests do not."""
    sampling = SamplingConfig(max_tokens=20)
    together = token_ids(loaded_engine(checkpoint).generate(ragged_requests(n=6), sampling))
    assert all(len({tuple(ids) for ids in group}) > 3 for group in together)
    small = loaded_engine(checkpoint, batch_size=4)
    alone = [token_ids(small.generate([request], sampling))[0] for request in ragged_requests(n=6)]
    assert alone == together
    fewer = token_ids(small.generate(ragged_requests(n=2), sampling))
    assert fewer == [group[:2] for group in together]


def test_prompt_seeds_are_stable_and_spread():
    assert derived_seed(0, 0) == 1576848291327681832  # recorded runs rely on it
    seeds = [derived_seed(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(seeds)) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---------------------------------------------------------------- weights


def test_push_changes_outputs_and_version(engine, reference):
    sampling = SamplingConfig(temperature=0.01, top_p=1e-6, max_tokens=15)
    [[old], *_] = engine.generate(ragged_requests(n=1), sampling)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    engine.load(((n, p.detach()) for n, p in reference.named_parameters()), version=2)
    [[new], *_] = engine.generate(ragged_requests(n=1), sampling)
    assert (old.weight_version, new.weight_version, engine.version) == (1, 2, 2)
    assert old.token_ids != new.token_ids
    logits = full_forward_logits(reference, RAGGED[0], new.token_ids)
    assert logits.argmax(-1).tolist() == new.token_ids


def test_a_bad_push_is_refused_and_so_is_generation_after_it(engine, reference):
    good = dict(reference.state_dict())
    norm = "model.norm.weight"
    bad = {
        "model.norm.weight": {n: t for n, t in good.items() if n != norm},
        "no tensor 'model.norm.bias'": {**good, "model.norm.bias": good[norm]},
        r"model.norm.weight has shape \(1,\).*needs \(32,\)": {**good, norm: torch.ones(1)},
    }
    if reference.config.tie_word_embeddings:
        bad["lm_head.weight is tied.*other values"] = {**good, "lm_head.weight": good["lm_head.weight"] + 1}
    else:
        bad["1 tensor.*lm_head.weight"] = {n: t for n, t in good.items() if n != "lm_head.weight"}
    streams = [(message, list(tensors.items())) for message, tensors in bad.items()]
    streams.append(("model.norm.weight came twice", [*good.items(), (norm, good[norm])]))
    for message, stream in streams:
        with pytest.raises(ValueError, match=message):
            engine.load(stream, version=2)
        assert engine.version == 1
        with pytest.raises(RuntimeError, match="push of version 2 failed"):
            engine.generate(ragged_requests(n=1), SamplingConfig(max_tokens=2))
    engine.load(good.items(), version=3)
    [rollouts, *_] = engine.generate(ragged_requests(n=1), SamplingConfig(max_tokens=2))
    assert rollouts[0].weight_version == 3


def test_tied_head_may_be_absent(checkpoint, reference):
    engine = empty_engine(checkpoint)
    tensors = {n: t for n, t in reference.state_dict().items() if n != "lm_head.weight"}
    if reference.config.tie_word_embeddings:
        engine.load(tensors.items(), version=1)
        assert torch.equal(engine.model.lm_head.weight, reference.lm_head.weight)
    else:
        with pytest.raises(ValueError, match=r"1 tensor\(s\) did not come: lm_head.weight"):
            engine.load(tensors.items(), version=1)


def test_non_finite_weights_are_reported_with_their_version(engine, reference):
    tensors = {n: t.clone() for n, t in reference.state_dict().items()}
    tensors["model.norm.weight"][3] = float("nan")
    engine.load(tensors.items(), version=7)
    with pytest.raises(FloatingPointError, match="weight version 7"):
        engine.generate(ragged_requests(n=2), SamplingConfig(max_tokens=4))


# ---------------------------------------------------------------- refusals


def test_engine_without_weights_or_closed_refuses(checkpoint):
    engine = empty_engine(checkpoint)
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.generate(ragged_requests(n=1), SamplingConfig(max_tokens=2))
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(ragged_requests(n=1), SamplingConfig(max_tokens=2))


@pytest.mark.parametrize(
    ("request_", "max_tokens", "message"),
    [
        (Request((), 1, 0), 4, "request 1: the prompt is empty"),
        (Request((2, 3), 0, 0), 4, "request 1: n=0"),
        (Request((2, 3), 1, -1), 4, "seed=-1 is negative"),
        (Request((2, 23), 1, 0), 4, r"outside the model's vocabulary \[0, 23\)"),
        (Request((2,) * 64, 1, 0), 4, "prompt has 64 tokens, and the model only 64 positions"),
        (
            Request((2,) * 60, 1, 0),
            5,
            "60 prompt tokens .* max_tokens=5 .* 64 positions; max_tokens <= 4 fits",
        ),
    ],
)
def test_impossible_requests_are_named(engine, request_, max_tokens, message):
    with pytest.raises(ValueError, match=message):
        engine.generate([Request((2,), 1, 0), request_], SamplingConfig(max_tokens=max_tokens))


def test_every_position_of_the_model_can_be_used(engine):
    [[rollout]] = engine.generate([Request((2,) * 63, 1, 0)], SamplingConfig(max_tokens=1))
    assert len(rollout.token_ids) == 1


# ---------------------------------------------------------------- several ranks


def groups_of(checkpoint: str, prompts: int) -> list:
    problems = [Prompt(str(i), ids, "") for i, ids in enumerate(RAGGED[:prompts])]
    sampling = SamplingConfig(temperature=0.9, max_tokens=12)
    engine = loaded_engine(checkpoint)
    ticket = QueuedPrompts(problems, 3, sampling, seed=5)
    return generate_groups(ticket, lambda _, requests: engine.generate(requests, sampling))


def on_two_ranks(folder: str, checkpoint: str) -> None:
    rank = dist.get_rank()
    gathered = all_gather_msgpack({"rank": rank, "bytes": b"x" * 1000 * rank, 3: [1.5, None, "é"]})
    assert [part["rank"] for part in gathered] == [0, 1]
    assert [len(part["bytes"]) for part in gathered] == [0, 1000]
    assert gathered[0][3] == [1.5, None, "é"]
    assert broadcast_msgpack({"from": rank}) == {"from": 0}
    results = {prompts: groups_of(checkpoint, prompts) for prompts in (len(RAGGED), 1)}
    torch.save({p: [asdict(g) for g in groups] for p, groups in results.items()}, f"{folder}/{rank}.pt")


@pytest.mark.parametrize("checkpoint", ["tied"], indirect=True)
def test_two_ranks_return_the_groups_of_one(checkpoint: str, tmp_path: Path):
    launch("test_rollout:on_two_ranks", [2], str(tmp_path), checkpoint)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first == second
    for prompts, groups in first.items():
        expected = groups_of(checkpoint, prompts)
        assert len(groups) == len(expected) == prompts
        for got, group in zip(groups, expected, strict=True):
            assert got["prompt"] == asdict(group.prompt)
            for sample, rollout in zip(got["rollouts"], group.rollouts, strict=True):
                # Other batch shapes round differently.
                np.testing.assert_allclose(sample.pop("logprobs"), rollout.logprobs, atol=1e-5)
                sample.pop("seconds")
                assert sample == {
                    k: v for k, v in asdict(rollout).items() if k not in ("logprobs", "seconds")
                }


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 9, 10, 1000])
def test_running_sums_without_a_cumsum(columns: int):
    p = torch.rand(3, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(running_sum_by_products(p), p.cumsum(-1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("columns", [1, 23, 128, 300, 5000])
def test_a_draw_inverts_the_distribution_function(columns: int):
    """Also at both ends, where tokens without probability are beside the first and the last one."""
    generator = torch.Generator().manual_seed(columns)
    p = torch.softmax(6 * torch.randn(200, columns, generator=generator), -1)
    p = p.masked_fill(p < 1e-4 * p.amax(-1, keepdim=True), 0.0)
    uniform = torch.rand(200, dtype=torch.float64, generator=generator)
    uniform[:40], uniform[40:80] = 0.0, 1 - 2**-53
    sums = p.double().cumsum(-1)
    expected = (sums <= uniform[:, None] * sums[:, -1:]).sum(-1)
    assert torch.equal(draw(p, uniform), expected)


def test_a_draw_leaves_out_the_unlikeliest_and_never_the_likeliest():
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).expand(100, 4)
    uniform = torch.linspace(0, 1 - 1e-9, 100, dtype=torch.float64)

    def drawn(**keys: float) -> set[int]:
        return set(draw(p.masked_fill(outside_support(p, SamplingConfig(**keys)), 0.0), uniform).tolist())

    assert [drawn(top_p=top_p) for top_p in (1.0, 0.95, 0.85)] == [{0, 1, 2, 3}, {0, 1, 2, 3}, {1, 2, 3}]
    assert [drawn(top_p=top_p) for top_p in (0.65, 1e-6)] == [{1, 3}, {1}]
    assert [drawn(top_k=k) for k in (1, 2, 3, 4, 9)] == [{1}, {1, 3}, {1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}]
    assert [drawn(min_p=p) for p in (0.2, 0.3, 0.6, 0.99)] == [{0, 1, 2, 3}, {1, 2, 3}, {1, 3}, {1}]
    # The likeliest token has 0.57 of the 0.7 that top-k leaves; two have 0.78 of the 0.9 that min-p leaves.
    assert drawn(top_k=2, top_p=0.55) == {1}
    assert drawn(top_k=2, top_p=0.6) == {1, 3}
    assert drawn(min_p=0.3, top_p=0.75) == {1, 3}

"""Prompts that a group's responses share give the same log-probs and gradients from fewer tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.cases.families import FAMILIES, Family
from helpers.cases.gradient_cases import STEPS, TOLERANCE, expected, sampled_for
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.workers.gradient_worker import Case, Layout
from hypothesis import given
from hypothesis import strategies as st

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.megatron.microbatch import plan
from megatron_gvpo.megatron.model.build import _obstacle_to_sharing
from megatron_gvpo.settings.config import build_config
from megatron_gvpo.settings.parallel import Padding
from megatron_gvpo.types import TrainBatch
from megatron_gvpo.verify.shrink import save_tiny

BUDGETS = {"groups split": 24, "groups whole": 400}  # tokens a micro-batch
RUNS = {
    "untied": [Layout(1), Layout(2), Layout(2, tp=2, sequence_parallel=True), Layout(2, pp=2)],
    "qwen3_moe": [Layout(2, ep=2)],
    "llama3": [Layout(1)],
    "truncated": [Layout(1), Layout(2, tp=2, sequence_parallel=True)],  # the model "untied", with supports
}
# With the core attention of GPUs, whose kernels emulation/flash_attention.py has for CPUs.
GPU_RUNS = {
    "untied": [
        Layout(1, recompute="selective"),
        Layout(2, tp=2),
        Layout(2, tp=2, sequence_parallel=True),
        Layout(2, pp=2),
    ],
    "qwen3_moe": [Layout(2, ep=2)],
    "llama3": [Layout(1)],
}
CASES = [(model, layout, budget, "CPU") for model, of in RUNS.items() for layout in of for budget in BUDGETS]
CASES += [(model, layout, "groups whole", "GPU") for model, of in GPU_RUNS.items() for layout in of]


def step_of(model: str) -> str:
    own = {"untied": "gvpo, groups split", "truncated": "gvpo, truncated"}
    return own.get(model, f"{model}, gvpo, groups split")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with models and the ranks' results."""
    path = tmp_path_factory.mktemp("shared")
    reference.save_models(path)
    work: dict[int, list[tuple[Layout, str, str, Case]]] = {}
    for model, layout, budget, core in CASES:
        step = STEPS[step_of(model)]
        rows, *_ = sampled_for(step, path)
        case = Case(step_of(model), step.algorithm, rows, BUDGETS[budget], model=step.model)
        work.setdefault(layout.ranks, []).append((layout, budget, core, case))
    torch.save(list(work.values()), path / "work.pt")
    launch("helpers.workers.shared_worker:run", list(work), str(path))
    return path


@pytest.mark.parametrize(("model", "layout", "budget", "core"), CASES, ids=str)
def test_gradients_are_those_of_whole_sequences(
    directory: Path, model: str, layout: Layout, budget: str, core: str
) -> None:
    file = directory / f"shared-{layout}-{step_of(model)}-{budget}-{core}.pt"
    results = torch.load(file, weights_only=False)
    loss, gradients = expected(step_of(model), directory)
    (_, plain_logp_r, plain_tokens), (shared, logp_r, tokens) = results[False], results[True]
    assert results["default"] == (model != "qwen3_moe"), "a CPU shares prompts, unless routers replay"
    torch.testing.assert_close(logp_r, plain_logp_r, rtol=1e-5, atol=1e-5)
    assert shared.metrics["loss"] == pytest.approx(loss, rel=TOLERANCE, abs=1e-6)
    nothing = 1e-8 * max(wanted.abs().max() for wanted in gradients.values())
    for name, wanted in reference.as_in_file(gradients).items():
        difference = (shared.gradients[name] - wanted).abs().max()
        assert difference <= TOLERANCE * wanted.abs().max() + nothing, name
    norm = torch.stack([wanted.norm() for wanted in gradients.values()]).norm().item()
    assert shared.grad_norm == pytest.approx(norm, rel=TOLERANCE)
    if budget == "groups whole" and layout == Layout(1):
        rows, *_ = sampled_for(STEPS[step_of(model)], directory)
        answers = sum(len(r) - 1 for r in rows.response_ids)
        assert plain_tokens == sum(map(len, rows.prompt_ids)) + answers
        assert tokens == sum(map(len, {tuple(p) for p in rows.prompt_ids})) + answers


def rows_of(groups: list[tuple[int, list[int]]]) -> TrainBatch:
    """Rows of (prompt tokens, tokens of each response)."""
    n = sum(len(answers) for _, answers in groups)
    return TrainBatch(
        prompt_ids=[(g,) * prompt for g, (prompt, answers) in enumerate(groups) for _ in answers],
        response_ids=[tuple(range(50, 50 + a)) for _, answers in groups for a in answers],
        group_n=torch.tensor([g for g, (_, answers) in enumerate(groups) for _ in answers]),
        reward_n=torch.zeros(n),
        truncated_n=torch.zeros(n, dtype=torch.bool),
    )


def test_a_shared_pack_is_token_aligned() -> None:
    """Every column by hand: a prompt of 3 tokens with answers of 2, 1 and 3, and one with a single answer."""
    groups = [(3, [2, 1, 3]), (2, [2]), (4, [1, 1]), (1, [3, 2])]
    batch = PackedBatch.pack(rows_of(groups), Padding(1, 8), share_prompts=True)
    assert batch.order == [7, 6, 3, 1, 0, 2, 4, 5], "by the prompt, the shortest first"
    prompts, responses, others = [3, 0, 0, 0], [50, 50, 51, 50, 50, 51], [1, 1, 50, 2, 2, 2, 2]
    assert batch.token_t.tolist() == [*prompts, *responses, *others, *[0] * 7]
    assert batch.position_t.tolist() == [0, 0, 1, 2, 1, 1, 2, 3, 3, 4, 0, 1, 2, 0, 1, 2, 3, *range(7)]
    assert (batch.lengths, batch.followers) == ([1, 3, 1, 2, 1, 2, 3, 4, 7], [2, 2])
    assert batch.positions == 7
    in_order_of_rows = [3, 7, 3, 3, 8, 9, 11, 12, 16, 16, 0, 5, 6, 0, 4]
    assert batch.response_r.tolist() == in_order_of_rows
    assert batch.label_r.tolist() == [50, 51, 50, 50, 51, 52, 50, 51, 50, 50, 50, 51, 52, 50, 51]
    assert batch.index_r.tolist() == list(range(15))


groups_of_rows = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=6
)


def contexts(batch: PackedBatch) -> list[list[int]]:
    """For every token of the pack, the tokens that it attends to: a shared prompt, and its own sequence."""
    sequences = [part.tolist() for part in batch.token_t.split(batch.lengths)]
    prompts = sequences[: len(batch.followers)]
    shared = [prompt for prompt, count in zip(prompts, batch.followers, strict=True) for _ in range(count)]
    before = [[] for _ in prompts] + shared
    before += [[] for _ in sequences[len(before) :]]
    return [
        prompt + sequence[: i + 1]
        for prompt, sequence in zip(before, sequences, strict=True)
        for i in range(len(sequence))
    ]


@given(groups_of_rows, st.sampled_from([1, 8]))
def test_every_response_token_is_predicted_in_the_context_of_its_row(groups, multiple: int) -> None:
    rows = rows_of(groups)
    batch = PackedBatch.pack(rows, Padding(1, multiple), share_prompts=True)
    of_token = contexts(batch)
    assert batch.position_t.tolist() == [len(context) - 1 for context in of_token]
    assert batch.label_r.tolist() == [token for response in rows.response_ids for token in response]
    wanted = [
        [*prompt, *response[:i]]
        for prompt, response in zip(rows.prompt_ids, rows.response_ids, strict=True)
        for i in range(len(response))
    ]
    assert [of_token[i] for i in batch.response_r.tolist()] == wanted
    tokens = sum(prompt + sum(count - 1 for count in counts) for prompt, counts in groups)
    assert len(batch.token_t) == tokens + -tokens % multiple, "every prompt once"


@given(groups_of_rows, st.integers(8, 60), st.integers(1, 3))
def test_packs_keep_to_the_budget_and_hold_every_row_once(groups, budget, ranks) -> None:
    rows = rows_of(groups)
    made = plan(rows, ranks, budget, hidden_size=32, share_prompts=True)
    assert sorted(i for rank in made.micro_batches for part in rank for i in part) == list(range(len(rows)))
    assert len({len(rank) for rank in made.micro_batches}) == 1
    for part in (part for rank in made.micro_batches for part in rank if part):
        batch = PackedBatch.pack(rows.select(part), share_prompts=True)
        assert len(batch.token_t) <= budget or len(part) == 1
        assert batch.positions == int(batch.position_t.max()) + 1


@pytest.mark.parametrize("shared", [False, True])
def test_rows_of_equal_length_are_neighbours(shared: bool) -> None:
    """A CPU computes the attention of neighbours of equal length at once: with shared prompts, by prompt."""
    rows = rows_of([(3, [2, 7, 2, 5]), (1, [4, 2, 4]), (3, [6, 1, 6])])
    batch = PackedBatch.pack(rows, share_prompts=shared)
    lengths = [(len(rows.prompt_ids[i]), len(rows.response_ids[i])) for i in batch.order]
    by_length = [(1, 2), (3, 1), (3, 2), (3, 2), (1, 4), (1, 4), (3, 5), (3, 6), (3, 6), (3, 7)]
    by_prompt = [(1, 2), (1, 4), (1, 4), (3, 2), (3, 2), (3, 5), (3, 7), (3, 1), (3, 6), (3, 6)]
    assert lengths == (by_prompt if shared else by_length)


@pytest.mark.parametrize(
    ("model", "parallel", "reason"),
    [
        ({}, {"cp": 2}, "parallel.cp=2 cuts every sequence by itself"),
        ({"kv_lora_rank": 8, "architectures": ["DeepseekV3ForCausalLM"]}, {}, "latent attention's keys"),
        ({"sliding_window": 4}, {}, "the model's sliding_window=4"),
    ],
)
def test_what_cannot_share_prompts_is_refused(tmp_path: Path, model, parallel, reason: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    values = {
        "architectures": ["Qwen2ForCausalLM"],
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        **sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps({**values, **model}))
    config = build_config(
        {
            "output_dir": "unused",
            "model": {"path": str(tmp_path)},
            "data": {"train": {"path": "unused"}},
            "rewards": {"components": [{"name": "math"}]},
            "train": {"steps": 1, "prompts_per_step": 1, "share_prompts": True},
            "optimizer": {"lr": 1.0},
            "parallel": parallel,
        }
    )
    with pytest.raises(ConfigError, match=f"train.share_prompts=true is not possible here: .*{reason}"):
        check_layout(config, 2)


def test_auto_says_why_it_repeats_prompts() -> None:
    for obstacle, reason in (
        ((False, True, False, 1), "no GPU has run it yet"),
        ((True, False, False, 1), "not a plain softmax"),
        ((True, True, True, 1), "rollout.router_replay=true"),
        ((True, True, False, 2), "parallel.cp=2"),
    ):
        assert reason in _obstacle_to_sharing(*obstacle)
    assert _obstacle_to_sharing(True, True, False, 1) == ""


OTHERS = [f for f in FAMILIES if f.architecture in ("GptOssForCausalLM", "Qwen3_5ForCausalLM")]


@pytest.mark.parametrize("family", OTHERS, ids=lambda family: family.architecture)
def test_attention_that_cannot_share_prompts_is_refused(tmp_path: Path, family: Family) -> None:
    """Sinks and gated delta nets: a prompt that responses share would give other numbers."""
    save_tiny(family.tiny, tmp_path, "model")
    launch("helpers.workers.shared_worker:refused", [1], str(tmp_path))
    assert (
        "train.share_prompts=true is not possible here: the attention" in (tmp_path / "refused").read_text()
    )

"""The gradient does not know the machine (design law 2): real megatron-core against plain transformers.

What would break it. A loss is a sum over all sequences of an optimizer step, divided by a size of that
whole step (its groups, sequences or tokens). Megatron takes it in shares: each of D data-parallel ranks
runs M micro-batches and returns one number for each. The schedule divides that number by M before the
backward, and DDP divides the gradient by D before it sums over the ranks:

    gradient = sum_d sum_m 1/D 1/M grad returned_dm.

So the gradient of sum_dm share_dm comes out exactly if every share is normalised by the *whole* step's sizes
and returned times M D, with the same M on all ranks. A normaliser of one micro-batch or one rank (its own
tokens, its own mean, M without D) agrees with the reference on one micro-batch and one rank, and nowhere
else. Tensor and pipeline parallelism add what must be summed exactly once: the gradients of norms and of an
embedding that two stages hold, the head's part of the hidden states' gradient; and a vocabulary that must be
padded. Context parallelism adds that every rank of a group has the whole loss and the gradients of its own
tokens, interleaved pipelines an order of chunks and micro-batches, experts data-parallel groups of their own,
and overlapped communication weights that are stale until someone asks. Every layout runs a second time with
overlap and with the sizes cut down from which on a model has many buckets of gradients and weights, and its
head many tiles (small_constants.py). A group that is split needs its sequences' weights from a scoring pass.
With the engine's log-probs as the reference, the mean gap that is taken off them must be that of all ranks'
rows.

The reference is fp64 transformers and autograd, sequence by sequence (gradient_reference.py). Everything
is compared with it, so that the layouts agree with each other. The measure is the largest difference over
the largest entry of the same parameter's gradient: an entry is a sum of terms that may cancel, fp32 rounds
at the size of the terms, and the entry's own size says nothing about that.

Not covered: bf16; CUDA kernels and Transformer Engine (on CPU, attention and norms are local ones, and
context parallelism gathers keys and values); dropout and MoE auxiliary losses, outside the law anyway.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases.gradient_cases import (
    ALL,
    HIDDEN,
    MODELS,
    ONE_BY_ONE,
    PROBES,
    QUICK,
    ROWS,
    RUNS,
    SPLIT,
    STEPS,
    TOLERANCE,
    WHOLE,
    assert_reference,
    assert_update_is_that_of_adamw,
    expected,
    gradient_limit,
    make_rows,
    sampled,
    sampled_for,
)
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.suite.selected import selected
from helpers.workers.gradient_worker import TEMPERATURE, Case, Layout, Outcome
from safetensors.torch import load_file

from megatron_gvpo.megatron.microbatch import plan

_QUICK_PROBES = {(layout, STEPS[name].model) for layout, name in QUICK}


def _cases(runs: list[tuple[Layout, str]], quick: Collection[tuple[Layout, str]]) -> list[Any]:
    """Parameters of the runs; those that are not `quick` are marked as proofs."""
    marks = [() if run in quick else pytest.mark.proof for run in runs]
    return [
        pytest.param(*run, id=f"{run[0]}: {run[1]}", marks=mark)
        for run, mark in zip(runs, marks, strict=True)
    ]


each_run = pytest.mark.parametrize(("layout", "name"), _cases(RUNS, QUICK))
each_small_run = pytest.mark.parametrize(
    ("layout", "name"), _cases([run for run in RUNS if run[0].small], QUICK)
)
each_probe = pytest.mark.parametrize(("layout", "model"), _cases(PROBES, _QUICK_PROBES))


def selected_runs(request: pytest.FixtureRequest) -> set[tuple[Layout, str]]:
    """The runs that the selected tests of this file need, and those of a single rank that they compare
    with.
    """
    runs = set(selected(request, "layout", "name"))
    for probe in selected(request, "layout", "model"):
        runs.add(next(run for run in RUNS if (run[0], STEPS[run[1]].model) == probe))
    runs |= {(Layout(1), MODELS[STEPS[name].model]) for _, name in runs}
    return runs | {(Layout(1), name) for _, name in runs}


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints and the ranks' results: one launch runs all layouts that the selected tests need."""
    path = tmp_path_factory.mktemp("invariance")
    reference.save_models(path)
    wanted = selected_runs(request)
    cases = {}
    for name in {*(name for _, name in wanted), *MODELS.values()}:
        step = STEPS[name]
        rows, *_ = sampled_for(step, path)
        first = None
        if step.engine_gap is not None:
            first, logp, _ = sampled(path, step.model, TEMPERATURE, "long without signal")
            first = first.with_columns(engine_logp_r=torch.cat(logp).detach().float() - step.engine_gap)
            rows = rows.with_columns(engine_logp_r=rows.ref_logp_r - step.engine_gap, ref_logp_r=None)
        cases[name] = Case(name, step.algorithm, rows, step.budget, step.at_step_start, step.model, first)
    probes = {model: cases[name] for model, name in MODELS.items()}
    runs = [(layout, cases[name]) for layout, name in RUNS if (layout, name) in wanted]
    torch.save((runs, probes), path / "work.pt")
    ranks = [layout.ranks for layout in dict.fromkeys(layout for layout, _ in runs)]
    launch("helpers.workers.gradient_worker:run", ranks, str(path), timeout=1800)
    return path


@pytest.fixture(scope="module")
def outcomes(directory: Path) -> dict[tuple[str, str], Any]:
    """{(layout, step): Outcome, (layout, model): Probe}"""
    parts = [torch.load(file, weights_only=False) for file in directory.glob("results-*.pt")]
    return {key: value for part in parts for key, value in part.items()}


@each_run
def test_loss_and_gradients_are_those_of_the_reference(
    outcomes: dict[tuple[str, str], Any], directory: Path, layout: Layout, name: str
) -> None:
    assert_reference(outcomes[str(layout), name], name, directory)


@each_run
def test_metrics_do_not_know_the_machine(
    outcomes: dict[tuple[str, str], Any], layout: Layout, name: str
) -> None:
    single = outcomes["single", name].metrics
    assert outcomes[str(layout), name].metrics == pytest.approx(single, rel=TOLERANCE, abs=1e-6)


@each_probe
def test_export_is_what_was_loaded_bit_for_bit(
    outcomes: dict[tuple[str, str], Any], directory: Path, layout: Layout, model: str
) -> None:
    """This includes layouts whose tensor parallelism padded the vocabulary of 131."""
    exported = outcomes[str(layout), model].exported
    loaded = load_file(directory / model / "model.safetensors")
    assert exported.keys() == loaded.keys()
    for name, tensor in loaded.items():
        assert exported[name].dtype == tensor.dtype, name
        assert torch.equal(exported[name].view(torch.uint8), tensor.view(torch.uint8)), name


@each_probe
def test_scores_are_those_of_transformers(
    outcomes: dict[tuple[str, str], Any], directory: Path, layout: Layout, model: str
) -> None:
    _, logp, _ = sampled(directory, model, TEMPERATURE, "ragged")
    scored = outcomes[str(layout), model].logp_r
    torch.testing.assert_close(scored, torch.cat(logp).detach().float(), rtol=0, atol=1e-5)


@each_probe
def test_scores_after_an_update_do_not_know_the_machine(
    outcomes: dict[tuple[str, str], Any], layout: Layout, model: str
) -> None:
    """The tolerance is that of the update itself, below: 5e-3 of its size."""
    before, after, single = (
        outcomes[str(layout), model].logp_r,
        outcomes[str(layout), model].updated_logp_r,
        outcomes["single", model].updated_logp_r,
    )
    assert (after - single).abs().max() < 5e-3 * (after - before).abs().max()


@each_probe
def test_an_update_is_that_of_torch_adamw(
    outcomes: dict[tuple[str, str], Any], directory: Path, layout: Layout, model: str
) -> None:
    assert_update_is_that_of_adamw(outcomes[str(layout), model], model, directory)


@each_small_run
def test_small_constants_are_exceeded(
    outcomes: dict[tuple[str, str], Any], layout: Layout, name: str
) -> None:
    """The first stage has several buckets, and the head keeps exponentials of some tokens, not of all."""
    assert outcomes[str(layout), STEPS[name].model].buckets > 2
    if name == "grpo with kl":  # its weights are not known before the forward
        assert 0 < outcomes[str(layout), name].stash_share < 1


# The steps' names are true only while plan() divides the rows as it did when they were written.


def test_budgets_split_groups_or_keep_them_whole() -> None:
    rows = make_rows(ROWS["ragged"])
    plans = {budget: plan(rows, 1, budget, HIDDEN) for budget in (ONE_BY_ONE, SPLIT, WHOLE, ALL)}
    counts = {budget: len(p.micro_batches[0]) for budget, p in plans.items()}
    assert counts[ONE_BY_ONE] == len(rows) and counts[ALL] == 1
    assert plans[SPLIT].split_groups and 1 < counts[SPLIT] < len(rows)
    assert not plans[WHOLE].split_groups and counts[WHOLE] > 1


@pytest.mark.parametrize("budget", [ALL, SPLIT])
def test_some_rank_of_four_has_no_signal(budget: int) -> None:
    rows = make_rows(ROWS["long without signal"])
    spread = {g: rows.reward_n[rows.group_n == g].unique().numel() > 1 for g in rows.group_n.tolist()}
    of_ranks = plan(rows, 4, budget, HIDDEN, keep_groups=False).micro_batches
    valid = [[spread[int(rows.group_n[i])] for pack in packs for i in pack] for packs in of_ranks]
    assert any(rank and not any(rank) for rank in valid)
    assert len({rank.count(False) for rank in valid}) > 1


def test_some_micro_batches_are_empty() -> None:
    rows = make_rows(ROWS["fewer than ranks"])
    of_ranks = plan(rows, 4, SPLIT, HIDDEN, keep_groups=False).micro_batches
    assert [len(packs) for packs in of_ranks] == [1] * 4 and sum(packs == [[]] for packs in of_ranks) == 2


def test_long_responses_are_alone_beside_packs_of_short_ones() -> None:
    rows = make_rows(ROWS["log-normal"])
    assert rows.length_n.max() > 8 * rows.length_n.median() and rows.length_n.max() > 2 * SPLIT
    batch_plan = plan(rows, 2, SPLIT, HIDDEN)
    packs = [pack for rank in batch_plan.micro_batches for pack in rank]
    beyond = [pack for pack in packs if sum(rows.tokens[i] for i in pack) > SPLIT]
    assert batch_plan.split_groups and len(beyond) > 2 and all(len(pack) == 1 for pack in beyond)
    assert max(map(len, packs)) > 1


def test_a_group_with_equal_rewards_has_a_gradient_once_the_policy_moved(directory: Path) -> None:
    step = STEPS["gvpo, groups whole"]
    rows, logp, _ = sampled_for(step, directory)
    logp = [x.detach().requires_grad_() for x in logp]
    step.loss(reference.sample_of(rows, logp)).backward()
    groups = rows.group_n.tolist()
    equal = [i for i, g in enumerate(groups) if set(rows.reward_n[rows.group_n == g].tolist()) == {0.5}]
    assert len(equal) == 4 and all(logp[i].grad.abs().min() > 1e-4 for i in equal)


def test_an_engines_gap_would_be_seen_if_it_were_not_taken_off(directory: Path) -> None:
    name = "gvpo, engine's reference, groups whole"
    step = STEPS[name]
    rows, logp, parameters = sampled_for(step, directory)
    biased = rows.with_columns(ref_logp_r=rows.ref_logp_r - step.engine_gap)
    loss = step.loss(reference.sample_of(biased, logp))
    gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
    _, exact = expected(name, directory)
    for gradient, wanted in zip(gradients, exact.values(), strict=True):
        assert (gradient - wanted).abs().max() / wanted.abs().max() > 1000 * TOLERANCE


def test_a_limit_for_rounding_refuses_what_is_beyond_it(directory: Path) -> None:
    """The rows of log-normal lengths cancel: on some machines fp32 rounds their gradient by 8e-6."""
    name = "gvpo, log-normal lengths"
    limit = gradient_limit(name, directory)
    assert TOLERANCE <= limit < 1e-4
    loss, exact = expected(name, directory)
    gradients = reference.as_in_file(exact)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()

    def outcome(part: float) -> Outcome:
        wrong = {key: gradient + part * limit * gradient.abs().max() for key, gradient in gradients.items()}
        return Outcome({"loss": loss}, wrong, norm, 0.0)

    assert_reference(outcome(0.9), name, directory)
    with pytest.raises(AssertionError):
        assert_reference(outcome(1.1), name, directory)


def test_experts_that_are_not_replayed_would_be_seen(directory: Path) -> None:
    for model in ("qwen3_moe", "deepseek_v3"):
        rows, replayed, _ = sampled(directory, model, TEMPERATURE, "ragged", True)
        _, own, _ = sampled(directory, model, TEMPERATURE, "ragged")
        for routing, a, b in zip(rows.routing, replayed, own, strict=True):
            assert (a - b).abs().max() > 1e-3 if routing is not None else torch.equal(a, b)

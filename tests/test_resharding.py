"""A run saved under one layout goes on under another as if nothing had happened, on real megatron-core.

Adam's moments, its step, the masters and the schedule must all arrive: with moments lost, or a step that is
counted once for every parameter, the next updates differ by a good part of the learning rate.
"""

from __future__ import annotations

import gradient_reference as reference
import pytest
import torch
from checkpoint_worker import RUNS, Continuation
from distributed import launch
from gradient_worker import UPDATE, Case
from test_gradient_invariance import SPLIT, STEPS, sampled_for


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Continuation | str]:
    directory = tmp_path_factory.mktemp("resharding")
    reference.save_models(directory)
    cases = {}
    of_family = {model: f"{model}, gvpo, groups split" for model in ("tied", "qwen3_moe")}
    for model, name in {"untied": "gvpo, groups split", **of_family}.items():
        rows, *_ = sampled_for(STEPS[name], directory)
        cases[model] = Case(name, STEPS[name].algorithm, rows, SPLIT, model=model)
    work = [(layout, source, any_layout, cases[model]) for layout, source, any_layout, model in RUNS]
    torch.save(work, directory / "work.pt")
    launch("checkpoint_worker:run", [layout.ranks for layout, *_ in RUNS], str(directory))
    return [torch.load(directory / f"run-{i}.pt", weights_only=False) for i in range(len(RUNS))]


MOVED = [i for i, run in enumerate(RUNS) if run[0] != run[1] and run[2] and run[1].pp == 1]


@pytest.mark.parametrize("number", MOVED, ids=lambda i: f"{RUNS[i][1]} to {RUNS[i][0]}: {RUNS[i][3]}")
def test_another_layout_goes_on_as_the_one_that_saved(found: list[Continuation | str], number: int) -> None:
    saved_by = next(i for i, run in enumerate(RUNS) if run[0] == run[1] and run[1:] == RUNS[number][1:])
    moved, stayed = found[number], found[saved_by]
    assert isinstance(moved, Continuation) and isinstance(stayed, Continuation)
    assert moved.lrs == stayed.lrs
    assert moved.losses == pytest.approx(stayed.losses, rel=1e-4, abs=1e-5)
    assert moved.grad_norms == pytest.approx(stayed.grad_norms, rel=1e-4)
    assert moved.weights.keys() == stayed.weights.keys()
    for name, weight in moved.weights.items():
        assert (weight - stayed.weights[name]).abs().max() < 1e-2 * UPDATE["lr"], name


def test_a_checkpoint_for_its_own_layout_is_refused_by_another(found: list[Continuation | str]) -> None:
    message = found[-1]
    assert isinstance(message, str)
    assert "processes=2 and checkpoint.any_layout=false, and this run has" in message
    assert "processes=1: resume with the same layout" in message


def test_a_pipelines_checkpoint_is_refused_by_another_layout(found: list[Continuation | str]) -> None:
    message = found[-3]
    assert isinstance(message, str)
    assert "parallel.pp=2" in message and "neither pipelines nor tied embeddings go on exactly" in message

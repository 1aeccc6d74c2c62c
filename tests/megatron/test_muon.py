"""Muon: an update equals the definition in fp64 in every layout, and a resumed run one that never stopped.

The reference takes the gradient of fp64 transformers, matrix by matrix as the checkpoint's files have them,
and Newton-Schulz as https://kellerjordan.github.io/posts/muon/ defines it, written here again. The iterations
enlarge small singular values up to 3.4445^5 = 485 times, and with them what fp32 rounds: gradients agree to
1e-5 of their largest entry (test_gradient_invariance.py), updates to 5e-3 of theirs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cases.gradient_cases import SPLIT, STEPS, expected, sampled, sampled_for
from helpers.cases.muon_cases import ADAPTERS, EVERY, LORA, QUICK, RESUMED
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.suite.selected import selected
from helpers.workers.gradient_worker import TEMPERATURE, UPDATE, Case, Layout
from helpers.workers.muon_worker import Job, Updates
from torch import Tensor

from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.memory_model import matrices, state
from megatron_gvpo.planner.workload import Layout as PlannedLayout
from megatron_gvpo.settings.sections import MuonConfig


def each(jobs: list[Job]) -> pytest.MarkDecorator:
    parameters = [
        pytest.param(job, id=job.file, marks=() if job in QUICK else pytest.mark.proof) for job in jobs
    ]
    return pytest.mark.parametrize("job", parameters)


def step_of(model: str) -> str:
    return "gvpo, groups split" if model == "untied" else f"{model}, gvpo, groups split"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Results of the jobs that the selected tests need, those first that others resume."""
    path = tmp_path_factory.mktemp("muon")
    wanted = set(selected(request, "job"))
    wanted |= {Job(job.model, job.load, job.muon, job.adapter) for job in wanted if job.load}
    if any(job.adapter for job in wanted):
        wanted.add(Job("untied", Layout(1), adapter=LORA))
    jobs = sorted(wanted, key=lambda job: (job.load is not None, job.layout.ranks, job.file))
    models = {job.model for job in jobs}
    reference.save_models(path, models)
    cases = {}
    for model in models:
        step = STEPS[step_of(model)]
        rows, *_ = sampled_for(step, path)
        cases[model] = Case(step_of(model), step.algorithm, rows, SPLIT, model=model)
    torch.save((jobs, cases), path / "work.pt")
    launch("helpers.workers.muon_worker:run", [job.layout.ranks for job in jobs], str(path), timeout=1200)
    return path


def result_of(job: Job, directory: Path) -> Updates:
    result: Updates = torch.load(directory / f"{job.file}.pt", weights_only=False)
    return result


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Jordan's zeroth power of a matrix, in fp64."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.double()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm()
    for _ in range(steps):
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x.T if is_tall else x


def muon_update(gradient: Tensor, options: MuonConfig) -> Tensor:
    """The first update, before the learning rate."""
    rows, columns = gradient.shape
    moment = (1 - options.momentum) * gradient
    look = (1 - options.momentum) * gradient + options.momentum * moment if options.nesterov else moment
    scale = {
        "adamw": 0.2 * max(rows, columns) ** 0.5,
        "shape_scaling": max(1, rows / columns) ** 0.5,
        "unit_rms_norm": (rows / columns) ** 0.5,
    }[options.scale]
    return scale * newton_schulz(look, options.steps)


def is_matrix(name: str, weight: Tensor) -> bool:
    return ".layers." in name and weight.dim() == 2


@each(EVERY)
def test_an_update_is_that_of_the_definition(directory: Path, job: Job) -> None:
    """The norm over all gradients clips them. AdamW's tolerance is that of test_gradient_invariance.py."""
    result = result_of(job, directory)
    _, gradients = expected(step_of(job.model), directory)
    _, _, parameters = sampled(directory, job.model, TEMPERATURE, "ragged")
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    assert norm > UPDATE["clip_grad"], "nothing would be clipped"
    assert result.grad_norms[0] == pytest.approx(norm, rel=1e-5)

    of_files = reference.as_in_file({name: p.detach() for name, p in parameters.items()})
    clipped = reference.as_in_file({name: g * UPDATE["clip_grad"] / norm for name, g in gradients.items()})
    options, lr = MuonConfig(**dict(job.muon)), UPDATE["lr"]
    compared = 0
    for name, weight in of_files.items():
        gradient, updated = clipped[name], result.updated[name].double()
        if is_matrix(name, weight):
            if not gradient.any():  # of an expert to which no token went
                update = torch.zeros_like(weight)
            else:
                update = muon_update(gradient, options)
                compared += 1
            wanted = weight * (1 - lr * UPDATE["weight_decay"]) - lr * update
            assert (updated - wanted).abs().max() < 5e-3 * lr * max(1e-2, update.abs().max()), name
        else:
            decay = UPDATE["weight_decay"] if weight.dim() > 1 else 0.0
            wanted = weight * (1 - lr * decay) - lr * gradient / (gradient.abs() + UPDATE["eps"])
            assert (updated - wanted).abs().max() < 5e-3 * lr, name
    assert compared > 12


@each(RESUMED)
def test_a_resumed_run_equals_one_that_never_stopped(directory: Path, job: Job) -> None:
    """Also in another layout: moments, masters and AdamW's count of steps arrive."""
    assert job.load is not None
    unbroken = result_of(Job(job.model, job.load, job.muon, job.adapter), directory)
    resumed = result_of(job, directory)
    assert resumed.grad_norms == pytest.approx(unbroken.grad_norms[1:], rel=1e-4)
    assert resumed.losses == pytest.approx(unbroken.losses[1:], rel=1e-4, abs=1e-5)
    exact = job.layout == job.load
    for name, weight in unbroken.weights.items():
        moved = (resumed.weights[name] - weight).abs().max()
        assert moved == 0 if exact else moved < 2e-2 * UPDATE["lr"], name


@each(ADAPTERS)
def test_adapters_train_alike_in_every_layout(directory: Path, job: Job) -> None:
    single = result_of(Job("untied", Layout(1), adapter=LORA), directory)
    result = result_of(job, directory)
    assert result.grad_norms == pytest.approx(single.grad_norms, rel=1e-4)
    for name, weight in single.weights.items():
        assert (result.weights[name] - weight).abs().max() < 2e-2 * UPDATE["lr"], name
    assert set(single.moments) == set(result.moments) == {"momentum_buffer"}, (
        "all weights of adapters are matrices"
    )


@each(EVERY[:1])
def test_a_matrix_has_one_moment(directory: Path, job: Job) -> None:
    """Also in the planner, which counts norms and biases as matrices: 1 % of this small model."""
    result = result_of(job, directory)
    assert result.moments["momentum_buffer"] == result.matrices > 0
    assert result.moments["exp_avg"] == result.moments["exp_avg_sq"] > 0
    model, layout = architecture.load(str(directory / job.model / "config.json")), PlannedLayout(1)
    assert matrices(model, layout, 0) == pytest.approx(result.matrices, rel=0.02)
    saved = state(model, layout, 0)[2] - state(model, replace(layout, muon=True), 0)[2]
    assert saved == 4 * matrices(model, layout, 0)

"""Overlapped communication changes no number, with as many buckets as large models have.

megatron-core gathers an update's weights bucket by bucket, and waits for a bucket in the forward pre-hooks of
the modules whose weights are in it. A tiny model has one bucket, for which its first module waits, so a later
reader that does not wait would go unnoticed. The tests therefore cut buckets down until the output layer has
its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases.gradient_cases import SPLIT, WHOLE, gvpo, sampled_for
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.suite.selected import selected
from helpers.workers.gradient_worker import Case, Layout

EMA = {"name": "ema", "decay": 0.5}
FIXED = {"name": "fixed"}
# With split groups an update scores first, so that its forward finds most buckets gathered.
CASES: dict[str, tuple[Layout, str, str, dict[str, Any]]] = {
    "dp2, split": (Layout(2), "untied", "split", {}),
    "dp2, tied, moving reference": (Layout(2), "tied", "whole", {"reference": EMA}),
    "tp2 x dp2, moving reference": (Layout(4, tp=2), "untied", "whole", {"reference": EMA}),
    "pp2 x dp2, fixed reference": (Layout(4, pp=2), "untied", "whole", {"reference": FIXED}),
}
QUICK = ("dp2, tied, moving reference", "pp2 x dp2, fixed reference")  # in `make test`
WEIGHTS = 1e-6  # of the largest entry, which is about 1
NUMBERS = 2e-5  # of the rest: fp32 rounds a log-prob by 1e-6, and losses and norms follow from sums of them


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the selected tests' cases."""
    directory = tmp_path_factory.mktemp("overlap")
    reference.save_models(directory)
    names = selected(request, "name")
    work = []
    for name, (layout, model, groups, loss) in CASES.items():
        if name not in names:
            continue
        step = gvpo(SPLIT if groups == "split" else WHOLE, model=model, **loss)
        rows, *_ = sampled_for(step, directory)
        work.append((layout, Case(name, step.algorithm, rows, step.budget, model=model)))
    torch.save(work, directory / "work.pt")
    launch("helpers.workers.overlap_worker:run", [layout.ranks for layout, _ in work], str(directory))
    return directory


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.proof) for name in CASES]
)
def test_a_run_with_overlap_is_the_run_without(results: Path, name: str) -> None:
    """Log-probs, gradient norms and every exported tensor agree, after any order of updates and readers."""
    runs = torch.load(results / f"{name}.pt", weights_only=False)
    without, overlapped = runs[False], runs[True]
    assert without.pop("bucket groups") < overlapped.pop("bucket groups")
    assert overlapped.keys() == without.keys()
    wrong = {}
    for key, value in without.items():
        wanted, got = (torch.as_tensor(v, dtype=torch.float64) for v in (value, overlapped[key]))
        tolerance = WEIGHTS if key.endswith((".weight", ".bias")) else NUMBERS
        if (difference := (got - wanted).abs().max()) > tolerance * max(1.0, wanted.abs().max()):
            wrong[key] = difference.item()
    assert not wrong

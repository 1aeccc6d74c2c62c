"""Deliberate faults of code that only GPUs run: a bound refuses the gradient, or norm, of each.

The bounds are those of test_emulated_gradients.py: that of bf16, and that of fp32 for what bf16 rounds away.
`pytest -rP` prints the error of each; docs/howto/emulated_gpu.md has them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.cases.gradient_cases import STEPS, TOLERANCE, expected, sampled_for
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.references.bf16_errors import errors, round_weights, transformers_in_bf16
from helpers.workers.emulated_faults import GROUPS, Result
from helpers.workers.gradient_worker import Case

pytestmark = pytest.mark.proof
NAME = "gvpo, groups split"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults")
    reference.save_models(path, ["untied"])
    round_weights(path)
    return path


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[tuple[str, str], dict[str, Result]]:
    """{(dtype, layout): {fault: Result}}"""
    step = STEPS[NAME]
    rows, *_ = sampled_for(step, directory)
    case = Case(NAME, step.algorithm, rows, step.budget, step.at_step_start, step.model)
    torch.save(case, directory / "work.pt")
    ranks = [layout.ranks for _, layout, _ in GROUPS]
    launch("helpers.workers.emulated_faults:run", ranks, str(directory), timeout=1800, emulated=True)
    return {
        (dtype, str(layout)): torch.load(directory / f"results-{dtype}-{layout}.pt", weights_only=False)
        for dtype, layout, _ in GROUPS
    }


@pytest.fixture(scope="module")
def bounds(directory: Path) -> dict[str, float]:
    _, exact = expected(NAME, directory)
    in_bf16 = max(errors(transformers_in_bf16(STEPS[NAME], directory), exact).values())
    return {"bfloat16": 2 * in_bf16, "float32": TOLERANCE}


def error_of(result: Result, directory: Path) -> float:
    """The largest relative error of a gradient, or of the norm that the optimizer would clip by."""
    _, exact = expected(NAME, directory)
    exact_norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm().item()
    each = [abs(result.norm / exact_norm - 1), *errors(result.gradients, exact).values()]
    return torch.tensor(each).max().item()  # NaN, where one is NaN


@pytest.mark.parametrize(("dtype", "layout"), [(dtype, str(layout)) for dtype, layout, _ in GROUPS])
def test_without_a_fault_the_bound_is_kept(
    results: dict[tuple[str, str], dict[str, Result]],
    directory: Path,
    bounds: dict[str, float],
    dtype: str,
    layout: str,
) -> None:
    for name in ("nothing", "nothing at the end"):  # no fault stays
        result = results[dtype, layout][name]
        assert result.error is None
        error = error_of(result, directory)
        print(f"{dtype}, {layout}, {name}: {error:.2g}, bound {bounds[dtype]:.2g}")
        assert error <= bounds[dtype]


def test_there_are_thirty_faults() -> None:
    assert sum(len(faults) for *_, faults in GROUPS) >= 30


@pytest.mark.parametrize(
    ("dtype", "layout", "fault"),
    [(dtype, str(layout), name) for dtype, layout, faults in GROUPS for name in faults],
)
def test_a_fault_is_seen(
    results: dict[tuple[str, str], dict[str, Result]],
    directory: Path,
    bounds: dict[str, float],
    dtype: str,
    layout: str,
    fault: str,
) -> None:
    result = results[dtype, layout][fault]
    assert result.reached, "nothing ran the code with the fault"
    assert result.error is None
    error = error_of(result, directory)
    print(f"{dtype}, {layout}, {fault}: {error:.2g}, bound {bounds[dtype]:.2g}, {result.reached} calls")
    assert not error <= bounds[dtype]  # a gradient of NaN is found, too

"""Deliberate faults of code that only GPUs run: the bf16 bound refuses the gradient, or norm, of each.

The bound is that of test_emulated_gradients.py; a fault that raises an error counts as seen, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import on_null_cuda
from helpers.cases.gradient_cases import STEPS, expected, sampled_for
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.references.bf16_errors import errors, round_weights, transformers_in_bf16
from helpers.workers.emulated_faults import GROUPS
from helpers.workers.gradient_worker import Case

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs"),
]
NAME = "gvpo, groups split"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults")
    reference.save_models(path, ["untied"])
    round_weights(path)
    return path


@pytest.fixture(scope="module")
def found(directory: Path) -> dict[tuple[str, str], Any]:
    """{(layout, fault): (gradients, their norm), or the error that the fault raised}."""
    step = STEPS[NAME]
    rows, *_ = sampled_for(step, directory)
    case = Case(NAME, step.algorithm, rows, step.budget, step.at_step_start, step.model, dtype="bfloat16")
    torch.save(case, directory / "work.pt")
    ranks = [layout.ranks for layout, _ in GROUPS]
    launch("helpers.workers.emulated_faults:run", ranks, str(directory), timeout=1800, emulated=True)
    results = {}
    for layout, _ in GROUPS:
        of_layout = torch.load(directory / f"results-{layout}.pt", weights_only=False)
        results |= {(str(layout), name): value for name, value in of_layout.items()}
    return results


@pytest.fixture(scope="module")
def bound(directory: Path) -> float:
    _, exact = expected(NAME, directory)
    return 2 * max(errors(transformers_in_bf16(STEPS[NAME], directory), exact).values())


def is_right(result: Any, directory: Path, bound: float) -> bool:
    """All gradients, and the norm that the optimizer would clip by, are within the bound."""
    if isinstance(result, str):
        assert "Error" in result
        return False
    gradients, norm = result
    _, exact = expected(NAME, directory)
    exact_norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm().item()
    return max(errors(gradients, exact).values()) <= bound and abs(norm / exact_norm - 1) <= bound


@pytest.mark.parametrize("layout", [str(layout) for layout, _ in GROUPS])
def test_without_a_fault_the_bound_is_kept(
    found: dict[tuple[str, str], Any], directory: Path, bound: float, layout: str
) -> None:
    assert is_right(found[layout, "nothing"], directory, bound)


def test_there_are_thirty_faults() -> None:
    assert sum(len(faults) - 1 for _, faults in GROUPS) >= 30


@pytest.mark.parametrize(
    ("layout", "fault"),
    [(str(layout), name) for layout, faults in GROUPS for name in faults if name != "nothing"],
)
def test_a_fault_is_seen(
    found: dict[tuple[str, str], Any], directory: Path, bound: float, layout: str, fault: str
) -> None:
    assert not is_right(found[layout, fault], directory, bound)

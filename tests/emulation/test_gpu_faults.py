"""Deliberate faults of code that only GPUs run: each makes a gradient that the bf16 bound refuses.

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
from helpers.workers.emulated_faults import ONE, TWO
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
def found(directory: Path) -> dict[tuple[int, str], Any]:
    step = STEPS[NAME]
    rows, *_ = sampled_for(step, directory)
    case = Case(NAME, step.algorithm, rows, step.budget, step.at_step_start, step.model, dtype="bfloat16")
    torch.save(case, directory / "work.pt")
    launch("helpers.workers.emulated_faults:run", [1, 2], str(directory), timeout=1800, emulated=True)
    results = {size: torch.load(directory / f"results-{size}.pt", weights_only=False) for size in (1, 2)}
    return {(size, name): value for size, of in results.items() for name, value in of.items()}


@pytest.fixture(scope="module")
def bound(directory: Path) -> float:
    _, exact = expected(NAME, directory)
    return 2 * max(errors(transformers_in_bf16(STEPS[NAME], directory), exact).values())


@pytest.mark.parametrize("size", [1, 2])
def test_without_a_fault_the_bound_is_kept(
    found: dict[tuple[int, str], Any], directory: Path, bound: float, size: int
) -> None:
    _, exact = expected(NAME, directory)
    assert max(errors(found[size, "nothing"], exact).values()) <= bound


@pytest.mark.parametrize(
    ("size", "fault"), [(size, name) for size, of in ((1, ONE), (2, TWO)) for name in of if name != "nothing"]
)
def test_a_fault_is_seen(
    found: dict[tuple[int, str], Any], directory: Path, bound: float, size: int, fault: str
) -> None:
    _, exact = expected(NAME, directory)
    gradients = found[size, fault]
    if isinstance(gradients, dict):
        assert not max(errors(gradients, exact).values()) <= bound
    else:
        assert "Error" in gradients

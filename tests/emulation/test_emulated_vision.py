"""Models that take images, on emulated GPUs, in fp32, by the checks of test_vision_models.py (on a CPU)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_vision_models as on_cpu
from helpers import on_null_cuda
from helpers.cases.vision_cases import VisionCase
from helpers.suite.selected import selected
from helpers.workers.gradient_worker import Layout

pytestmark = pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs")

QUICK = [VisionCase("qwen3_vl", Layout(1))]
CASES = [*QUICK, VisionCase("qwen2_5_vl", Layout(1))]
CHECKS = [
    on_cpu.test_scores_are_those_of_transformers,
    on_cpu.test_placeholders_that_a_policy_samples_are_ordinary_tokens,
    on_cpu.test_every_gradient_and_their_norm_are_those_of_transformers,
    on_cpu.test_an_update_is_that_of_torch_adamw,
    on_cpu.test_a_score_waits_for_the_weights_of_an_update,
    on_cpu.test_export_is_what_was_loaded_bit_for_bit,
]


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    on_cpu.run_cases(path, selected(request, "case"), emulated=True)
    return path


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("test_"))
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=str(c), marks=() if c in QUICK else pytest.mark.proof) for c in CASES],
)
def test_in_fp32(
    directory: Path, references: dict[str, Any], case: VisionCase, check: Callable[..., None]
) -> None:
    arguments = {"directory": directory, "references": references, "case": case}
    check(**{name: arguments[name] for name in inspect.signature(check).parameters})

"""Models that take images, on emulated GPUs, in fp32 and bf16.

In fp32 by the checks of test_vision_models.py, which runs on a CPU. In bf16 the bound is twice the error of
transformers in bf16, from the same fp64 gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_vision_models as on_cpu
import torch
from helpers.cases.vision_cases import VisionCase, load
from helpers.references.bf16_errors import relative_errors
from helpers.suite.selected import selected
from helpers.workers.gradient_worker import Layout

_FAMILIES = ("qwen3_vl", "qwen2_5_vl")
_LAYOUTS = (Layout(1), Layout(2, tp=2, sequence_parallel=True), Layout(2, pp=2))  # cp is refused
QUICK = [VisionCase("qwen3_vl", Layout(1))]
CASES = [VisionCase(family, layout) for family in _FAMILIES for layout in _LAYOUTS]
IN_BF16 = [VisionCase(family, layout, dtype="bfloat16") for family in _FAMILIES for layout in _LAYOUTS]
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


@pytest.fixture(scope="module")
def rounded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision-bf16")
    on_cpu.run_cases(path, selected(request, "case_in_bf16"), emulated=True, rounded=True)
    return path


@pytest.mark.proof
@pytest.mark.parametrize("case_in_bf16", [pytest.param(c, id=str(c)) for c in IN_BF16])
def test_in_bf16_the_error_is_that_of_transformers(
    rounded: Path, references: dict[str, Any], case_in_bf16: VisionCase
) -> None:
    case, name = case_in_bf16, f"{case_in_bf16.model} in bf16"
    if name not in references:
        model = load(rounded / case.model)
        exact = on_cpu.computed(model, rounded, case.model)
        model.zero_grad(set_to_none=True)
        references[name] = exact, on_cpu.computed(model.bfloat16(), rounded, case.model)
    (logp_r, _, exact, _), (other_r, _, other, _) = references[name]
    result = on_cpu.result_of(rounded, case)
    assert result.gradients.keys() == exact.keys()
    bound = 2 * max(relative_errors(other, exact).values())
    errors = relative_errors(result.gradients, exact)
    of_logp, of_other = ((r.cpu().double() - logp_r).norm().item() for r in (result.logp_r, other_r))
    print(f"{case}: gradients {max(errors.values()):.2g}, bound {bound:.2g}")
    print(f"{case}: log-probs {of_logp:.2g}, bound {2 * of_other:.2g}")
    assert max(errors.values()) <= bound, max(errors, key=errors.__getitem__)
    # The norm of a sum differs by at most the norm of the difference.
    norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm().item()
    assert result.grad_norm == pytest.approx(norm, rel=bound)
    assert of_logp <= 2 * of_other
    on_cpu.test_export_is_what_was_loaded_bit_for_bit(rounded, case)

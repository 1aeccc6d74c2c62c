"""The probe of a push allows for the lower of the trainer's and the servers' precision."""

from __future__ import annotations

import pytest

from megatron_gvpo.settings.sections import FP8Config, ModelConfig
from megatron_gvpo.weights.probe import TOLERANCE, lowest_precision


@pytest.mark.parametrize(
    ("dtype", "trained_in_fp8", "served_in_fp8", "on_gpu", "expected"),
    [
        ("float32", False, False, False, "float32"),
        ("float32", False, False, True, "tf32"),
        ("bfloat16", False, False, True, "bfloat16"),
        ("bfloat16", False, True, True, "fp8"),
        ("bfloat16", True, False, True, "fp8"),
        ("bfloat16", True, True, True, "fp8"),
    ],
)
def test_the_lower_precision_decides(
    dtype: str, trained_in_fp8: bool, served_in_fp8: bool, on_gpu: bool, expected: str
) -> None:
    fp8 = FP8Config(recipe="tensorwise") if trained_in_fp8 else None
    model = ModelConfig(path="unused", dtype=dtype, fp8=fp8)
    assert lowest_precision(model, served_in_fp8, on_gpu) == expected
    assert TOLERANCE["float32"] < TOLERANCE["tf32"] < TOLERANCE["bfloat16"] < TOLERANCE["fp8"]

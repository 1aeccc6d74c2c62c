"""The parts of benchmarks/mismatch.py that need no run: rounding, what is left to do, the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_gvpo.algorithms.config import AlgorithmConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import mismatch


def test_every_correction_is_a_configuration():
    for importance in mismatch.CORRECTIONS.values():
        loss = {**mismatch.GRPO["loss"], "importance": importance}
        AlgorithmConfig.model_validate({**mismatch.GRPO, "loss": loss})


def test_rounding_leaves_the_format_s_numbers():
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    rounded = mismatch.fp8("w", weight)
    scale = weight.abs().max() / 448
    assert 0 < ((rounded - weight) / weight).abs().max() <= 2**-4 * 1.001  # three bits of mantissa
    assert torch.equal((rounded / scale).to(torch.float8_e4m3fn).float() * scale, rounded)
    assert torch.equal(mismatch.fp8("norm", weight[0]), weight[0])
    assert 0 < ((mismatch.bf16("w", weight) - weight) / weight).abs().max() <= 2**-8


def test_a_file_of_other_settings_is_not_continued(tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    mismatch.begin(out)
    line = {"correction": "none", "scenario": "exact", "seed": 0, "pass_at_1": 0.5}
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    mismatch.begin(out)
    assert mismatch.lines(out) == [line]
    monkeypatch.setattr(mismatch, "STALE", 2)
    with pytest.raises(SystemExit, match="was measured with other stale: give --out a new file"):
        mismatch.begin(out)


def test_the_table_has_means_errors_and_seeds():
    results = [
        {"correction": "none", "scenario": "exact", "seed": seed, "pass_at_1": value}
        for seed, value in enumerate((0.5, 0.6))
    ] + [{"correction": "token mask", "scenario": "fp8", "seed": 0, "pass_at_1": 0.4}]
    rows = mismatch.table(results).splitlines()
    assert rows[0] == "| correction | exact | fp8 |"
    assert "| none | 55.0 ± 5.0 (2) | - |" in rows
    assert "| token mask | - | 40.0 (1) |" in rows

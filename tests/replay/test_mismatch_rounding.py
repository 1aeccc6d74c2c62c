"""A side's gaps are rounding if they are so together: its few largest are no lower precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inputs.run_faults import RUN
from helpers.tiny_run import ENGINE_REFERENCE, configure, fit

from megatron_gvpo.cli.mismatch import lines
from megatron_gvpo.replay.mismatch import _Gap, _named_precision, _Rounding, certify
from megatron_gvpo.runs.one_machine import load_run

BOUNDS = _Rounding(
    own="bfloat16",
    mean_square={"float32": 1e-12, "bfloat16": 0.02**2, "float8": 0.3**2},
    largest={"float32": 1e-5, "bfloat16": 0.4, "float8": 1.0},
    largest_of_few=0.07,
    routing=None,
)


@pytest.mark.parametrize(("largest", "named"), [(0.39, "bfloat16"), (2.0, "float8")])
def test_the_largest_gaps_are_judged_with_all_of_their_side(largest: float, named: str) -> None:
    """126 responses within the limit, and two of 14 tokens that are looked into for one token each."""
    response: Any = None  # the naming reads only the gaps
    usual = torch.full((14,), 0.01, dtype=torch.float64)
    rare = usual.clone()
    rare[3] = largest
    gaps = [_Gap(response, "engine", "precision", "bfloat16", usual, BOUNDS.limit) for _ in range(126)]
    gaps += [_Gap(response, "engine", "", "", rare) for _ in range(2)]
    *_, last = _named_precision(gaps, BOUNDS)
    assert (last.cause, last.detail) == ("precision", named)


@pytest.mark.usefixtures("leave_the_process_group")
def test_log_probs_after_an_update_of_the_step_are_left_out(task: Path, tmp_path: Path) -> None:
    """Nothing is scored before the updates, so the second mini-batch's log-probs are of other weights."""
    fit(configure(task, tmp_path, *RUN, *ENGINE_REFERENCE))
    certificate = certify(load_run(tmp_path), 2)
    assert certificate.is_rounding, certificate.causes
    assert certificate.left_out == 8 and sum(cause.responses for cause in certificate.causes) == 2 * 8
    assert any("without 8 responses of later mini-batches" in line for line in lines(certificate))

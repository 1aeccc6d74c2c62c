"""A teacher that the trainer holds, and learns from by all its logits, on emulated GPUs, in fp32 and bf16.

The algorithm, the fp64 reference and the checks are those of test_teacher_gradients.py, which runs on a CPU.
In bf16 the bound is twice the error of transformers in bf16, from the same fp64 numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_teacher_gradients as on_cpu
import torch
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.references.bf16_errors import errors, round_weights
from helpers.workers.gradient_worker import TEMPERATURE, Case, Layout

from megatron_gvpo.algorithms.config import AlgorithmConfig

NAME = "reverse"
ALGORITHM = AlgorithmConfig.model_validate(on_cpu.ALGORITHMS[NAME])
_SP = {"tp": 2, "sequence_parallel": True}
# Not cp: the teacher's heads of 12 numbers have no kernel there.
LAYOUTS = [Layout(1), Layout(2, **_SP), Layout(2, pp=2)]


def results_of(path: Path, plain: on_cpu.Plain, layouts: list[Layout], dtype: str) -> dict[Any, Any]:
    case = Case(NAME, on_cpu.ALGORITHMS[NAME], plain.rows, on_cpu.BUDGET, teacher="teacher", dtype=dtype)
    torch.save(([(layout, case) for layout in layouts], {case.model: case}), path / "work.pt")
    ranks = [layout.ranks for layout in layouts]
    launch("helpers.workers.gradient_worker:run", ranks, str(path), timeout=1800, emulated=True)
    parts = [torch.load(path / f"results-{layout}.pt", weights_only=False) for layout in layouts]
    return {key: value for part in parts for key, value in part.items()}


@pytest.mark.proof
def test_loss_gradients_norm_and_the_teachers_log_probs_equal_transformers(tmp_path: Path) -> None:
    on_cpu.save_models(tmp_path)
    plain = on_cpu.Plain(tmp_path)
    results = results_of(tmp_path, plain, LAYOUTS, "float32")
    for layout in LAYOUTS:
        on_cpu.assert_equal(results[str(layout), NAME], *plain.gradients(ALGORITHM))
        on_cpu.test_the_teachers_log_probs_equal_transformers(results, plain, layout)


@pytest.mark.proof
def test_in_bf16_the_error_is_that_of_transformers(tmp_path: Path) -> None:
    on_cpu.save_models(tmp_path)
    round_weights(tmp_path)
    plain, other = on_cpu.Plain(tmp_path), on_cpu.Plain(tmp_path, dtype=torch.bfloat16)
    other.rows = plain.rows
    results = results_of(tmp_path, plain, LAYOUTS, "bfloat16")
    _, _, exact = plain.gradients(ALGORITHM)
    _, _, of_other = other.gradients(ALGORITHM)
    bound = 2 * max(errors(reference.as_in_file(of_other), exact).values())
    norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm().item()
    teacher_r, other_r = (
        (logits / TEMPERATURE).log_softmax(-1).gather(1, plain.labels)[:, 0].detach()
        for logits in (plain.y, other.y)
    )
    of_logp = (other_r - teacher_r).norm().item()
    for layout in LAYOUTS:
        outcome, own_r = results[str(layout), NAME], results[str(layout), "teacher"]
        differences = errors(outcome.gradients, exact)
        print(f"{layout}: {max(differences.values()):.2g}, bound {bound:.2g}")
        assert max(differences.values()) <= bound, (layout, max(differences, key=differences.__getitem__))
        # The norm of a sum differs by at most the norm of the difference.
        assert outcome.grad_norm == pytest.approx(norm, rel=bound), layout
        assert (own_r.cpu().double() - teacher_r).norm().item() <= 2 * of_logp, layout

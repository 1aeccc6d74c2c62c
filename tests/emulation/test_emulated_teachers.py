"""A teacher that the trainer holds, and learns from by all its logits, on an emulated GPU, in fp32.

The algorithm, the fp64 reference and the checks are those of test_teacher_gradients.py, which runs on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import test_teacher_gradients as on_cpu
import torch
from helpers import on_null_cuda
from helpers.distributed import launch
from helpers.workers.gradient_worker import Case, Layout

from megatron_gvpo.algorithms.config import AlgorithmConfig

pytestmark = pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs")


@pytest.mark.proof
def test_loss_gradients_norm_and_the_teachers_log_probs_equal_transformers(tmp_path: Path) -> None:
    on_cpu.save_models(tmp_path)
    plain, layout, name = on_cpu.Plain(tmp_path), Layout(1), "reverse"
    case = Case(name, on_cpu.ALGORITHMS[name], plain.rows, on_cpu.BUDGET, teacher="teacher")
    torch.save(([(layout, case)], {case.model: case}), tmp_path / "work.pt")
    launch("helpers.workers.gradient_worker:run", [1], str(tmp_path), emulated=True)
    results = torch.load(tmp_path / f"results-{layout}.pt", weights_only=False)
    algorithm = AlgorithmConfig.model_validate(on_cpu.ALGORITHMS[name])
    on_cpu.assert_equal(results[str(layout), name], *plain.gradients(algorithm))
    on_cpu.test_the_teachers_log_probs_equal_transformers(results, plain, layout)

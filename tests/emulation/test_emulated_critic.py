"""PPO's critic on an emulated GPU, in fp32: values, loss, gradients, updates and a checkpoint.

The fp64 reference and the check are those of test_critic.py, which runs on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import test_critic as on_cpu
from helpers import on_null_cuda
from helpers.workers.gradient_worker import Layout

pytestmark = pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs")


def test_values_gradients_and_checkpoints_do_not_know_the_machine(tmp_path: Path) -> None:
    layout, model = Layout(1), "untied"
    on_cpu.run_layouts(tmp_path, [(layout, model)], emulated=True)
    wanted = {model: on_cpu.plain(tmp_path, model, on_cpu.HEAD, on_cpu.BIAS)}
    on_cpu.test_values_gradients_and_checkpoints_do_not_know_the_machine(tmp_path, wanted, layout, model)

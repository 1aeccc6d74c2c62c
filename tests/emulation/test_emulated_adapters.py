"""Adapters on emulated GPUs, in fp32: Transformer Engine's layers under Megatron-Bridge's adapters.

The cases, the fp64 reference and the checks are those of test_adapters.py, which runs the layers of a CPU.
Under sequence parallelism they found that Transformer Engine loses a gradient (docs/explanation/audit.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import test_adapters as on_cpu
from helpers import on_null_cuda
from helpers.suite.selected import selected
from helpers.workers.adapter_worker import Job
from helpers.workers.gradient_worker import Layout

pytestmark = pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs")

QUICK = [on_cpu.job("untied-all", Layout(2, tp=2, sequence_parallel=True))]
JOBS = [*QUICK, on_cpu.job("untied-all", Layout(1))]
CHECKS: list[Callable[[Path, Job], None]] = [
    on_cpu.test_log_probs_with_and_without_adapters_are_those_of_transformers,
    on_cpu.test_gradients_and_their_norm_are_those_of_the_reference,
    on_cpu.test_an_update_is_that_of_torch_adamw_and_keeps_the_base,
    on_cpu.test_memory_is_lent_and_given_back,
    on_cpu.test_only_adapters_have_gradients_and_optimizer_states,
    on_cpu.test_adapters_and_merged_weights_are_exported_as_they_were_read,
    on_cpu.test_hugging_face_peft_loads_what_is_saved,
]


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, adapters, and the results of one launch of all jobs that the selected tests need."""
    path = tmp_path_factory.mktemp("emulated-adapters")
    jobs = selected(request, "job")
    on_cpu.save_inputs(path, jobs)
    on_cpu.run_jobs(path, jobs, emulated=True)
    return path


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("test_"))
@pytest.mark.parametrize(
    "job", [pytest.param(j, id=j.name, marks=() if j in QUICK else pytest.mark.proof) for j in JOBS]
)
def test_in_fp32(directory: Path, job: Job, check: Callable[[Path, Job], None]) -> None:
    check(directory, job)

"""Every family is rehearsed as released, but for its depth: widths, heads and kernels are the true ones.

A family whose layers the GPU's libraries refuse would otherwise be found on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import on_null_cuda
from helpers.cases.families import FAMILIES, Family
from helpers.references.transformer_engine_source import wheel_source

from megatron_gvpo.rehearsal.nullcuda.devices import DEVICES
from megatron_gvpo.rehearsal.process import environment_of_ranks, run_jobs
from megatron_gvpo.rehearsal.rank import RankJob

pytestmark = [
    pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs"),
    pytest.mark.proof,
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_a_family_is_built_scored_and_trained(family: Family, tmp_path: Path) -> None:
    on_null_cuda.environment()
    file = on_null_cuda.write_model(tmp_path, family.shallow)
    variables = environment_of_ranks(DEVICES["h200"], 8, 130 * 2**30)
    variables["PYTHONPATH"] += f":{wheel_source('fla-core')}"  # the kernels of gated delta nets
    (tmp_path / "ranks").mkdir()
    job = RankJob([str(file)], [], 0, 2, 2, [str(tmp_path / "model")])
    [result] = run_jobs([job], variables, tmp_path / "ranks")
    updates = [phase for phase in result["phases"] if phase["name"].endswith("update")]
    assert len(updates) == 2, json.dumps(result["phases"][-1])
    assert not any(phase["results"]["skipped"] for phase in updates)

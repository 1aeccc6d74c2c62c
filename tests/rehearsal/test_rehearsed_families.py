"""Every family is rehearsed as released, but for its depth: widths, heads and kernels are the true ones.

A family whose layers the GPU's libraries refuse would otherwise be found on a GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import on_null_cuda
from helpers.cases.families import Family, checked
from helpers.references.transformer_engine_source import wheel_source

from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.architecture import Architecture
from megatron_gvpo.rehearsal.nullcuda.devices import DEVICES
from megatron_gvpo.rehearsal.process import environment_of_ranks, run_jobs
from megatron_gvpo.rehearsal.rank import RankJob

pytestmark = pytest.mark.proof


# Times that the host waits for the device in a micro-batch, which goes forward twice, because its group is
# scored before: a layer of experts waits for their counts, which its grouped products take from the host, and
# the first gated delta net of a pack for the number of its chunks (flash-linear-attention 0.6.0).
EXPERTS, DELTA_NETS = 2, 2


def waits_of(model: Architecture) -> int:
    """The waits of a micro-batch that are left, by the model's kinds of layers."""
    return EXPERTS * model.moe_layers + DELTA_NETS * (model.delta_net is not None)


@pytest.mark.parametrize("family", checked("rehearsal"), ids=lambda family: family.title)
def test_a_family_is_built_scored_and_trained_and_no_other_layer_waits(
    family: Family, tmp_path: Path
) -> None:
    on_null_cuda.environment()
    file = on_null_cuda.write_model(tmp_path, family.shallow)
    variables = environment_of_ranks(DEVICES["h200"], 8, 130 * 2**30)
    variables["PYTHONPATH"] += f":{wheel_source('fla-core')}"  # the kernels of gated delta nets
    (tmp_path / "ranks").mkdir()
    job = RankJob([str(file)], [], 0, 2, 2, [str(tmp_path / "model")])
    jobs = [job, replace(job, micro_batches=4, until="second update")]
    waits = []
    for result in run_jobs(jobs, variables, tmp_path / "ranks"):
        updates = [phase for phase in result["phases"] if phase["name"].endswith("update")]
        assert len(updates) == 2, json.dumps(result["phases"][-1])
        assert not any(phase["results"]["skipped"] for phase in updates)
        waits.append(updates[-1]["counts"].get("host_waits", 0))
    model = architecture.load(str(tmp_path / "model" / "config.json"))
    assert waits[1] - waits[0] == 2 * waits_of(model)

"""A run is replayed in another layout than its own, on one rank or several."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.distributed import launch
from helpers.inputs import gpt_oss_task
from helpers.tiny_run import configure, fit

from megatron_gvpo.observe.step_records import StepRecords, read
from megatron_gvpo.replay.findings import COMPONENTS, Finding
from megatron_gvpo.replay.run import replay
from megatron_gvpo.runs.one_machine import load_run
from megatron_gvpo.settings.sections import StepRecordsConfig

pytestmark = pytest.mark.usefixtures("leave_the_process_group")

RUN = ("algorithm=grpo", "train.mini_batches=2", "train.steps=2", "checkpoint.every=1", "data.eval=null")


@pytest.fixture(scope="module")
def sound(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sound")
    fit(configure(task, out, *RUN, "checkpoint.export_hf=false"))
    return out


@pytest.mark.parametrize(
    "layout",
    ["parallel.tp=2", *(pytest.param(other, marks=pytest.mark.proof) for other in ("parallel.pp=2", ""))],
)
@pytest.mark.parametrize("has_fault", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_a_run_is_replayed_in_another_layout(sound: Path, tmp_path: Path, layout: str, has_fault: bool):
    """On two ranks, which without a layout share the rows; a wrong gradient of the run is named there."""
    out, tensor = tmp_path / "run", "decoder.layers.2.mlp.linear_fc1.weight"
    shutil.copytree(sound, out)
    if has_fault:
        record = read(sound, 2)
        total, norm, elements = record.updates[1].gradients[tensor]
        gradients = {**record.updates[1].gradients, tensor: (2 * total, 2 * norm, elements)}
        record.updates[1] = replace(record.updates[1], gradients=gradients)
        StepRecords(out, StepRecordsConfig(), 2).write(record, [])
    file = tmp_path / "findings.json"
    overrides = [layout] if layout else []
    launch("helpers.workers.trainer_worker:replay_step", [2], str(out), str(file), *overrides)
    findings = json.loads(file.read_text())
    differing = [finding for finding in findings if finding[1] != "equal"]
    if has_fault:
        assert [(name, outcome, of) for name, outcome, of, _ in differing[:1]] == [
            ("gradients", "differs", tensor)
        ]
    else:
        assert not differing and {finding[0] for finding in findings} == {*COMPONENTS}


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_run_of_another_layout_is_replayed_on_one_rank(task: Path, tmp_path: Path, layout: str):
    parallel = ("parallel.tp=2",) if layout == "tp2" else ()
    launch("helpers.workers.trainer_worker:fit_once", [2], str(task), str(tmp_path), *RUN, *parallel)
    findings: list[Finding] = []
    first = replay(load_run(tmp_path), 2, True, findings.append)
    assert first is None
    assert sum(finding.outcome == "equal" for finding in findings) == len(COMPONENTS)


@pytest.mark.proof
@pytest.mark.parametrize("layout", [("parallel.tp=2", "parallel.sequence_parallel=true"), ("parallel.ep=2",)])
def test_a_mixture_of_experts_is_replayed_in_another_layout(
    task: Path, tmp_path: Path, layout: tuple[str, ...]
):
    """From a checkpoint, with attention sinks that tensor-parallel ranks divide."""
    own, out, file = gpt_oss_task.make(task, tmp_path / "task"), tmp_path / "run", tmp_path / "findings.json"
    fit(configure(own, out, *RUN, "checkpoint.export_hf=false"))
    launch("helpers.workers.trainer_worker:replay_step", [2], str(out), str(file), *layout)
    findings = json.loads(file.read_text())
    assert {finding[1] for finding in findings} == {"equal"}, findings
    assert {finding[0] for finding in findings} == {*COMPONENTS}

"""Faults that only a GPU run would show are shown by a rehearsal: each is put in by hand, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import on_null_cuda

CODE = """
import json, sys
from pathlib import Path
from unittest.mock import patch
from megatron_gvpo.rehearsal.world import FakeWorld

world = FakeWorld()
world.join(0, 2)
import torch
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.megatron import forward
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.rehearsal import made_model, stand_ins
from megatron_gvpo.rehearsal.nullcuda import counters
from megatron_gvpo.rehearsal.rank import RankJob, RankRun
from megatron_gvpo.rehearsal.recorder import PhaseRecorder

made_model.fill(Path(FILE).parent / "model")
stand_ins.install(made_weights=True)
config = load_config([FILE])
recorder = PhaseRecorder(world)
run = RankRun(config, RankJob([FILE], [], rank=0, world=2, micro_batches=2))
run.build(), run.score(), run.first_update()
result = {}

def waits():
    with recorder.phase("update"):
        run.second_update()
    return recorder.phases[-1].counts.get("host_waits", 0)

def error(work):
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

waits()
result["waits"] = waits()

states = forward.response_states
def reads_a_value(hidden, layer, batch):
    hidden[0, 0, 0].item()
    return states(hidden, layer, batch)
with patch.object(forward, "response_states", reads_a_value):
    result["waits with .item()"] = waits()

def on_the_host(hidden, layer, batch):
    return states(hidden, layer, batch).cpu()
with patch.object(forward, "response_states", on_the_host):
    result["wrong device"] = error(run.second_update)

def in_fp32(hidden, layer, batch):
    return states(hidden, layer, batch).float()
with patch.object(forward, "response_states", in_fp32):
    result["wrong dtype"] = error(run.second_update)

def too_wide(hidden, layer, batch):
    return torch.cat([states(hidden, layer, batch)] * 2, dim=1)
with patch.object(forward, "response_states", too_wide):
    result["wrong shape"] = error(run.second_update)

with patch.object(run.policy.model.config, "sequence_parallel", None), patch.object(forward, "device", None):
    result["missing attribute"] = error(run.second_update)

hoard = []
def keeps_memory(hidden, layer, batch):
    hoard.append(torch.empty(7 * 2**30, dtype=torch.uint8, device="cuda"))
    return states(hidden, layer, batch)
with patch.object(forward, "response_states", keeps_memory), recorder.phase("full"):
    run.second_update()
result["out of memory"] = recorder.phases[-1].out_of_memory
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = on_null_cuda.write_model(tmp_path_factory.mktemp("faults"))
    values: dict[str, Any] = on_null_cuda.run_code(f"FILE = {str(file)!r}\n{CODE}")
    return values


def test_a_host_wait_in_every_micro_batch_is_counted(report: dict[str, Any]) -> None:
    passes = 2 * 2  # micro-batches of the scoring pass and of the update itself, which the second update has
    assert report["waits with .item()"] - report["waits"] == passes


def test_a_tensor_on_the_wrong_device(report: dict[str, Any]) -> None:
    assert "Expected all tensors to be on the same device" in report["wrong device"]


def test_a_tensor_of_the_wrong_dtype(report: dict[str, Any]) -> None:
    assert "hidden_rh is torch.float32 and weight_vh torch.bfloat16" in report["wrong dtype"]


def test_a_tensor_of_the_wrong_shape(report: dict[str, Any]) -> None:
    assert "hidden_rh [384, 512] and weight_vh [1024, 256]" in report["wrong shape"]


def test_a_missing_attribute(report: dict[str, Any]) -> None:
    assert "'NoneType' object is not callable" in report["missing attribute"]


def test_memory_that_grows_until_there_is_none(report: dict[str, Any]) -> None:
    assert report["out of memory"].startswith("CUDA out of memory. Tried to allocate 7.00 GiB")


def test_the_command_shows_it_and_says_what_to_change(tmp_path: Path) -> None:
    file = on_null_cuda.write_model(tmp_path)
    tokens = "train.max_tokens_per_micro_batch=262144"
    result = on_null_cuda.rehearse(str(file), tokens, "--world", "2", "--memory", "3", code=1)
    assert not result["fits"]
    assert "runs out of memory in the phase" in result["verdict"] and "Tried to allocate" in result["verdict"]
    assert "train.max_tokens_per_micro_batch=131072 in place of 262144" in result["verdict"]

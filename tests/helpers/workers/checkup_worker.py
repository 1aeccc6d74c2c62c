"""Rank function of test_checkup.py: one rank differs on purpose."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_gvpo.cluster import checkup
from megatron_gvpo.planner import workload

ODD = 2


def run(out: str, faults: str) -> None:
    for fault in faults.split(","):
        with pytest.MonkeyPatch.context() as patch:
            outcome = _with(fault, Path(out), patch)
        (Path(out) / f"{fault}-{dist.get_rank()}.json").write_text(json.dumps(outcome))


def _with(fault: str, out: Path, patch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    odd = dist.get_rank() == ODD
    directory = out / "shared"
    directory.mkdir(exist_ok=True)
    dist.barrier()
    if fault == "files":
        patch.setattr(checkup, "PATIENCE", 2.0)
    if odd and fault == "files":
        directory = out / "its own"
        directory.mkdir()
    if fault != "expected":  # without a fault, too, ranks on a busy machine's cores differ
        patch.setattr(checkup, "SLOW", 0.2 if fault == "slow" else 0.02)
        patch.setattr(checkup, "SKEW", 60.0)
    if fault == "slow":
        patch.setattr(checkup, "REPEATS", 3)
    if odd and fault == "slow":
        send = dist.send

        def slowly(*arguments):
            time.sleep(1.0)
            send(*arguments)

        patch.setattr(dist, "send", slowly)
    if odd and fault == "version":
        patch.setattr(checkup, "find_version", lambda name: "0.0" if name == "torch" else None)
    if odd and fault == "clock":
        real = time.time
        patch.setattr(time, "time", lambda: real() + 3600)
    urls = ["http://127.0.0.1:9"] if odd and fault == "engine" else []
    gpu = workload.gpu("b200") if fault == "expected" else None
    return checkup.checkup(directory, urls, gpu)

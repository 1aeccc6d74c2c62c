"""A trainer on emulated GPUs pushes its weights to a server on the same GPUs: the path of a GPU cluster.

The trainer's side, CUDA IPC, NCCL's calls, the plugins and the engines' functions that receive and load
weights are the real ones, with values; the server's model is parameters alone, and requests go by pipes in
place of HTTP.
"""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases.gradient_cases import STEPS, sampled_for
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.servers.real_servers import engine_python
from helpers.suite.selected import selected
from helpers.workers.emulated_push_worker import PUSHES, RANKS, Push
from helpers.workers.gradient_worker import Case, Layout
from safetensors.torch import load_file

_SP = {"tp": 2, "sequence_parallel": True}
_DENSE, _MIXTURE = "gvpo, groups split", "qwen3_moe, gvpo, groups split"
_LAYOUTS = [
    *((Layout(2, **_SP), _DENSE), (Layout(2, pp=2), _DENSE)),
    *((Layout(2, ep=2), _MIXTURE), (Layout(4, **_SP, pp=2), _DENSE)),
]
QUICK = [
    Push(Layout(2, **_SP), engine, transport, _DENSE)
    for engine, transport in (
        ("sglang", "colocated"),
        ("sglang", "broadcast"),
        ("sglang", "delta"),
        ("vllm", "sharded"),
    )
]
PROOF = [
    push
    for engine in ("sglang", "vllm")
    for transport in ("colocated", "shared", "sharded", "broadcast", "delta")
    for layout, model in _LAYOUTS
    if (push := Push(layout, engine, transport, model)) not in QUICK
]
each_push = pytest.mark.parametrize(
    "push",
    [
        *(pytest.param(push, id=str(push)) for push in QUICK),
        *(pytest.param(push, id=str(push), marks=pytest.mark.proof) for push in PROOF),
    ],
)


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all pushes that tests need."""
    path = tmp_path_factory.mktemp("pushes")
    reference.save_models(path)
    work = []
    for push in selected(request, "push"):
        step = STEPS[push.model]
        rows, *_ = sampled_for(step, path)
        case = Case(push.model, step.algorithm, rows, step.budget, model=step.model)
        work.append((push, _site_packages(push.engine), case))
    torch.save(work, path / "work.pt")
    ranks = [push.layout.ranks for push, *_ in work]
    launch(
        "helpers.workers.emulated_push_worker:run", ranks, str(path), timeout=300 * len(work), emulated=True
    )
    return path


@functools.cache
def _site_packages(engine: str) -> str:
    """The folder of the packages in an engine's environment."""
    command = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.check_output([engine_python(engine), "-c", command], text=True, timeout=60).strip()


@each_push
def test_each_rank_of_the_server_has_its_part_of_the_policys_weights(directory: Path, push: Push) -> None:
    out = directory / str(push)
    policies = [load_file(out / f"policy-{version}") for version in range(PUSHES)]
    for version, policy in enumerate(policies):
        for rank in range(RANKS):
            served = load_file(out / f"served-{version}-{rank}")
            assert served.keys() == policy.keys()
            for name, weight in policy.items():
                is_divided = weight.ndim > 1 and len(weight) % RANKS == 0
                part = weight.chunk(RANKS)[rank] if is_divided else weight
                assert torch.equal(served[name], part), f"{name} of rank {rank} after push {version}"
    assert all(
        not torch.equal(policies[0][name], weight) for name, weight in policies[1].items() if weight.any()
    )


@each_push
def test_weights_went_the_transports_way(directory: Path, push: Push) -> None:
    metrics: dict[str, Any] = json.loads((directory / str(push) / "metrics-1.json").read_text())
    if push.transport == "shared":
        assert metrics["sync/ipc"] == 1.0
    elif push.transport == "delta":
        assert 0 < metrics["sync/changed"] < 0.2
    elif push.transport != "broadcast":
        assert metrics["sync/most_sent"] > 0

"""A trainer on emulated GPUs pushes its weights to a server on the same GPUs: the path of a GPU cluster.

The trainer's side, CUDA IPC, NCCL's calls and SGLang's plugin are the real ones, with values; the server's
model is parameters alone, and orders go by pipes in place of HTTP.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import on_null_cuda
from helpers.cases.gradient_cases import STEPS, sampled_for
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.suite.selected import selected
from helpers.workers.emulated_push_worker import PUSHES, RANKS
from helpers.workers.gradient_worker import Case, Layout
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs")

_SP = {"tp": 2, "sequence_parallel": True}
_DENSE, _MIXTURE = "gvpo, groups split", "qwen3_moe, gvpo, groups split"
_LAYOUTS = [
    *((Layout(2, **_SP), _DENSE), (Layout(2, pp=2), _DENSE)),
    *((Layout(2, ep=2), _MIXTURE), (Layout(4, **_SP, pp=2), _DENSE)),
]
QUICK = (Layout(2, **_SP), "colocated", _DENSE)
PROOF = [
    (layout, transport, model)
    for transport in ("colocated", "shared", "sharded")
    for layout, model in _LAYOUTS
    if (layout, transport, model) != QUICK
]
each_push = pytest.mark.parametrize(
    ("layout", "transport", "model"),
    [
        pytest.param(*QUICK, id=f"{QUICK[1]}, {QUICK[0]}"),
        *(pytest.param(*push, id=f"{push[1]}, {push[0]}", marks=pytest.mark.proof) for push in PROOF),
    ],
)


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all pushes that tests need."""
    path = tmp_path_factory.mktemp("pushes")
    reference.save_models(path)
    work = []
    for layout, transport, name in selected(request, "layout", "transport", "model"):
        step = STEPS[name]
        rows, *_ = sampled_for(step, path)
        work.append((layout, transport, Case(name, step.algorithm, rows, step.budget, model=step.model)))
    torch.save(work, path / "work.pt")
    ranks = [layout.ranks for layout, *_ in work]
    launch(
        "helpers.workers.emulated_push_worker:run", ranks, str(path), timeout=300 * len(work), emulated=True
    )
    return path


@each_push
def test_each_rank_of_the_server_has_its_part_of_the_policys_weights(
    directory: Path, layout: Layout, transport: str, model: str
) -> None:
    out = directory / f"{layout}-{transport}"
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
def test_ranks_map_the_memory_of_the_trainers_gpus(
    directory: Path, layout: Layout, transport: str, model: str
) -> None:
    metrics: dict[str, Any] = json.loads((directory / f"{layout}-{transport}" / "metrics-1.json").read_text())
    if transport == "shared":
        assert metrics["sync/ipc"] == 1.0
    else:
        assert metrics["sync/most_sent"] > 0

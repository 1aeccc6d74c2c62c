"""Updates and scores leave no activations behind, on real megatron-core models (megatron/model/model.py).

All memory that an operation takes is followed until it is freed, also what only autograd's graph holds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.cases.gradient_cases import SPLIT, STEPS, sampled_for
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.workers.gradient_worker import Case, Layout

from megatron_gvpo.megatron.model.model import _drop_routing

LEAST = 1024  # bytes: columns of rows, and numbers that Megatron keeps
EXPERTS, LATENT, DENSE = (
    "qwen3_moe, gvpo, replayed",
    "deepseek_v3, gvpo, groups split",
    "gvpo, groups split",
)
RUNS = [
    (Layout(1), EXPERTS),
    (Layout(1, recompute="selective", recompute_modules=("core_attn", "mlp")), EXPERTS),
    (Layout(1, recompute="full"), EXPERTS),
    (Layout(1, recompute="full"), LATENT),
    (Layout(1, recompute="full"), DENSE),
    (Layout(2, ep=2, recompute="full"), EXPERTS),
    (Layout(2, pp=2), DENSE),
    (Layout(2, pp=2, vpp=2, recompute="full"), EXPERTS),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("leftovers")
    reference.save_models(directory, {STEPS[name].model for _, name in RUNS})
    work = []
    for layout, name in RUNS:
        rows, *_ = sampled_for(STEPS[name], directory)
        work.append((layout, Case(name, STEPS[name].algorithm, rows, SPLIT, model=STEPS[name].model)))
    torch.save(work, directory / "work.pt")
    launch("helpers.workers.leftovers_worker:run", [layout.ranks for layout, _ in RUNS], str(directory))
    return directory


@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{name}, {layout}" for layout, name in RUNS])
def test_no_activation_outlives_its_pass(measured: Path, number: int) -> None:
    layout, _ = RUNS[number]
    for rank in range(layout.ranks):
        remaining = torch.load(measured / f"{number}-{rank}.pt", weights_only=False)
        assert remaining["peak"] > 50 * LEAST, "the passes were followed"
        print(remaining)
        assert remaining["update"] < LEAST and remaining["score"] < LEAST, remaining


def test_attributes_inside_of_other_objects_are_dropped() -> None:
    """Dispatchers with a communication library of their own name them by a path."""

    class Inside:
        token_probs = torch.ones(2)

    class Dispatcher:
        cudagraph_attrs = ("probs", "_comm_manager.token_probs")
        probs, _comm_manager = torch.ones(2), Inside()

    dispatcher = Dispatcher()
    _drop_routing(dispatcher)
    assert dispatcher.probs is None and dispatcher._comm_manager.token_probs is None

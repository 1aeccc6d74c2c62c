"""Megatron's offloading of activations by modules, as our passes through its schedule use it.

There is no GPU: activations move from the CPU to the CPU, and the originals' memory is freed. Everything else
of Megatron's machinery is real, including its plan from the first pass
(megatron/model/settings.py). The tests do not cover the tensors that Transformer Engine keeps
itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.cases.gradient_cases import SPLIT, STEPS, sampled_for
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.workers.gradient_worker import UPDATE, Case, Layout

LAYOUTS = [Layout(1), Layout(2, pp=2), Layout(2, pp=2, vpp=2)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("offloaded")
    reference.save_models(directory)
    rows, *_ = sampled_for(STEPS["gvpo, groups split"], directory)
    case = Case("gvpo", STEPS["gvpo, groups split"].algorithm, rows, SPLIT)
    torch.save([(layout, case) for layout in LAYOUTS], directory / "work.pt")
    launch("helpers.workers.offload_worker:run", [layout.ranks for layout in LAYOUTS], str(directory))
    return directory


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_run_with_offloaded_activations_is_the_run_without(results: Path, layout: Layout) -> None:
    """A scoring pass precedes updates with more and with fewer micro-batches than before, in other shapes."""
    without_offload, moved = (
        torch.load(results / f"{layout}-{name}.pt", weights_only=False) for name in ("kept", "moved")
    )
    assert not without_offload["moved_bytes"] and all(moved["moved_bytes"]), "by every update"
    assert moved["left_bytes"] == 0, "no buffer stays for the next"
    for name in ("scores", "losses", "grad_norms"):
        for got, wanted in zip(moved[name], without_offload[name], strict=True):
            # What comes back is contiguous, and may be multiplied in another order.
            torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(wanted), rtol=1e-5, atol=1e-5)
    for name, weight in without_offload["weights"].items():
        assert (moved["weights"][name] - weight).abs().max() < 1e-2 * UPDATE["lr"], name

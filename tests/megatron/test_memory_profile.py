"""Peak memory by part: storages counted exactly, the rest compared with allocations made by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.cases.gradient_cases import make_rows
from helpers.references import gradient_reference as reference
from helpers.references.transformer_engine_source import loaded
from helpers.workers.gradient_worker import Case, Layout, config_of

from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.memory_profile import _CPU, GIB, MemoryProfile
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.observe import memory_report

MB = 1 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("memory_profile")
    reference.save_models(path)
    yield path
    parallel.shut_down()


def test_the_meter_follows_what_lives_and_what_was() -> None:
    known = torch.zeros(4 * MB)
    with _CPU([known]) as meter:
        known.view(-1).add_(1)  # no memory of its own
        a = torch.zeros(MB)
        b = (a + 1).view(2, -1)  # a view shares its memory
        assert (meter.level, meter.peak) == (8 * MB, 8 * MB)
        del a
        assert (meter.level, meter.peak) == (4 * MB, 8 * MB)
        meter.restart()
        b += 1
        assert (meter.level, meter.peak) == (4 * MB, 4 * MB)
        (b * 2).sum()
        assert meter.peak == pytest.approx(8 * MB, abs=64)
        del b
    assert meter.level == 0


def test_the_meter_follows_a_backward_pass() -> None:
    """exp keeps its output: five in a row keep five, and the backward needs one gradient more."""
    x = torch.zeros(MB, requires_grad=True)
    with _CPU([x]) as meter:
        y = x
        for _ in range(5):
            y = y.exp()
        assert meter.level == 20 * MB
        torch.autograd.grad(y, x, torch.ones_like(y))
        assert 24 * MB <= meter.peak <= 36 * MB


def test_fp8_weights_count_by_their_parts() -> None:
    """Transformer Engine's own Float8Tensor, from its Python source: its parts are in other tensors."""
    with loaded(
        "pytorch/constants.py",
        "pytorch/tensor/_quantization_helpers.py",
        "pytorch/quantized_tensor.py",
        "pytorch/tensor/storage/float8_tensor_storage.py",
        "pytorch/tensor/float8_tensor.py",
    ) as module:
        buffer = torch.zeros(2 * MB, dtype=torch.uint8)  # of all parameters, as Megatron's has it

        def weight(data: torch.Tensor, transposed: torch.Tensor | None) -> torch.nn.Parameter:
            size = {"shape": (1024, 1024), "dtype": torch.bfloat16, "device": "cpu"}
            parts = {"data": data.view(1024, 1024), "fp8_scale_inv": torch.ones(1), "fp8_dtype": 7}
            return torch.nn.Parameter(module.Float8Tensor(**size, **parts, data_transpose=transposed))

        copy = torch.zeros(MB, dtype=torch.uint8).view(1024, 1024)
        weights = [weight(buffer[:MB], copy), weight(buffer[MB:], None), torch.nn.Parameter(torch.zeros(8))]
        assert not weights[0].untyped_storage().nbytes(), "why its parts must be looked at"
        model = SimpleNamespace(weights=lambda: weights, gradient_buffers=lambda: [])
        optimizer = SimpleNamespace(tensors=lambda: [], host_tensors=lambda: [], host_bytes=0)
        assert MemoryProfile((model, optimizer)).parts()["weights"] == 3 * MB + 2 * 4 + 32


def measured(
    directory: Path, groups: list[Any], recompute: str = "none", offload: float = 0.0
) -> dict[str, float]:
    case = Case("gvpo", {"recipe": "gvpo"}, make_rows(groups), 100_000)
    policy = Policy.of(config_of(case, Layout(1, recompute=recompute, offload=offload), directory))
    memory = policy.update(case.rows, at_step_start=True).memory
    assert policy.update(case.rows, at_step_start=True).memory == {}, "of the first update only"
    parameters = [p.nbytes for p in policy.model.weights()]
    assert memory["memory/weights_gib"] == pytest.approx(sum(parameters) / GIB, rel=0.02), "and padding"
    assert memory["memory/optimizer_gib"] == pytest.approx(
        (1 - offload) * 2 * sum(parameters) / GIB, rel=0.02, abs=1e-7
    ), "two moments"
    assert memory["memory/gradients_gib"] == pytest.approx(sum(parameters) / GIB, rel=0.02), "and padding"
    parallel.shut_down()
    return memory


def test_parts_of_an_update(directory: Path) -> None:
    few, many = ([(8, [(40, 1.0), (40, 0.0)])] * n for n in (2, 4))
    single, double = measured(directory, few), measured(directory, many)
    again, hosted = measured(directory, many, recompute="full"), measured(directory, many, offload=1.0)
    weights = hosted["memory/weights_gib"]
    assert hosted["memory/host_optimizer_gib"] == pytest.approx(4 * weights, rel=0.02), "and the gradients"
    assert hosted["memory/peak_gib"] == pytest.approx(double["memory/peak_gib"] - 2 * weights, rel=0.02)
    for name in ("weights", "gradients", "optimizer"):
        assert single[f"memory/{name}_gib"] == double[f"memory/{name}_gib"]
    assert double["memory/activations_gib"] == pytest.approx(2 * single["memory/activations_gib"], rel=0.25)
    assert again["memory/activations_gib"] < 0.6 * double["memory/activations_gib"]
    tokens, vocabulary = 8 * 40, reference.VOCABULARY
    assert double["memory/head_gib"] * GIB >= 4 * tokens * vocabulary, "a tile of logits, here of all"
    resident = sum(double[f"memory/{name}_gib"] for name in ("weights", "gradients", "optimizer"))
    of_update = double["memory/peak_gib"] - resident
    assert double["memory/activations_gib"] <= of_update
    assert of_update <= double["memory/activations_gib"] + double["memory/head_gib"]
    table = memory_report(double).splitlines()
    assert [line.split()[0] for line in table[1:]] == [
        *("weights", "gradients", "optimizer", "activations", "head", "peak")
    ]
    assert memory_report({"loss": 1.0}) == ""

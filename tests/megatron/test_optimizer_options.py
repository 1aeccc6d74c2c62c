"""Every option of the optimizer changes the weights that Megatron's optimizer gives a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.options import small_run
from helpers.options.other_values import changed, options_of
from helpers.suite.real_parts import used
from torch import Tensor

from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.model.build import build
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.optimizer import Optimizer
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig, OptimizerConfig

UPDATES = 4
NO_EFFECT = {
    "OptimizerConfig.offload_fraction": "where masters and moments are kept, which changes no number"
}
BESIDE = {"min_lr": {"decay": "linear"}, "decay": {"warmup_steps": 1}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("options")
    small_run.make(path)
    yield path
    parallel.shut_down()


def updated(model: Model, before: list[Tensor], settings: ModelConfig, options: OptimizerConfig) -> Tensor:
    """The weights after a few updates with made-up gradients."""
    weights = [weight for chunk in model.chunks for weight in chunk.parameters()]
    with torch.no_grad():
        for weight, value in zip(weights, before, strict=True):
            weight.copy_(value)
    optimizer = Optimizer(model, options, settings, UPDATES)
    for number in range(UPDATES):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(number)
        for buffer in model.buffers():
            buffer.grad_data.copy_(torch.randn(buffer.grad_data.shape, generator=generator))
        optimizer.apply()
    return torch.cat([weight.detach().flatten().clone() for weight in weights])


@pytest.mark.parametrize("muon", [None, {}], ids=["adamw", "muon"])
def test_every_option_of_the_optimizer_has_an_effect(muon: dict[str, float] | None, directory: Path) -> None:
    settings = ModelConfig(path=str(directory / "model"), dtype="float32")
    parallel.initialize(ParallelConfig(), 0)
    model = build(settings, ParallelConfig(), muon=muon is not None)
    used("megatron-core and Megatron-Bridge, 1 rank")
    before = [weight.detach().clone() for chunk in model.chunks for weight in chunk.parameters()]
    after = partial(updated, model, before, settings)
    values = {"lr": 0.01, "muon": muon}
    idle = []
    for option in options_of(OptimizerConfig(**values)):
        if option.label in NO_EFFECT or option.name == "muon":
            continue
        around = OptimizerConfig(**values | BESIDE.get(option.name, {}))
        base = after(around)
        assert option.others, (
            f"{option.label}: helpers/options/other_values.py has no other value of its type"
        )
        others = (changed(around.model_dump(), option.path, value) for value in option.others)
        if all(torch.equal(base, after(OptimizerConfig(**other))) for other in others):
            idle.append(option.label)
    assert not idle, f"options without an effect: {idle}"

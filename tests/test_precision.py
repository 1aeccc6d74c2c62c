"""Padding, FP8 as Megatron would be told, and bf16 with fp32 masters, on the real classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradient_reference as reference
import pytest
import torch
from gradient_cases import STEPS, sampled_for
from gradient_worker import Case, Layout, config_of

from megatron_gvpo.config import Config, ConfigError, FP8Config, ModelConfig, ParallelConfig, build_config
from megatron_gvpo.layout import Padding


@pytest.mark.parametrize(
    ("fp8", "parallel", "sequence", "pack"),
    [
        (None, {}, 1, 1),
        (None, {"tp": 4}, 1, 1),
        (None, {"tp": 4, "sequence_parallel": True}, 1, 4),
        (None, {"cp": 2}, 4, 4),
        (None, {"cp": 4, "tp": 2, "sequence_parallel": True}, 8, 8),
        (None, {"cp": 2, "tp": 3, "sequence_parallel": True}, 4, 12),
        ("tensorwise", {}, 1, 16),
        ("delayed", {"cp": 2}, 4, 32),
        ("mxfp8", {"tp": 2, "sequence_parallel": True}, 1, 64),
        ("blockwise", {"cp": 2, "tp": 2, "sequence_parallel": True}, 4, 512),
    ],
)
def test_padding(fp8: str | None, parallel: dict[str, Any], sequence: int, pack: int) -> None:
    """Sequences: 2 chunks a context-parallel rank. Packs: what leaves every rank's shard whole FP8 blocks."""
    model = ModelConfig(path="unused", fp8=None if fp8 is None else FP8Config(recipe=fp8))
    assert Padding.of(model, ParallelConfig(**parallel)) == Padding(sequence, pack)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("precision")
    reference.save_models(path)
    return path


@pytest.fixture
def group() -> Iterator[None]:
    from megatron_gvpo.megatron import parallel

    parallel.initialize(ParallelConfig(), seed=0)
    yield
    parallel.shut_down()


@pytest.mark.parametrize(
    ("fp8", "wanted"),
    [
        (
            {"recipe": "delayed", "weights": True},
            {"fp8": "hybrid", "fp8_param": True, "fp8_amax_history_len": 1024},
        ),
        (
            {"recipe": "tensorwise", "bf16_layers": 1},
            {"fp8": "hybrid", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 1},
        ),
        ({"recipe": "blockwise"}, {"fp8": "e4m3", "fp8_param": False, "first_last_layers_bf16": False}),
        ({"recipe": "mxfp8"}, {"fp8": "e4m3", "fp8_recipe": "mxfp8"}),
    ],
)
def test_fp8_is_built_checked_and_refused_on_cpu(
    group: None, directory: Path, monkeypatch: pytest.MonkeyPatch, fp8: dict[str, Any], wanted: dict[str, Any]
) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gvpo.megatron.model import build

    built: list[Any] = []
    check = TransformerConfig.__post_init__
    monkeypatch.setattr(
        TransformerConfig, "__post_init__", lambda config: (check(config), built.append(config))[0]
    )
    model = ModelConfig(path=str(directory / "untied"), fp8=FP8Config(**fp8))
    with pytest.raises(ConfigError, match=r"FP8 needs a GPU .*; Megatron accepts the configuration"):
        build(model, ParallelConfig())
    assert {name: getattr(built[-1], name) for name in wanted} == wanted
    assert built[-1].bf16 and built[-1].fp8_recipe == fp8["recipe"]


def test_offloaded_activations_are_built_checked_and_refused_on_cpu(
    group: None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gvpo.megatron.model import build

    built: list[Any] = []
    check = TransformerConfig.__post_init__
    monkeypatch.setattr(
        TransformerConfig, "__post_init__", lambda config: (check(config), built.append(config))[0]
    )
    with pytest.raises(ConfigError, match=r"offload_layers=2: .* no GPU here; Megatron accepts"):
        build(ModelConfig(path=str(directory / "untied")), ParallelConfig(offload_layers=2))
    assert built[-1].cpu_offloading and built[-1].cpu_offloading_num_layers == 2
    assert built[-1].cpu_offloading_activations and not built[-1].cpu_offloading_weights


def test_what_only_transformer_engine_recomputes_is_refused_on_cpu(group: None, directory: Path) -> None:
    from megatron_gvpo.megatron.model import build

    layout = ParallelConfig(recompute="selective", recompute_modules=("mlp", "layernorm"))
    with pytest.raises(ConfigError, match=r"recompute_modules=\['layernorm'\]: .* on a GPU"):
        build(ModelConfig(path=str(directory / "untied")), layout)


def test_what_megatron_refuses_is_said(group: None, directory: Path) -> None:
    from megatron_gvpo.megatron.model import build

    fp8 = FP8Config(recipe="tensorwise", bf16_layers=1)
    wrong = ParallelConfig().model_copy(update={"recompute": "full", "tp": 3})
    with pytest.raises(ConfigError, match="Megatron refuses the configuration of model and parallel: "):
        build(ModelConfig(path=str(directory / "untied"), fp8=fp8), wrong)


def test_bf16_keeps_masters_gradients_and_log_probs_in_fp32(directory: Path) -> None:
    from megatron_gvpo.megatron import parallel
    from megatron_gvpo.megatron.policy import Policy

    name = "gvpo, groups split"
    rows, logp, _ = sampled_for(STEPS[name], directory)
    case = Case(name, STEPS[name].algorithm, rows, STEPS[name].budget)
    values = config_of(case, Layout(1), directory).model_dump()
    values["model"]["dtype"] = "bfloat16"
    config: Config = build_config(values)
    policy = Policy(config)
    try:
        scored = policy.score(rows)
        assert scored.dtype == torch.float32
        difference = (scored - torch.cat(logp).detach()).abs()
        assert 1e-4 < difference.mean() < 0.05, "bf16, and not far from fp64"

        parameters = [p for chunk in policy.model.chunks for p in chunk.parameters()]
        assert {p.dtype for p in parameters} == {torch.bfloat16}
        assert {p.main_grad.dtype for p in parameters} == {torch.float32}
        (inner,) = policy.optimizer.megatron.chained_optimizers
        masters = [p for group in inner.optimizer.param_groups for p in group["params"]]
        assert {p.dtype for p in masters} == {torch.float32}
        # A small step is lost in bf16 weights, and kept by their masters.
        before = [master.clone() for master in masters]
        policy.update(rows, at_step_start=False)
        moved = [(m - b).abs().max().item() for m, b in zip(masters, before, strict=True)]
        assert all(0 < m <= 1.2 * config.optimizer.lr for m in moved)
    finally:
        parallel.shut_down()

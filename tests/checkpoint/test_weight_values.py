"""Weights that are not finite, or not what was saved, are refused by tensor and file on every load."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_gvpo.cli import main
from megatron_gvpo.huggingface.checked_weights import HEADER

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that this program has written."""
    directory = tmp_path_factory.mktemp("models")
    reference.save_models(directory)
    converted, back = str(directory / "there"), str(directory / "back")
    assert main(["convert", str(directory / "untied"), converted]) == 0
    assert main(["convert", converted, back, "--like", str(directory / "untied")]) == 0
    return Path(back)


def changed(source: Path, target: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a model with other tensors, and without checksums."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [UP, "model.norm.weight", "model.layers.3.self_attn.q_proj.bias"])
def test_values_that_are_not_finite(
    exported: Path, tmp_path: Path, capsys: Any, name: str, value: float
) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    model = changed(exported, tmp_path / "model", spoil)
    assert main(["convert", str(model), str(tmp_path / "there")]) == 2
    error = capsys.readouterr().err
    assert (
        error == f"error: SOURCE={model}: {name} in model.safetensors has values that are NaN or infinite\n"
    )
    assert not (tmp_path / "there").exists()


def test_zeros_of_a_download_that_broke_off(
    exported: Path, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An embedding of zeros is refused, a layer of them is told; projections and norms of zeros are sound."""
    names = load_file(exported / "model.safetensors")

    def convert(step: str, *parts: str) -> int:
        def spoil(tensors: dict[str, Tensor]) -> None:
            for name in names:
                if any(part in name for part in parts):
                    tensors[name].zero_()

        model = changed(exported, tmp_path / step, spoil)
        return main(["convert", str(model), str(tmp_path / f"{step}_there")])

    assert convert("embedding", "embed_tokens") == 2
    assert "model.embed_tokens.weight in model.safetensors is zero throughout" in capsys.readouterr().err
    assert convert("projections", "o_proj", "down_proj", "lm_head", "bias", "norm") == 0
    assert not caplog.messages
    assert convert("layers", "layers.1.", "layers.2.") == 0
    (warning,) = caplog.messages
    assert "all matrices of model.layers.1, model.layers.2 (2 of 4 layers) are zero" in warning


def test_what_is_exported_has_checksums(exported: Path, tmp_path: Path, capsys: Any) -> None:
    file = exported / "model.safetensors"
    with safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()[HEADER]).keys() == set(opened.keys())
    content = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    assert list(json.loads(content[8:begin])["__metadata__"]) == ["format", HEADER]  # never in random order
    for offset in (begin, begin + (len(content) - begin) // 2, len(content) - 1):
        model = tmp_path / str(offset)
        shutil.copytree(exported, model)
        spoilt = bytearray(content)
        spoilt[offset] ^= 1
        (model / file.name).write_bytes(spoilt)
        assert main(["convert", str(model), str(tmp_path / "there")]) == 2
        error = capsys.readouterr().err
        assert "in model.safetensors is not what was saved (another checksum)" in error
        assert error.count("\n") == 1
    assert main(["convert", str(exported), str(tmp_path / "there")]) == 0


def build_two(directory: str) -> None:
    """On two ranks of a pipeline: the second holds the tensor that is not finite. Both raise."""
    from megatron_gvpo.core.errors import ConfigError
    from megatron_gvpo.megatron import parallel
    from megatron_gvpo.megatron.model.build import build
    from megatron_gvpo.settings.parallel import ParallelConfig
    from megatron_gvpo.settings.sections import ModelConfig

    layout = ParallelConfig(pp=2)
    parallel.initialize(layout, seed=0)
    with pytest.raises(ConfigError, match=r"layers\.3.* NaN or infinite \(on rank 1\)"):
        build(ModelConfig(path=directory), layout, trained=False)


def test_a_rank_that_finds_it_does_not_fail_alone(exported: Path, tmp_path: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.3.mlp.up_proj.weight"][0, 0] = torch.nan

    model = changed(exported, tmp_path / "model", spoil)
    launch("test_weight_values:build_two", [2], str(model), timeout=240)

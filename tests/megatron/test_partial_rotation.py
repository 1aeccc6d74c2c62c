"""Models that rotate a part of every head: the part is the one that transformers takes from config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from helpers.cases.families import FAMILIES, Family

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.architectures import PARTLY_ROTATED, check_family
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.model.build import build
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import ModelConfig

PARTLY = [family for family in FAMILIES if family.architecture in PARTLY_ROTATED]


def saved(family: Family, directory: Path) -> transformers.PreTrainedModel:
    """A tiny model, saved as transformers 5 does: the rotated part is in `rope_parameters` alone."""
    tiny = {key: value for key, value in family.tiny.items() if key != "rotary_dim"}
    tiny.pop("partial_rotary_factor", None)
    tiny["rope_parameters"] = tiny["rope_parameters"] | {"partial_rotary_factor": 0.75}
    (directory / "config.json").write_text(json.dumps(tiny))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(directory))
    model.save_pretrained(directory)
    file = directory / "config.json"
    written = json.loads(file.read_text())
    written.pop("partial_rotary_factor", None)  # some classes also write their default, which they ignore
    file.write_text(json.dumps(written))
    return model


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            id=family.architecture,
            marks=() if family.architecture == "MiniMaxM2ForCausalLM" else pytest.mark.proof,
        )
        for family in PARTLY
    ],
)
def test_the_rotated_part_of_a_head_is_that_of_transformers(family: Family, tmp_path: Path) -> None:
    expected = saved(family, tmp_path).model.rotary_emb.inv_freq
    layout = ParallelConfig()
    parallel.initialize(layout, seed=0)
    try:
        model = build(ModelConfig(path=str(tmp_path), dtype="float32"), layout, trained=False)
    finally:
        parallel.shut_down()
    [rotary] = model.rotary
    torch.testing.assert_close(rotary.inv_freq.float().cpu(), expected)


def test_every_family_that_rotates_a_part_is_compared() -> None:
    assert {family.architecture for family in PARTLY} == set(PARTLY_ROTATED)


@pytest.mark.parametrize("key", ["partial_rotary_factor", "rope_parameters"])
def test_a_rotated_part_that_megatron_bridge_ignores_is_refused(key: str) -> None:
    [family] = [family for family in FAMILIES if family.architecture == "OlmoeForCausalLM"]
    share = {"partial_rotary_factor": 0.5}
    rope = {"rope_parameters": family.tiny["rope_parameters"] | share}
    for factor in (1.0, None):
        check_family(family.tiny | {"partial_rotary_factor": factor}, "model.path=m")
    with pytest.raises(ConfigError, match=r"^model\.path=m: partial_rotary_factor=0\.5 of the rope in"):
        check_family(family.tiny | (share if key == "partial_rotary_factor" else rope), "model.path=m")

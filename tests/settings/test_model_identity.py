"""A config.json that names two models, Python files or quantised weights is refused before anything loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.architectures import ARCHITECTURES, MODEL_TYPES, check_trainable
from megatron_gvpo.megatron.model.megatron_bridge import open_bridge
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.settings.sections import ModelConfig

GOOD: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
}
OWN_CODE = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Qwen2ForCausalLM"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"architectures": ["LlamaForCausalLM"]},
        "model_type='qwen2' and architectures=LlamaForCausalLM .* of LlamaForCausalLM is llama",
    ),
    ({"model_type": "mine"}, "model_type='mine' and architectures=Qwen2ForCausalLM .* is qwen2"),
    ({"model_type": ["qwen2"]}, r"model_type=\['qwen2'\] and architectures=Qwen2ForCausalLM"),
    (
        {
            "model_type": "mine",
            "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Mine"},
        },
        r"auto_map in config.json names 'mine.Mine', a Python file .*\(model.trust_remote_code is",
    ),
    ({"auto_map": {"AutoModelForCausalLM": None}}, "auto_map in config.json names None"),
    (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        r"quantization_config \(quant_method 'gptq'\) in config.json, and training needs weights in bfloat16",
    ),
    ({"quantization_config": {}}, r"quantization_config \(quant_method None\)"),
    (
        {"architectures": ["Qwen2ForCausalLM", "LlamaForCausalLM"]},
        r"architectures in config.json names 2 models \(Qwen2ForCausalLM, LlamaForCausalLM\): leave the one",
    ),
    (
        {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_shared_experts": 2},
        "n_shared_experts=2 in config.json; .* builds Glm4MoeForCausalLM with n_shared_experts=1 only",
    ),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED)
def test_a_model_that_is_not_one_of_plain_weights_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.path=m: .*{words}") as refused:
        check_trainable(GOOD | changed, "model.path=m")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"quantization_config": None},
        {"auto_map": OWN_CODE},
        {"auto_map": {"AutoModelForCausalLM": "someone/repository--mine.Qwen2ForCausalLM"}},
        {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5"},
    ],
)
def test_a_model_of_transformers_own_is_accepted(changed: dict[str, Any]) -> None:
    architecture = (GOOD | changed)["architectures"][0]
    assert check_trainable(GOOD | changed, "model.path=m") == architecture


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_model_types_are_those_of_transformers(architecture: str) -> None:
    known = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()]
    assert set(MODEL_TYPES[architecture]) == {kind for kind, name in known if name == architecture}


def test_the_check_comes_before_anything_is_loaded(good: Path, task: Path, tmp_path: Path) -> None:
    """Fails on the old code, which found nothing to refuse here and went on to load the model."""
    model = tmp_path / "model"
    shutil.copytree(task / "model", model)
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(
        ConfigError, match=r"model\.path=.*model_type='qwen2' and architectures=LlamaForCausalLM"
    ):
        check_layout(load_config([good], [f"model.path={model}"]), 1)


def test_a_class_of_the_checkpoint_with_the_architectures_name_is_not_needed(tmp_path: Path) -> None:
    """Fails on the old code: "Model architecture 'Qwen2ForCausalLM' is not yet supported"."""
    (tmp_path / "config.json").write_text(json.dumps(GOOD | {"auto_map": OWN_CODE}))
    bridge = open_bridge(ModelConfig(path=str(tmp_path)))
    assert bridge.hf_pretrained.config.model_type == "qwen2"
    assert bridge.to_megatron_provider(load_weights=False).hidden_size == 64

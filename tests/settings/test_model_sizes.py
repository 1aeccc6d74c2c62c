"""Values of config.json that cannot be right are refused by name, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.architectures import check_family
from megatron_gvpo.huggingface.card import ModelCard

GOOD: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rms_norm_eps": 10**400}, "in config.json: expected a positive number"),
    ({"rope_parameters": {"rope_theta": 10**400}}, "in config.json: expected a positive number"),
    ({"num_attention_heads": 5}, "num_attention_heads=5 in config.json does not divide hidden_size=64"),
    (
        {"num_key_value_heads": 3},
        "num_key_value_heads=3 in config.json does not divide num_attention_heads=4",
    ),
    (
        {"num_key_value_heads": 8},
        "num_key_value_heads=8 in config.json does not divide num_attention_heads=4",
    ),
    ({"head_dim": 7}, "heads of 7 elements in config.json, which RoPE cannot halve"),
    ({"num_attention_heads": None}, "no num_attention_heads in config.json"),
    ({"hidden_size": None, "vocab_size": None}, "no hidden_size, vocab_size in config.json"),
    ({"num_hidden_layers": -1}, "num_hidden_layers=-1 in config.json: must be at least 1"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0 in config.json: must be at least 1"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True in config.json: expected a whole number"),
    ({"vocab_size": "100"}, "vocab_size='100' in config.json: expected a whole number"),
    ({"hidden_size": 64.0}, "hidden_size=64.0 in config.json: expected a whole number"),
    (
        {"hidden_size": 10**30},
        "hidden_size=1000000000000000000000000000000 in config.json: must be at most 1048576",
    ),
    ({"intermediate_size": [96]}, r"intermediate_size=\[96\] in config.json: expected a whole number"),
    ({"intermediate_size": "9" * 10**6}, "intermediate_size='9{39}... in config.json"),
    ({"rms_norm_eps": 0}, "rms_norm_eps=0 in config.json: expected a positive number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan in config.json: expected a positive number"),
    ({"rope_theta": "1e6"}, "rope_theta='1e6' in config.json: expected a positive number"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' in config.json: expected true or false"),
    ({"tie_word_embeddings": 0}, "tie_word_embeddings=0 in config.json: expected true or false"),
    ({"architectures": "Qwen2ForCausalLM"}, "architectures in config.json is not a list of names"),
    ({"architectures": [{}]}, "architectures in config.json is not a list of names"),
    ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 of 4 experts in config.json"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta=0 in config.json: expected a positive number"),
    ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta='x' in config.json: expected a positive number"),
    ({"rope_scaling": [1]}, "rope parameters in config.json are not an object"),
]


@pytest.mark.parametrize(("changed", "problem"), REFUSED)
def test_what_cannot_be_right_is_refused(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as refused:
        check_family(GOOD | changed, "model.path=m")
    assert str(refused.value).startswith("model.path=m: ") and len(str(refused.value)) < 200


HY3 = {"architectures": ["HYV3ForCausalLM"], "first_k_dense_replace": 1, "num_hidden_layers": 2}
K_EXAONE = {"architectures": ["ExaoneMoeForCausalLM"], "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (HY3 | {"first_k_dense_replace": None}, "no first_k_dense_replace in config.json, .* add"),
        (
            HY3 | {"first_k_dense_replace": 2},
            "first_k_dense_replace=2 in config.json; .* first_k_dense_replace=1 only",
        ),
        (HY3 | {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types .* the first 1 of 2 layers dense"),
        (K_EXAONE | {"is_moe_layer": [True] * 4}, "is_moe_layer .* the first 1 of 4 layers dense"),
        (K_EXAONE | {"sliding_window_pattern": "LG"}, "sliding_window_pattern='LG' in config.json"),
        (
            {"architectures": ["Exaone4ForCausalLM"]},
            "tie_word_embeddings=False .* tie_word_embeddings=True only",
        ),
        (
            {"architectures": ["Exaone4ForCausalLM"], "tie_word_embeddings": True},
            "no sliding_window in config.json, .* null only",
        ),
        ({"architectures": ["GemmaForCausalLM"], "hidden_act": "silu"}, "hidden_act=silu in config.json"),
    ],
)
def test_what_megatron_bridge_would_build_otherwise_is_refused(changed: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_family(GOOD | changed, "model.path=m")


def test_layers_without_experts_are_those_of_transformers() -> None:
    sparse = {"mlp_layer_types": ["dense", "sparse"]}
    check_family(GOOD | HY3 | sparse, "m")
    check_family(GOOD | K_EXAONE | {"sliding_window_pattern": "LLLG"}, "m")
    models = (K_EXAONE, GOOD, GOOD | {"first_k_dense_replace": 3})
    assert [ModelCard(model).dense_layers for model in models] == [1, 0, 3]


def test_what_models_say_is_accepted() -> None:
    check_family(GOOD, "model.path=m")
    gemma = {"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "tie_word_embeddings": True}
    check_family(GOOD | gemma, "m")
    exaone = {"architectures": ["Exaone4ForCausalLM"], "tie_word_embeddings": True, "sliding_window": None}
    check_family(GOOD | exaone | {"sliding_window_pattern": None}, "m")
    check_family(GOOD | {"head_dim": 32, "num_attention_heads": 5, "num_key_value_heads": 1}, "m")
    check_family(GOOD | {"sliding_window": None, "num_key_value_heads": None, "max_window_layers": 0}, "m")
    check_family(GOOD | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": None}, "m")


def test_a_card_says_what_follows_from_config_json(tmp_path: Path) -> None:
    language = GOOD | {"sliding_window": 8, "num_local_experts": 4, "kv_lora_rank": 16}
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": language}))
    card = ModelCard.read(tmp_path)
    assert (card["hidden_size"], card.experts, card.is_mla, card.window) == (64, 4, True, 8)
    assert ModelCard(card | {"use_sliding_window": False}).window is None
    assert ModelCard(GOOD).window is None and not ModelCard(GOOD).is_mla and ModelCard({}).architectures == []
    card.check_values("m")
    with pytest.raises(ConfigError, match=r"^teacher\.path=.*none: no config\.json there"):
        ModelCard.read(tmp_path / "none", "teacher.path")


def test_the_package_gives_its_names_in_a_fresh_process() -> None:
    """`from megatron_gvpo.settings import load_config` as the first import of a program."""
    program = "from megatron_gvpo.settings import Config, load_config; print(load_config.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "load_config\n", done.stderr[-300:]

"""`model.adapter`: what it accepts, and every combination that is refused by name with the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.algorithms.recipe import read_recipe, recipe_names
from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.architectures import ARCHITECTURES
from megatron_gvpo.settings.adapter import TARGETS
from megatron_gvpo.settings.config import Config, load_config
from megatron_gvpo.settings.parallel import Padding

SIZES = {
    "vocab_size": 64,
    "hidden_size": 96,
    "head_dim": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def with_adapter(
    good: Path, adapter: str, *overrides: str, architecture: str = "Qwen2ForCausalLM", **sizes: Any
) -> Config:
    model = {"architectures": [architecture], **SIZES, **sizes}
    (good.parent / "config.json").write_text(json.dumps(model))
    return load_config([good], [f"model.path={good.parent}", f"model.adapter={adapter}", *overrides])


def test_defaults_are_those_of_hugging_face_peft(good: Path) -> None:
    adapter = with_adapter(good, "{}").model.adapter
    assert adapter is not None
    assert (adapter.type, adapter.rank, adapter.alpha, adapter.path) == ("canonical_lora", 32, 32, None)
    every = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert adapter.selected(TARGETS["Qwen2ForCausalLM"]) == every


def test_targets_are_sorted_names_of_hugging_face(good: Path) -> None:
    adapter = with_adapter(good, "{targets: [v_proj, q_proj]}").model.adapter
    assert adapter is not None and adapter.selected(()) == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        ("{dropout: 0.1}", "model.adapter.dropout: no such key"),
        ("{rank: 0}", "model.adapter.rank"),
        ("{rank: true}", "model.adapter.rank"),
        ("{rank: 5000}", "model.adapter.rank"),
        ("{alpha: 0}", "model.adapter.alpha"),
        ("{type: dora}", "dora: no Hugging Face adapter can hold its magnitudes"),
        ("{type: vera}", "model.adapter.type"),
        ("{targets: []}", "model.adapter.targets"),
        ("{targets: [gate]}", "targets: gate is the router"),
        ("{targets: [q_proj, lm_head]}", "targets: lm_head is the output layer"),
        ("{targets: [embed_tokens]}", "targets: embed_tokens is the embedding"),
        ("{targets: linear_qkv}", "targets: there is no 'linear_qkv'; known are all, q_proj"),
        ("{targets: [all, q_proj]}", "all includes the others"),
        ("{type: lora, targets: [q_proj, v_proj]}", "shares one A among q_proj, k_proj, v_proj"),
    ],
)
def test_what_cannot_be_is_refused(good: Path, adapter: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_adapter(good, adapter)
    assert problem in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("adapter", "overrides", "sizes", "problem"),
    [
        ("{rank: 6}", ["parallel.tp=4"], {}, "parallel.tp=4 does not divide model.adapter.rank=6"),
        (
            "{}",
            ["parallel.tp=2", "parallel.etp=2", "parallel.sequence_parallel=true"],
            {"architecture": "Qwen3MoeForCausalLM", **EXPERTS},
            "parallel.etp=2 with adapters on experts",
        ),
        (
            "{}",
            ["model.dtype=bfloat16", "model.fp8={recipe: tensorwise}"],
            {},
            "model.fp8.recipe=tensorwise with model.adapter",
        ),
        (
            "{targets: [kv_b_proj]}",
            [],
            {},
            "model.adapter.targets: kv_b_proj on Qwen2ForCausalLM: the model has no such layer",
        ),
        (
            "{targets: [q_proj, down_proj]}",
            [],
            {"architecture": "Gemma3ForCausalLM"},
            "model.adapter.targets: down_proj on Gemma3ForCausalLM: a norm follows the layer, and",
        ),
        (
            "{}",
            ["rollout.engine=sglang", "rollout.weights.transport=sharded"],
            {},
            "rollout.weights.transport=sharded with model.adapter",
        ),
    ],
)
def test_layouts_that_would_be_wrong_are_refused(
    good: Path, adapter: str, overrides: list[str], sizes: dict[str, Any], problem: str
) -> None:
    config = with_adapter(good, adapter, *overrides, **sizes)
    with pytest.raises(ConfigError) as refused:
        check_layout(config, config.parallel.tp)
    assert problem in str(refused.value) and "\n" not in str(refused.value)


def test_experts_without_adapters_may_be_divided(good: Path) -> None:
    overrides = ["parallel.tp=2", "parallel.etp=2", "parallel.sequence_parallel=true"]
    targets = "{targets: [q_proj, o_proj]}"
    sizes = {"architecture": "Qwen3MoeForCausalLM", **EXPERTS}
    check_layout(with_adapter(good, targets, *overrides, **sizes), 2)


def test_only_proven_architectures_get_adapters() -> None:
    assert TARGETS.keys() <= ARCHITECTURES.keys()


def test_packs_are_padded_for_adapters_of_q_k_and_v(good: Path) -> None:
    """Megatron-Bridge interleaves them for tp tokens at a time."""
    config = with_adapter(good, "{}", "parallel.tp=4")
    assert Padding.of(config.model, config.parallel).pack == 4
    without_adapter = config.model.model_copy(update={"adapter": None})
    assert Padding.of(without_adapter, config.parallel).pack == 1


def test_every_recipe_is_valid_with_adapters(good: Path) -> None:
    valid = 0
    for name in recipe_names():
        values = read_recipe(name)[1].settings
        settings = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        base = [f"algorithm.recipe={name}", *settings]
        try:
            load_config([good], base)
        except ConfigError:
            continue  # it needs a field or function of the user's
        config = with_adapter(good, "{rank: 8}", *base)
        check_layout(config, 1)
        valid += 1
    assert valid > 50

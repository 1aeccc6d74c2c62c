"""Speculative rollouts in the configuration: what is refused, and in which words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers.launch.start import DIALECTS
from megatron_gvpo.servers.server import Drafts
from megatron_gvpo.servers.speculation import check_draft
from megatron_gvpo.settings.config import Config, load_config

NGRAM = "rollout.speculation.method=ngram"
HEADS = "rollout.speculation.method=mtp"
IN_VLLM, IN_SGLANG = "rollout.engine=vllm", "rollout.engine=sglang"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([NGRAM], "rollout.speculation has no effect with rollout.engine=local"),
        ([IN_VLLM, "rollout.speculation.tokens=3"], "rollout.speculation.method"),
        (
            [IN_VLLM, "rollout.speculation.method=medusa"],
            "rollout.speculation.method: Input should be 'ngram', ",
        ),
        ([IN_VLLM, NGRAM, "rollout.speculation.tokens=0"], "rollout.speculation.tokens: Input should be gr"),
        ([IN_VLLM, "rollout.speculation.method=draft"], "rollout.speculation: method=draft: give its checkp"),
        (
            [IN_VLLM, NGRAM, "rollout.speculation.model=d"],
            "rollout.speculation: model=d: method=ngram has no",
        ),
        (
            [IN_SGLANG, "rollout.speculation.method=suffix"],
            "rollout.speculation.method=suffix is not possible with SGLang has no suffix decoding: use ngram",
        ),
        (
            [IN_VLLM, NGRAM, "rollout.router_replay=true"],
            "rollout.speculation.method=ngram is not possible with rollout.router_replay=true",
        ),
        (
            [IN_VLLM, NGRAM, "rollout.weights.transport=adapter", "model.adapter={rank: 8}"],
            "rollout.speculation.method=ngram is not possible with rollout.weights.transport=adapter",
        ),
        (
            [IN_SGLANG, HEADS, "rollout.weights.transport=disk"],
            "rollout.speculation.method=mtp is not possible with rollout.weights.transport=disk: SGLang",
        ),
        (
            [IN_SGLANG, "rollout.servers.args=[--speculative-accept-threshold-single, '0.5']"],
            "rollout.servers.args: --speculative-accept-threshold-single could change what the policy sampl",
        ),
        (
            [IN_VLLM, "rollout.servers.args=['-sc={}']"],
            "rollout.servers.args: -sc could change what the policy samples",
        ),
    ],
)
def test_what_cannot_speculate_is_refused(good: Path, overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([good], overrides)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def model(directory: Path, *tensors: str, **values: object) -> Path:
    """A directory with a config.json, and empty tensors of these names."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]} | values))
    save_file({name: torch.empty(0) for name in tensors}, directory / "model.safetensors")
    return directory


def check(config: Config) -> None:
    check_draft(config.rollout.speculation, ModelCards(config))


def test_a_model_without_heads_has_none_to_speculate_with(good: Path, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    heads = model(tmp_path / "a", "model.layers.1.a", "model.layers.2.a", **layers)
    own = model(tmp_path / "b", "mtp.fc.weight", architectures=["Qwen3NextForCausalLM"])
    for directory in (heads, own):
        check(load_config([good], [f"model.path={directory}", IN_VLLM, HEADS]))
    without = model(tmp_path / "c", "model.layers.1.a", **layers)  # an export that has lost them
    for directory in (without, model(tmp_path / "d", "mtp.fc.weight")):
        with pytest.raises(ConfigError, match=r"method=mtp: .*/[cd] has no weights of heads for further tok"):
            check(load_config([good], [f"model.path={directory}", IN_VLLM, HEADS]))


@pytest.mark.parametrize("layers", [1, 2, 24])
def test_a_whole_model_is_not_an_eagle_head(layers: int, good: Path, tmp_path: Path) -> None:
    """A head is accepted beside a policy with as few layers, by the tensor that joins its two inputs."""
    own = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight")
    policy = model(tmp_path / "policy", *own, num_hidden_layers=layers)
    full_model = model(tmp_path / "whole", *own[:2], num_hidden_layers=layers)
    head = model(tmp_path / "head", "fc.weight", "layers.0.mlp.up_proj.weight", num_hidden_layers=1)
    overrides = [f"model.path={policy}", IN_VLLM]
    check(load_config([good], [*overrides, f"rollout.speculation={{method: eagle, model: {head}}}"]))
    with pytest.raises(ConfigError, match=rf"/whole has num_hidden_layers={layers}, as the policy has"):
        check(
            load_config([good], [*overrides, f"rollout.speculation={{method: eagle, model: {full_model}}}"])
        )


def test_a_draft_of_another_vocabulary_is_refused(good: Path, tmp_path: Path) -> None:
    policy, other = model(tmp_path / "a", vocab_size=8), model(tmp_path / "b", vocab_size=9)
    chosen = f"rollout.speculation={{method: draft, model: {other}}}"
    with pytest.raises(ConfigError, match=r"/b has vocab_size=9, and the policy 8"):
        check(load_config([good], [f"model.path={policy}", IN_VLLM, chosen]))


def test_sglang_is_refused_on_a_cpu(good: Path) -> None:
    config = load_config([good], [IN_SGLANG, NGRAM])
    with pytest.raises(ConfigError, match=r"would not be the policy's: use a GPU, or rollout\.engine=vllm"):
        DIALECTS["sglang"].launch(config.model, config.rollout, ModelCards(config), 1, None, False)


def test_counts_of_a_server_that_has_restarted_begin_anew() -> None:
    before, after = Drafts(10, 30, 12), Drafts(14, 42, 20)
    assert after.since(before) == Drafts(4, 12, 8)
    assert Drafts(1, 3, 2).since(before) == Drafts(1, 3, 2)
    assert after.metrics == {"speculation/acceptance": 20 / 42, "speculation/length": 1 + 20 / 14}
    assert Drafts().metrics == {}
    with pytest.raises(ValueError, match="counts"):
        Drafts(-1)

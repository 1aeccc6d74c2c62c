"""Layouts that fit the model and the processes, and the errors for those that do not."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.settings.config import Config, load_config
from megatron_gvpo.settings.lengths import longest_prompt
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.sections import FP8Config


def with_model(good: Path, *overrides: str, **sizes: Any) -> Config:
    model = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 96,
        "head_dim": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "intermediate_size": 96,
        "max_position_embeddings": 4096,
    }
    (good.parent / "config.json").write_text(json.dumps({**model, **sizes}))
    return load_config([good], [f"model.path={good.parent}", *overrides])


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([], 1),
        ([], 3),
        (["parallel.tp=4"], 4),
        (["parallel.tp=2", "parallel.pp=3"], 12),
        (["parallel.pp=6"], 6),
    ],
)
def test_layouts_that_fit(good, overrides, world_size):
    check_layout(with_model(good, *overrides), world_size)


def test_servers_divide_the_heads(good):
    served = ("rollout.engine=vllm", "rollout.servers.tp=5")
    with pytest.raises(
        ConfigError, match=r"servers\.tp=5 does not divide .*heads=12, and vllm .*3, 4, 6, 12\]"
    ):
        check_layout(with_model(good, *served), 1)
    check_layout(with_model(good, served[0], "rollout.servers.tp=4"), 1)
    check_layout(with_model(good, *served, "rollout.servers.urls=[http://127.0.0.1:3000]"), 1)
    attention = "rollout.servers.args=[--enable-dp-attention]"
    check_layout(with_model(good, "rollout.engine=sglang", served[1], attention), 1)


@pytest.mark.parametrize("sizes", [{}, {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}])
def test_selective_recomputation_is_possible_for_every_model(good, sizes):
    """Its default names MLPs and experts; a model may have only one of them."""
    config = with_model(good, "parallel.recompute=selective", **sizes)
    check_layout(config, 1)
    assert config.parallel.recompute_modules == ("mlp", "moe")


@pytest.mark.parametrize(
    ("overrides", "world_size", "problem"),
    [
        (
            ["parallel.tp=3"],
            3,
            "parallel.tp=3 does not divide the model's num_key_value_heads=4; possible: [1, 2, 4]",
        ),
        (["parallel.tp=8"], 8, "parallel.tp=8 does not divide the model's num_attention_heads=12"),
        (
            ["parallel.pp=4"],
            4,
            "parallel.pp=4 does not divide the model's num_hidden_layers=6; possible: [1, 2, 3, 6]",
        ),
        (["parallel.pp=12"], 12, "parallel.pp=12 does not divide the model's num_hidden_layers=6"),
        (
            ["parallel.pp=2", "parallel.vpp=2"],
            2,
            "parallel.vpp=2 does not divide the 3 layers of a pipeline rank; possible: [1, 3], or name",
        ),
        (
            ["parallel.pp=2", "parallel.stage_layers=[3, 2]"],
            2,
            "parallel.stage_layers=[3, 2] are 5 layers, and the model has num_hidden_layers=6",
        ),
        (["parallel.cp=2"], 1, "1 process(es) cannot hold parallel.tp=1 x parallel.pp=1 x parallel.cp=2"),
        (
            ["parallel.tp=2", "parallel.cp=4", "parallel.cp_exchange=a2a"],
            8,
            "parallel.cp=4 with cp_exchange=a2a gives every rank whole heads, and num_attention_heads=12",
        ),
        (["parallel.ep=2"], 2, "parallel.ep=2: the model has no experts"),
        (["parallel.etp=2"], 2, "parallel.etp=2: the model has no experts"),
        (
            ["parallel.ep=2"],
            3,
            "3 process(es) of a pipeline stage cannot hold parallel.ep=2 x parallel.etp=1",
        ),
        (["parallel.tp=2", "parallel.pp=2"], 6, "6 process(es) cannot hold parallel.tp=2 x parallel.pp=2"),
        (
            ["data.max_prompt_tokens=1024", "rollout.max_tokens=4000"],
            1,
            "data.max_prompt_tokens=1024 plus rollout.max_tokens=4000 exceeds the model's "
            "max_position_embeddings=4096: lower rollout.max_tokens to 3072 or less, or leave data",
        ),
        (
            ["data.max_prompt_tokens=3500"],
            1,
            "data.max_prompt_tokens=3500 plus rollout.max_tokens=1024 exceeds the model's "
            "max_position_embeddings=4096: lower rollout.max_tokens to 596 or less (it is a default), or",
        ),
        (
            ["data.max_prompt_tokens=1024", "data.eval.path=e", "eval.sampling.max_tokens=4000"],
            1,
            "data.max_prompt_tokens=1024 plus eval.sampling.max_tokens=4000 exceeds",
        ),
        (
            ["rollout.max_tokens=4096"],
            1,
            "rollout.max_tokens=4096 leaves nothing of the model's max_position_embeddings=4096 for a "
            "prompt: lower it to 4096 less the longest prompt's tokens",
        ),
        (["data.max_prompt_tokens=5000"], 1, "data.max_prompt_tokens=5000 leaves nothing of the model's"),
        (
            ["rollout.engine=sglang", "rollout.servers.context_length=1000"],
            1,
            "rollout.max_tokens=1024 leaves nothing of rollout.servers.context_length=1000 for a prompt: "
            "lower it to 1000 less the longest prompt's tokens (it is a default)",
        ),
    ],
)
def test_layouts_that_do_not_fit(good, overrides, world_size, problem):
    with pytest.raises(ConfigError) as error:
        check_layout(with_model(good, *overrides), world_size)
    assert str(error.value).startswith(problem)


@pytest.mark.parametrize(
    ("overrides", "tokens"),
    [
        ([], 4096 - 1024),
        (["rollout.max_tokens=96"], 4000),
        (["rollout.max_tokens=96", "data.eval.path=e", "eval.sampling.max_tokens=1096"], 3000),
        (["data.max_prompt_tokens=7", "rollout.max_tokens=96"], 7),
        (["algorithm=sft", "data.train.demonstration_key=d", "rollout.n=1"], 4095),
        (["rollout.engine=vllm", "rollout.servers.context_length=2000"], 2000 - 1024),
    ],
)
def test_the_longest_prompt_is_what_the_longest_response_leaves(good, overrides, tokens):
    config = with_model(good, *overrides)
    assert longest_prompt(config, ModelCard.read(config.model.path)) == tokens


MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["parallel.ep=4"], "parallel.ep=4 does not divide the model's 6 experts; possible: [1, 2, 3, 6]"),
        (
            ["parallel.ep=2", "parallel.tp=2"],
            "parallel.tp=2 with experts needs parallel.sequence_parallel=true",
        ),
        (["parallel.etp=3"], "parallel.etp=3 does not divide the model's moe_intermediate_size=32"),
    ],
)
def test_expert_layouts_that_do_not_fit(good, overrides, problem):
    check_layout(with_model(good, "parallel.ep=2", **MOE), 2)
    with pytest.raises(ConfigError) as error:
        check_layout(with_model(good, *overrides, **MOE), 12)
    assert str(error.value).startswith(problem)


YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
LATENT = {**MOE, "architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("overrides", "sizes", "problem"),
    [
        ([], {"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn in config.json; supported for this"),
        ([], {"rope_scaling": {"type": "linear"}}, "rope_type=linear in config.json; supported for this"),
        (
            [],
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}, "architectures": ["LlamaForCausalLM"]},
            "low_freq_factor=2.0 of the llama3 rope in config.json; megatron-core has it with 1.0 only",
        ),
        (["parallel.cp=2"], {"sliding_window": 4096}, "a ring cannot follow the model's sliding_window=4096"),
    ],
)
def test_positions_that_megatron_does_not_have(good, overrides, sizes, problem):
    check_layout(with_model(good, rope_parameters=LLAMA3, architectures=["LlamaForCausalLM"]), 1)
    check_layout(with_model(good, "parallel.cp=2", sliding_window=9, use_sliding_window=False), 2)
    with pytest.raises(ConfigError) as error:
        check_layout(with_model(good, *overrides, **sizes), 2)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (
            {"architectures": ["LlamaForCausalLM"], "attention_bias": True},
            "attention_bias=True in config.json; ",
        ),
        ({"rope_parameters": LLAMA3}, "rope_type=llama3 in config.json; supported for this"),
        (  # transformers takes rope_scaling before rope_parameters, and its own default for rope_theta
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN},
            "rope_parameters and rope_scaling in config.json differ, and transformers takes rope_scaling",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            "use_sliding_window=true in config.json, from layer 1 of",
        ),
        (  # transformers takes layer_types before max_window_layers
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 6},
            "use_sliding_window=true in config.json, from layer 0 of",
        ),
        (
            {**LATENT, "rope_scaling": {**YARN, "attention_factor": 1.5}},
            "attention_factor=1.5 of the YaRN rope in config.json; Megatron-Bridge builds the model without",
        ),
        ({**LATENT, "rope_scaling": {**YARN, "truncate": False}}, "truncate=False of the YaRN rope"),
        (
            {**LATENT, "rope_scaling": {**YARN, "mscale": 0.707}},
            "mscale=0.707 and mscale_all_dim=None of the YaRN rope in config.json, of which transformers",
        ),
        (
            {**MOE, "architectures": ["GptOssForCausalLM"], "swiglu_alpha": 1.5},
            "swiglu_alpha=1.5 in config.json; Megatron-Bridge builds GptOssForCausalLM with",
        ),
        ({**MOE, "decoder_sparse_step": 2}, "decoder_sparse_step=2 in config.json; Megatron-Bridge builds"),
        (
            {**MOE, "architectures": ["DeepseekV3ForCausalLM"], "norm_topk_prob": False},
            "norm_topk_prob=False in config.json; Megatron-Bridge builds DeepseekV3ForCausalLM with",
        ),
        (
            {**MOE, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "num_experts_per_tok": 1},
            "num_experts_per_tok=1 of topk_group=1 of n_group=4 groups of 6 experts",
        ),
    ],
)
def test_what_megatron_bridge_would_build_otherwise(good, model, problem):
    """For these config.json files Megatron-Bridge would silently build another model."""
    with pytest.raises(ConfigError) as error:
        check_layout(with_model(good, **model), 1)
    assert problem in str(error.value)


def test_gpt_oss_has_one_yarn(good):
    """Megatron-Bridge ignores what config.json says of it."""
    yarn = {**YARN, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    model = {**MOE, "architectures": ["GptOssForCausalLM"]}
    check_layout(with_model(good, **model, rope_parameters=yarn), 1)
    with pytest.raises(ConfigError, match=r"attention_factor=1\.0 of the rope in config\.json; Megatron-Br"):
        check_layout(with_model(good, **model, rope_parameters={**yarn, "attention_factor": 1.0}), 1)


def test_what_is_written_out_and_means_nothing(good):
    for model in (
        {"use_sliding_window": True, "sliding_window": 9},  # from layer 28, which there is not
        {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 1},
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "layer_types": ["full_attention"] * 6,
        },
        {**LATENT, "rope_scaling": {**YARN, "truncate": True, "mscale": 1.0}},
        {**LATENT, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
        {**MOE, "attention_bias": None, "mlp_only_layers": [], "decoder_sparse_step": 1},
        {**MOE, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": "greedy", "n_group": 4},
    ):
        check_layout(with_model(good, **model), 1)


def test_an_architecture_that_is_not_supported(good):
    with pytest.raises(ConfigError, match=r"architecture GPT2LMHeadModel in .*; supported: Deepseek"):
        check_layout(with_model(good, architectures=["GPT2LMHeadModel"]), 1)


def test_a_critic_must_fit_the_layout_and_the_policys_tokens(good, tmp_path):
    critic = tmp_path / "critic"
    critic.mkdir()
    config = with_model(good, "algorithm=ppo", f"algorithm.critic.path={critic}", vocab_size=100)
    fitting = json.loads((good.parent / "config.json").read_text())
    for changes, problem in (
        ({"architectures": ["BertModel"]}, "critic.path=.*architecture BertModel"),
        ({"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}, "takes images"),
        ({"vocab_size": 99}, "critic.path=.*vocab_size=99, .*policy's is 100"),
        ({"num_attention_heads": 13}, "does not divide"),
    ):
        (critic / "config.json").write_text(json.dumps({**fitting, **changes}))
        two = load_config([good], [f"model.path={good.parent}", "algorithm=ppo", "parallel.tp=2"])
        two = two.model_copy(update={"algorithm": config.algorithm})
        with pytest.raises(ConfigError, match=problem):
            check_layout(two, 2)
    (critic / "config.json").write_text(json.dumps(fitting))
    check_layout(config, 1)
    windowed = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}
    (critic / "config.json").write_text(json.dumps({**fitting, **windowed, "intermediate_size": 40}))
    in_fp8 = two.model.model_copy(update={"fp8": FP8Config(recipe="blockwise")})
    with pytest.raises(ConfigError, match=r"critic is held .*: model\.fp8\.recipe=blockwise needs sizes"):
        check_layout(two.model_copy(update={"model": in_fp8}), 2)
    two = two.model_copy(update={"parallel": ParallelConfig(cp=2)})
    with pytest.raises(ConfigError, match=r"critic is held in the policy's layout: .* a ring cannot follow"):
        check_layout(two, 2)


def test_a_model_directory_without_a_readable_config(good):
    config = load_config([good], [f"model.path={good.parent}"])
    with pytest.raises(ConfigError, match=r"no config\.json there"):
        check_layout(config, 1)
    (good.parent / "config.json").write_text('{"a": 1,\n oops}')
    with pytest.raises(ConfigError, match="line 2: not valid JSON"):
        check_layout(config, 1)

"""A teacher that the trainer holds: configurations that mean nothing, and layouts that do not fit it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.inputs.good_config import message

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.config import load_config

FULL = "algorithm=opd_full"
HELD = "teacher={path: big}"


def test_a_divergence_needs_a_teacher_in_the_trainer(good: Path):
    config = load_config([good], [FULL, HELD, "rollout.temperature=0.7", "rewards.components=[]"])
    assert config.algorithm.needs_teacher and config.teacher.server is None
    assert message(good, FULL).startswith("teacher is missing")
    served = message(good, FULL, "teacher={path: big, server: {}}")
    assert "algorithm.loss.divergence=reverse: it needs the teacher's hidden states" in served
    assert "a teacher reads no images" in message(good, FULL, HELD, "data.train.images_key=pictures")


def test_the_other_model_may_be_the_policys_own_average(good: Path):
    ema = "algorithm={recipe: gpg, loss: {divergence: {reference: {name: ema, decay: 0.9}}}}"
    config = load_config([good], [ema])
    assert not config.algorithm.needs_teacher and config.algorithm.kept_reference.decay == 0.9
    assert message(good, ema, HELD).startswith("teacher has no effect")
    two = ["algorithm={recipe: grpo, loss: {kl_coef: 0.1, divergence: {reference: {name: ema, decay: 0.9}}}}"]
    assert "differ (ema with decay=0.9, fixed): one reference policy is kept" in message(good, *two)
    assert "step_start: want teacher, fixed or ema" in message(
        good, FULL, "algorithm.loss.divergence.reference=step_start"
    )
    assert "beta=0.5 goes with name=js" in message(good, FULL, HELD, "algorithm.loss.divergence.beta=0.5")


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ({"num_hidden_layers": 3}, "parallel.pp=2 does not divide the model's num_hidden_layers=3"),
        ({"intermediate_size": 97}, "parallel.tp=2 does not divide the model's intermediate_size=97"),
    ],
)
def test_a_teacher_fits_into_the_policys_layout(good: Path, tmp_path: Path, size: dict, problem: str):
    own = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "num_hidden_layers": 4}
    own |= {"num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "qwen2"}
    own |= {"hidden_size": 48, "intermediate_size": 96}
    for name, values in (("policy", own), ("teacher", {**own, **size})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    overrides = [FULL, f"teacher={{path: {tmp_path}/teacher}}", f"model.path={tmp_path}/policy"]
    config = load_config([good], [*overrides, "parallel={tp: 2, pp: 2}"])
    with pytest.raises(ConfigError) as error:
        check_layout(config, 4)
    assert str(error.value).startswith(f"teacher.path={tmp_path}/teacher is held in the policy's layout: ")
    assert problem in str(error.value)


def test_a_teacher_that_takes_images_is_refused(good: Path, tmp_path: Path):
    """With context parallelism the layers would give its tokens the positions of others."""
    text = {"vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    text |= {"hidden_size": 48, "intermediate_size": 96}
    seeing = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    own = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    for name, values in (("policy", text | own), ("teacher", text | seeing)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    paths = [f"teacher.path={tmp_path}/teacher", f"model.path={tmp_path}/policy"]
    with pytest.raises(ConfigError, match=r"teacher takes images \(Qwen2_5_VLForConditionalGeneration\)"):
        check_layout(load_config([good], [FULL, *paths, "parallel.cp=2"]), 2)


def test_a_dense_teacher_is_refused_where_experts_are_divided(good: Path, tmp_path: Path):
    dense = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64}
    dense |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4, "head_dim": 16}
    dense |= {"hidden_size": 48, "intermediate_size": 96}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    own = {**dense, **experts, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    for name, values in (("policy", own), ("teacher", dense)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    config = load_config(
        [good], [FULL, f"teacher.path={tmp_path}/teacher", f"model.path={tmp_path}/policy", "parallel.ep=2"]
    )
    problem = rf"teacher\.path={tmp_path}/teacher is held in the policy's layout: parallel\.ep=2"
    with pytest.raises(ConfigError, match=problem):
        check_layout(config, 2)


def test_a_divergence_of_more_tokens_than_there_are_is_refused(good: Path, tmp_path: Path):
    own = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "num_hidden_layers": 4}
    own |= {"num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps(own | {"hidden_size": 48, "intermediate_size": 96}))
    overrides = [FULL, f"teacher.path={tmp_path}", f"model.path={tmp_path}"]
    check_layout(load_config([good], [*overrides, "algorithm.loss.divergence.top_k=64"]), 1)
    with pytest.raises(ConfigError, match=r"divergence\.top_k=65: the model's vocab_size=64"):
        check_layout(load_config([good], [*overrides, "algorithm.loss.divergence.top_k=65"]), 1)

"""Spoiled configurations, config.json files and data: success, or one line of ours and no more."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.inputs.good_config import GOOD
from helpers.inputs.mutate import mutated, spoiled
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.cli.terminal import refuse
from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.data import task as task_module
from megatron_gvpo.data.task import load_task
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.settings.config import build_config, load_config

FUZZ = settings(settings.get_profile("fuzz"))
FULL = {
    **yaml.safe_load(GOOD),
    "optimizer": {"lr": 1e-5, "betas": [0.9, 0.95], "warmup_steps": 3, "decay": "cosine"},
    "algorithm": {"recipe": "gvpo", "loss": {"beta": 0.2, "terms": ["var", "cov"], "reference": "fixed"}},
    "rollout": {
        "engine": "sglang",
        "n": 4,
        "stop_token_ids": [3],
        "servers": {"count": 2, "port": 30000, "args": ["--x"], "start_timeout": 9.5},
        "weights": {"transport": "broadcast", "bucket_mb": 64},
    },
    "rewards": {"components": [{"name": "math"}, {"name": "mine", "function": "x:y", "options": {"a": [1]}}]},
    "eval": {"k": [1, 2], "sampling": {"max_tokens": 9}},
    "logging": {"profile_steps": [2, 4]},
    "parallel": {"tp": 2, "sequence_parallel": True, "recompute": "selective", "recompute_modules": ["mlp"]},
}
CONFIGURATIONS = [
    FULL,
    {**FULL, "algorithm": "dapo"},
    {**FULL, "algorithm": {"recipe": "ppo", "critic": {"lr": 1e-5, "warmup_steps": 2}}},
    {**FULL, "algorithm": {"recipe": "gpg", "members": [{"name": "replay", "count": 2}]}},
    {**FULL, "model": {"path": "m", "fp8": {"recipe": "blockwise", "bf16_layers": 1}}},
]


def is_said_well(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """The message is some lines of a screen, and names something."""
    text = str(error)
    assert text.strip() and len(text.splitlines()) <= 21
    assert refuse(error) == 2
    shown = capsys.readouterr().err
    assert len(shown) < 2200 and "\x00" not in shown and "pydantic" not in shown


@FUZZ
@given(values=st.sampled_from(CONFIGURATIONS).flatmap(mutated))
@example(values={**FULL, "eval": None})
@example(values={**FULL, "rollout": []})
def test_configurations(values: Any, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        config = build_config(values)
    except ConfigError as error:
        is_said_well(error, capsys)
    else:
        assert build_config(json.loads(config.model_dump_json())) == config


@FUZZ
@given(text=spoiled(GOOD.encode()))
@example(text=b"train: !!timestamp x\n")
@example(text=b"a: !!bool x\n")
def test_configuration_files(text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "run.yaml").write_bytes(text)
    try:
        load_config([file])
    except ConfigError as error:
        is_said_well(error, capsys)


@FUZZ
@given(
    words=st.lists(
        st.tuples(st.sampled_from(["train.steps", "algorithm", "eval", "", ".", "a.b"]), st.text()),
        max_size=3,
    )
)
def test_overrides(words: list[tuple[str, str]], good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        load_config([good], [f"{key}={value}" for key, value in words])
    except ConfigError as error:
        is_said_well(error, capsys)


MODELS = [
    {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
    }
]
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
DEEPSEEK = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16, "q_lora_rank": 16}
LLAMA3 = {"rope_parameters": None, "rope_scaling": {"rope_type": "llama3", "factor": 8}}
MODELS += [
    {**MODELS[0], "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, **EXPERTS},
    {**MODELS[0], "architectures": ["DeepseekV3ForCausalLM"], **EXPERTS, **DEEPSEEK},
    {**MODELS[0], "architectures": ["LlamaForCausalLM"], **LLAMA3},
]
LAYOUTS = [
    (1, []),
    (2, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    (2, ["parallel.pp=2", "model.fp8.recipe=blockwise", "rollout.max_tokens=64"]),
    (2, ["parallel.ep=2", "parallel.recompute=selective", "parallel.recompute_modules=[moe]"]),
    (2, ["parallel.cp=2", "parallel.cp_exchange=a2a", "rollout.stop_token_ids=[99]"]),
]


@FUZZ
@example(model=MODELS[0] | {"num_key_value_heads": None}, layout=LAYOUTS[-1])
@example(model=MODELS[1] | {"moe_intermediate_size": None}, layout=LAYOUTS[0])
@given(model=st.sampled_from(MODELS).flatmap(mutated), layout=st.sampled_from(LAYOUTS))
def test_model_files(model: Any, layout: Any, good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world, overrides = layout
    (good.parent / "config.json").write_text(json.dumps(model))
    try:
        check_layout(load_config([good], [f"model.path={good.parent}", *overrides]), world)
    except ConfigError as error:
        is_said_well(error, capsys)


RECORD = {
    "prompt": "1+2=",
    "answer": 3,
    "solution": "1+2=3",
    "responses": [{"response": "3", "reward": 1}, {"response": "4", "reward": 0.5}],
    "note": {"a": [1, 2]},
}


@pytest.fixture(autouse=True, scope="module")
def _one_tokenizer() -> Iterator[None]:
    """Load each model's tokenizer once, not for every example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_module, "load_tokenizer", functools.cache(load_tokenizer))
        yield


METHODS = [
    "algorithm=gvpo",
    "algorithm={recipe: sft}",
    "algorithm={recipe: dpo}",
]
KEYS = "data.train={path: %s, demonstration_key: solution, responses_key: responses}"


def data_is_read_or_refused(task: Path, file: Path, method: str, capsys: Any) -> None:
    config = load_config(
        [task / "run.yaml"], [method, f"output_dir={file.parent}", KEYS % file, "data.eval=null"]
    )
    try:
        load_task(config, ModelCard.read(config.model.path))
    except (ConfigError, DataError) as error:
        is_said_well(error, capsys)
        assert str(file) in str(error)


@FUZZ
@given(record=mutated(RECORD), method=st.sampled_from(METHODS))
@example(record={**RECORD, "answer": True}, method=METHODS[0])
def test_records(record: Any, method: str, task: Path, tmp_path: Path, capsys: Any) -> None:
    (file := tmp_path / "a.jsonl").write_text(json.dumps(RECORD) + "\n" + json.dumps(record) + "\n")
    data_is_read_or_refused(task, file, method, capsys)


@FUZZ
@given(text=spoiled((json.dumps(RECORD) + "\n").encode() * 2), method=st.sampled_from(METHODS))
def test_data_files(text: bytes, method: str, task: Path, tmp_path: Path, capsys: Any) -> None:
    (file := tmp_path / "a.jsonl").write_bytes(text)
    data_is_read_or_refused(task, file, method, capsys)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_tokenizer_files(name: str, task: Path, tmp_path: Path, capsys: Any) -> None:

    shutil.copytree(
        task / "model", model := tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    content = (model / name).read_bytes()
    for text in (content[: len(content) // 2], b"", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 3000):
        (model / name).write_bytes(text)
        try:
            load_tokenizer(str(model))
        except DataError as error:
            is_said_well(error, capsys)

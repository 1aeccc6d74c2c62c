"""`megatron-gvpo verify` as a user meets it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.cases.families import FAMILIES, Family
from helpers.suite.real_parts import used

from megatron_gvpo.cli.verify import run
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.verify.layout import layouts_for
from megatron_gvpo.verify.shrink import check_known, shrink

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def verify(path: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_gvpo", "verify", str(path), *options]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)


def test_a_config_is_compared_in_the_layouts_that_are_named(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | quantised))
    done = verify(tmp_path, "--layouts", "single,tp2-sp")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in lines[1:3]] == ["single", "tp2-sp"]
    assert lines[3].startswith(
        "Qwen2ForCausalLM: equal to transformers in 2 layouts (limits: log-probs 1e-05"
    )
    note = "note: CONFIG_OR_DIR={}: quantization_config in config.json is left out"
    assert done.stderr.startswith(note.format(tmp_path))
    used("megatron-core and Megatron-Bridge, 2 ranks")


@pytest.mark.parametrize(
    ("changed", "options", "problem"),
    [
        ({}, ["--layouts", "tp3"], "--layouts tp3: no layout tp3 for this model; there are: single, "),
        ({"architectures": ["A", "B"]}, [], "config.json must name one architecture"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, [], "without the window"),
    ],
)
def test_wrong_input_is_refused_at_once(
    tmp_path: Path, changed: dict[str, object], options: list[str], problem: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN2 | changed))
    done = verify(file, *options)
    assert done.returncode == 2 and problem in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "CONFIG_OR_DIR=.*config.json: no such file or directory"),
        ("{not json", r"config.json, line 1: not valid JSON \(Expecting property name"),
        (
            '{"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {}}',
            "Mistral3ForConditionalGeneration: it takes images.*models of text alone",
        ),
        ("[1]", "config.json: expected an object of names and values, found list"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        run(argparse.Namespace(model=str(file), layouts=None))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"model_type": None}, "model_type=None in config.json: expected a name"),
        ({"model_type": "qwenn2"}, "model_type=qwenn2 .* has no such model; did you mean qwen2"),
        ({"model_type": "t5"}, "model_type=t5 .* has no causal language model of it"),
        (
            {"model_type": "llama"},
            "architectures=Qwen2ForCausalLM .* of model_type=llama is LlamaForCausalLM",
        ),
        ({"architectures": ["Qwen3VLForConditionalGeneration"]}, "takes images, .* text alone"),
    ],
)
def test_a_model_that_transformers_does_not_have_is_refused(changed: dict[str, Any], problem: str) -> None:
    config = QWEN2 | changed
    with pytest.raises(ConfigError, match=f"^m: .*{problem}"):
        check_known(config, config["architectures"][0], "m")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_transformers_has_every_supported_family(family: Family) -> None:
    check_known(family.released, family.architecture, "m")


def test_what_is_wrong_with_the_file_comes_before_what_the_machine_lacks(tmp_path: Path) -> None:
    """This machine has no Megatron; the quantised weights would be left out."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise ImportError('there is no Megatron here')")
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(QWEN2 | {"model_type": "none", "quantization_config": {"quant_method": "fp8"}})
    )
    done = verify(file, PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(
        f"error: CONFIG_OR_DIR={file}: model_type=none in config.json: transformers "
    )
    assert len(done.stderr.splitlines()) == 1


def test_a_tiny_model_keeps_what_makes_the_architecture() -> None:
    released = next(family for family in FAMILIES if family.architecture == "Qwen3NextForCausalLM").released
    tiny = shrink(released, "m")
    assert tiny["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert tiny["linear_num_value_heads"] == 2 * tiny["linear_num_key_heads"]
    assert tiny["rope_parameters"] == released["rope_parameters"]
    assert tiny["partial_rotary_factor"] == released["partial_rotary_factor"]
    names = {str(layout) for layout in layouts_for(tiny, cores=2)}
    assert names == {"single", "recompute_full", "dp2", "tp2-sp", "pp2", "cp2", "ep2-dp2", "tp2-ep2-sp"}


def test_an_order_of_layers_that_needs_too_many_is_refused() -> None:
    order = ["full_attention"] * 30 + ["linear_attention"]
    config = QWEN2 | {"num_hidden_layers": 31, "layer_types": order}
    with pytest.raises(ConfigError, match="a tiny model has at most 12"):
        shrink(config, "m")

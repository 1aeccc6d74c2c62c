"""A run that cannot work is told in one line before anything is loaded: interpreters, logins, marks."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import get_args

import pytest
from helpers.inputs.chat_tokenizer import CHATML, tokenizer

from megatron_gvpo.checks.preflight import _check_loggers, check_interpreter
from megatron_gvpo.cli import convert, main
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.data.prompts import broken_marks, load_prompts
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.tokenizer import rendered
from megatron_gvpo.observe.loggers.services import WANDB_MODES, wandb_is_ready
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig


def script(file: Path, text: str) -> str:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_the_interpreter_of_servers_is_tried(good: Path, tmp_path: Path):
    def error(python: str, *words: str) -> str:
        config = load_config([good], ["rollout.engine=sglang", f"rollout.servers.python={python}", *words])
        try:
            check_interpreter(config)
        except ConfigError as refused:
            return str(refused)
        return "accepted"

    assert "/nowhere/python: there is no such program" in error("/nowhere/python")
    broken = script(tmp_path / "broken", "echo 'ImportError: libx' >&2; exit 1")
    assert "it is not a working Python interpreter (ImportError: libx)" in error(broken)
    without = script(tmp_path / "without", f'exec {sys.executable} -S "$@"')
    assert "it has no package sglang; name the one of the engine's own environment" in error(without)
    (tmp_path / "sglang").mkdir()
    with_engine = script(tmp_path / "with", f'PYTHONPATH={tmp_path} exec {sys.executable} -S "$@"')
    assert error(with_engine) == "accepted"
    assert error("/nowhere/python", "rollout.servers.urls=['http://10.0.0.1:1']") == "accepted"


def test_serve_tries_the_interpreter_before_it_loads_torch(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Torch took half a minute. Earlier, the supervisor started it twice, with two tracebacks in its log."""
    monkeypatch.setitem(sys.modules, "megatron_gvpo.servers.launch.serve", None)
    assert main(["serve", str(good), "rollout.engine=sglang", "rollout.servers.python=/nowhere/python"]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert line.startswith("error: rollout.servers.python=/nowhere/python: there is no such program")


def test_convert_reads_the_card_before_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(convert, "run_with_model", lambda _: pytest.fail("they take 26 seconds"))
    assert main(["convert", "Qwen/Qwen9", str(tmp_path / "out")]) == 2
    assert "SOURCE=Qwen/Qwen9: no config.json there" in capsys.readouterr().err
    (tmp_path / ".metadata").touch()
    assert main(["convert", str(tmp_path), str(tmp_path / "out"), "--like", "Qwen/Qwen9"]) == 2
    assert "--like=Qwen/Qwen9: no config.json there" in capsys.readouterr().err


def test_a_name_of_the_hub_is_not_a_directory():
    with pytest.raises(ConfigError, match=r"download it: hf download Qwen/Qwen2\.5-0\.5B --local-dir DIR"):
        ModelCard.read("Qwen/Qwen2.5-0.5B")
    with pytest.raises(ConfigError) as error:
        ModelCard.read("/models/Qwen2.5-0.5B")
    assert "download" not in str(error.value)


def test_weights_and_biases_without_a_login(monkeypatch, tmp_path: Path):
    for name in (
        "WANDB_API_KEY",
        "WANDB_MODE",
        "WANDB_BASE_URL",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_ANONYMOUS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.chdir(tmp_path)
    assert not wandb_is_ready()
    with monkeypatch.context() as inner:
        inner.setenv("WANDB_MODE", "offline")
        assert wandb_is_ready()
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    assert wandb_is_ready()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = online\n")
    assert not wandb_is_ready()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert wandb_is_ready()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not wandb_is_ready()
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert wandb_is_ready()


def test_a_mode_that_wandb_does_not_know(good: Path, monkeypatch: pytest.MonkeyPatch):
    """With a key in the environment wandb refused it, and only when the model was loaded."""
    settings = pytest.importorskip("wandb").Settings
    assert get_args(settings.model_fields["mode"].annotation) == WANDB_MODES
    monkeypatch.setenv("WANDB_API_KEY", "k")
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(ConfigError, match=r"^WANDB_MODE=ofline: wandb has no such mode; it has online, offl"):
        _check_loggers(load_config([good], ["logging.wandb_project=x"]))


def test_marks_that_the_tokenizer_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    other = CHATML.replace("im_start", "begin").replace("im_end", "eot")
    prompt = rendered(tokenizer(other), [{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert broken_marks(tokenizer(other), prompt) == ["<|begin|>", "<|eot|>"]
    fine = rendered(tokenizer(), [{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert broken_marks(tokenizer(), fine) == []
    (tmp_path / "data.jsonl").write_text('{"prompt": "hello", "answer": 1}\n')
    dataset = DatasetConfig(path=str(tmp_path / "data.jsonl"))
    with caplog.at_level(logging.WARNING):
        load_prompts(dataset, DataConfig(train=dataset), tokenizer(other), longest=99, end_token_ids=(2,))
    assert "the chat template writes <|begin|>, <|eot|>, which the tokenizer has no token for" in caplog.text

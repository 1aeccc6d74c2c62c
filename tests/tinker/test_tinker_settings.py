"""The configuration of `serve --tinker` refuses what cannot be, and never shows its key."""

import shutil
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from megatron_gvpo.cli import main
from megatron_gvpo.cli.serve import _check as check
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.tinker import TinkerConfig, load_tinker_config

YAML = "output_dir: out\nmodel: {path: model}\nserve: {key: {env: TINKER_TEST_KEY}}\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TINKER_TEST_KEY", "tml-0123456789abcdef")
    file = tmp_path / "server.yaml"
    file.write_text(YAML)
    return file


def loaded(file: Path, *overrides: str) -> TinkerConfig:
    return load_tinker_config([file], overrides)


def test_the_server_listens_on_loopback_unless_an_address_is_given(file: Path):
    assert loaded(file).serve.address == "127.0.0.1"
    assert loaded(file, "serve.address=10.0.0.5").serve.address == "10.0.0.5"


def test_the_models_name_is_its_path_unless_another_is_given(file: Path):
    assert loaded(file).name == "model"
    assert loaded(file, "serve.name=Qwen/Qwen3-8B").name == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("serve.key=tml-0123456789abcdefg", "a secret in the configuration"),
        ("serve.port=70000", "serve.port"),
        ("serve.colour=1", "serve.colour"),
        ("model.adapter={path: x}", "model.adapter.path"),
        (
            "model={path: model, dtype: bfloat16, fp8: {recipe: blockwise, weights: true}}",
            "model.fp8.weights=true: clients' models",
        ),
        ("train.steps=3", "train"),
        ("rollout.engine=trt", "rollout.engine"),
        ("rollout.n=8", "rollout.n"),
        ("rollout={engine: vllm, servers: {colocated: true}}", "give the servers GPUs of their own"),
        ("rollout={engine: vllm, weights: {transport: adapter}}", "without model.adapter none does"),
        ("rollout.servers.tp=2", "rollout.servers has no effect with rollout.engine=local"),
    ],
)
def test_what_cannot_be_is_refused(file: Path, override: str, words: str):
    with pytest.raises(ConfigError, match=words):
        loaded(file, override)


def test_a_training_configuration_is_refused_in_one_line_with_an_example():
    with pytest.raises(ConfigError) as refused:
        load_tinker_config([ROOT / "examples" / "recipes" / "gsm8k.yaml", ROOT / "examples" / "cpu.yaml"])
    message = str(refused.value)
    assert "cpu.yaml: no section `serve`: " in message and "\n" not in message
    for named in ("examples/tinker/server.yaml", "docs/howto/tinker_server.md"):
        assert named in message and (ROOT / named).is_file()


@pytest.mark.parametrize("command", ["serve", "check", "train"])
def test_a_servers_configuration_needs_its_option(command: str, capsys: pytest.CaptureFixture[str]):
    path = ROOT / "examples" / "tinker" / "server.yaml"
    assert main([command, str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: the section `serve` belongs to a server of the Tinker API")
    assert f"megatron-gvpo serve --tinker {path}" in line


def test_a_model_without_weights_is_refused_before_megatron_loads(file: Path, task: Path, tmp_path: Path):
    (tmp_path / "model").mkdir()
    shutil.copy(task / "model" / "config.json", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model\.path=.*model: no weights there"):
        check(loaded(file, f"model.path={tmp_path}/model"), 1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.servers.python=/none/python"], "rollout.servers.python=/none/python: there is no such"),
        (["rollout.servers.tp=3"], "rollout.servers.tp=3 does not divide"),
        (
            ["rollout.weights.transport=sharded", "model.adapter={rank: 4}"],
            "transport=sharded with model.adapter",
        ),
    ],
)
def test_servers_that_cannot_sample_are_refused_before_torch_loads(
    file: Path, task: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], words: str
):
    monkeypatch.setitem(sys.modules, "megatron_gvpo.huggingface.complete_weights", None)
    config = loaded(file, f"model.path={task}/model", "rollout.engine=sglang", *overrides)
    with pytest.raises(ConfigError, match=words):
        check(config, 1)


def test_a_key_is_needed_and_comes_from_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch):
    file.write_text(YAML.replace("{env: TINKER_TEST_KEY}", "tml-in-plain-text"))
    with pytest.raises(ConfigError, match="in the environment variable"):
        loaded(file)
    file.write_text(YAML)
    monkeypatch.setenv("TINKER_TEST_KEY", "sk-another-prefix-1")
    with pytest.raises(ConfigError, match="begin with `tml-`"):
        loaded(file)
    monkeypatch.delenv("TINKER_TEST_KEY")
    with pytest.raises(ConfigError, match="TINKER_TEST_KEY is not set"):
        loaded(file)

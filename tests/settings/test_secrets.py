"""Secrets are given as {env: NAME}, and nothing that a run writes or prints has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_gvpo.cli import main
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.secrets import as_written, hide
from megatron_gvpo.core.yaml_files import Loader
from megatron_gvpo.servers.launch.start import start_servers
from megatron_gvpo.settings.load import build_config, load_config

SECRET = "s3cr3t-of-the-judge"


def reward(options: str) -> str:
    return f"rewards.components=[{{name: judge, function: 'a_judge.py:grade', options: {options}}}]"


@pytest.fixture
def judge_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)


def test_a_value_comes_from_the_environment_and_is_written_as_its_source(good: Path, judge_key: None):
    config = load_config([good], [reward("{api_key: {env: JUDGE_KEY}}"), "output_dir={env: JUDGE_KEY}"])
    assert config.output_dir == SECRET and config.rewards.components[0].options == {"api_key": SECRET}
    written = as_written(config)
    assert written["output_dir"] == {"env": "JUDGE_KEY"}
    assert written["rewards"]["components"][0]["options"] == {"api_key": {"env": "JUDGE_KEY"}}
    assert SECRET not in yaml.safe_dump(written)
    assert build_config(written) == config


def test_what_is_no_secret_is_written_as_it_is(good: Path):
    config = load_config([good], [reward("{key: problem, template: 'a://b', scale: 2, api_key_env: K}")])
    assert as_written(config) == config.model_dump(mode="json")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("{api_key: abc}", {"api_key": "<redacted>"}),
        ("{key: sk-12345678}", {"key": "<redacted>"}),
        ("{deep: {hf_token: t0, n: 1}}", {"deep": {"hf_token": "<redacted>", "n": 1}}),
        ("{password: pw, secret: [1]}", {"password": "<redacted>", "secret": [1]}),
        ("{url: 'https://me:pw@judge/v1'}", {"url": "https://<redacted>@judge/v1"}),
        ("{url: 'https://judge/v1?n=1&api_key=k1'}", {"url": "https://judge/v1?n=1&api_key=<redacted>"}),
    ],
)
def test_a_literal_secret_is_redacted_and_refused_on_a_command_line(options: str, shown: object, good: Path):
    given = yaml.load(good.read_text(), Loader)
    key, value = reward(options).split("=", 1)
    config = build_config(given | {"rewards": {key.split(".")[1]: yaml.load(value, Loader)}})
    assert as_written(config)["rewards"]["components"][0]["options"] == shown
    with pytest.raises(ConfigError, match=r"options\.[\w.]+: a secret on a command line.*`\{env: NAME\}`"):
        load_config([good], [reward(options)])


def test_a_file_with_a_literal_secret_is_noted(good: Path, capsys: pytest.CaptureFixture[str]):
    file = good.with_name("judge.yaml")
    file.write_text("rewards: {components: [{name: format, options: {password: 'pass w0rd'}}]}\n")
    assert main(["eval", str(good), str(file)]) == 2  # for want of data.eval
    said = capsys.readouterr().err
    assert "note: rewards.components.0.options.password: a secret in a configuration file" in said
    assert "w0rd" not in said


@pytest.mark.parametrize("value", ["", None, "two\nlines"])
def test_a_variable_that_cannot_be_used_is_named(value: str | None, good: Path, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    why = r"rewards\.components\.0\.options\.k: \$JUDGE_KEY (is not set|contains a line break)"
    with pytest.raises(ConfigError, match=why):
        load_config([good], [reward("{k: {env: JUDGE_KEY}}")])


def test_an_error_message_has_the_source_in_place_of_the_secret(good: Path, judge_key: None):
    with pytest.raises(ConfigError, match=r"given: '\{env: JUDGE_KEY\}'"):
        load_config([good], ["rollout.n={env: JUDGE_KEY}"])
    assert hide(f"GET https://u:p@h/x?token=1 {SECRET}") == (
        "GET https://<redacted>@h/x?token=<redacted> {env: JUDGE_KEY}"
    )


def test_a_mapping_of_options_may_be_called_env(good: Path):
    config = load_config([good], [reward("{env: production}")])
    assert config.rewards.components[0].options == {"env": "production"}


@pytest.mark.parametrize(
    ("servers", "problem"),
    [
        ("{args: [--api-key, abc]}", r"args: --api-key would be on a command line.*servers\.api_key_env"),
        ("{args: ['--hf-token=abc']}", r"args: --hf-token would be on a command line"),
        (
            "{urls: ['http://me:pw@host:1']}",
            r"urls: an address with a user or a password.*servers\.api_key_env",
        ),
        ("{urls: ['http://:80']}", r"urls: 'http://:80': expected http://HOST:PORT"),
        ("{urls: ['http://host:99999']}", r"urls: 'http://host:99999': Port out of range"),
        ("{urls: ['http://[host:9']}", r"urls: 'http://\[host:9': Invalid IPv6"),
        ("{urls: ['http://host:80?api_key=x']}", r"expected http://HOST:PORT"),
    ],
)
def test_servers_settings_hold_no_secret(servers: str, problem: str, good: Path):
    given = yaml.load(good.read_text(), Loader)
    with pytest.raises(ConfigError, match=problem) as refused:
        build_config(given | {"rollout": {"engine": "vllm", "servers": yaml.load(servers, Loader)}})
    assert not {"abc", "pw@"} & set(str(refused.value).split())


def test_an_argument_of_a_server_is_no_place_for_a_secret(good: Path, tmp_path: Path, judge_key: None):
    overrides = [
        "rollout.engine=vllm",
        "rollout.servers.args=[--x, {env: JUDGE_KEY}]",
        f"output_dir={tmp_path}",
    ]
    with pytest.raises(ConfigError, match=r"rollout\.servers\.args: one has a secret"):
        start_servers(load_config([good], overrides), None, print)

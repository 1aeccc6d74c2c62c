"""Secrets are given as {env: NAME}, and nothing that a run writes or prints has them."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
import yaml

from megatron_gvpo.cli import keys, main
from megatron_gvpo.core import redaction, secrets
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.redaction import SHORTEST, hide, hide_in, hide_secrets
from megatron_gvpo.core.secrets import as_written, read_variable
from megatron_gvpo.core.yaml_files import Loader
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers.launch.start import start_servers
from megatron_gvpo.settings.config import build_config, load_config

SECRET = "s3cr3t-of-the-judge"


def reward(options: str) -> str:
    return f"rewards.components=[{{name: judge, function: 'a_judge.py:grade', options: {options}}}]"


@pytest.fixture(autouse=True)
def no_other_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test begin without the secrets of the tests before it, and leave none to those after it."""
    for module, name in ((redaction, "_known"), (secrets, "_sources")):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(redaction, "_spelled", [])


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
    sections = yaml.load(good.read_text(), Loader)
    key, value = reward(options).split("=", 1)
    config = build_config(sections | {"rewards": {key.split(".")[1]: yaml.load(value, Loader)}})
    assert as_written(config)["rewards"]["components"][0]["options"] == shown
    with pytest.raises(ConfigError, match=r"options\.[\w.]+: a secret on a command line.*`\{env: NAME\}`"):
        load_config([good], [reward(options)])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("api_key", "sk-12345678"),
        ("url", "https://me:pw@judge/v1"),
        ("url", "https://judge/v1?n=1&api_key=k1"),
    ],
)
def test_a_secret_that_a_run_removed_from_its_record_must_be_given_again(
    name: str, value: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sections = yaml.load(good.read_text(), Loader)
    judge = {"name": "judge", "function": "a.py:f", "options": {name: value}}
    record = tmp_path / "config.yaml"
    record.write_text(
        yaml.safe_dump(as_written(build_config(sections | {"rewards": {"components": [judge]}})))
    )
    key = f"rewards.components.0.options.{name}"
    with pytest.raises(ConfigError, match=rf"^{key}: the secret was removed .*'{key}=\{{env: NAME\}}'"):
        load_config([record])
    monkeypatch.setenv("JUDGE", value)
    again = load_config([record], [f"{key}={{env: JUDGE}}"])
    assert again.rewards.components[0].options == {name: value}


def test_a_text_about_redaction_is_no_removed_secret(good: Path):
    config = load_config([good], ["data.system_prompt='Write <redacted> for each name.'"])
    assert build_config(as_written(config)) == config


def test_a_file_with_a_literal_secret_is_noted(good: Path, capsys: pytest.CaptureFixture[str]):
    file = good.with_name("judge.yaml")
    file.write_text(
        "rewards: {components: [{name: r, function: 'r.py:f', options: {password: 'pass w0rd'}}]}\n"
    )
    assert main(["eval", str(good), str(file)]) == 2  # for want of data.eval
    error = capsys.readouterr().err
    assert "note: rewards.components.0.options.password: a secret in a configuration file" in error
    assert "w0rd" not in error


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


def test_a_secret_is_hidden_in_every_notation(monkeypatch: pytest.MonkeyPatch):
    secret = "k\"5'\\x/ 7+é%a"
    monkeypatch.setenv("ODD_KEY", secret)
    read_variable("ODD_KEY", "k")
    texts = [secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret), quote_plus(secret)]
    texts += [html.escape(secret), quote(secret, safe=""), json.dumps(secret, ensure_ascii=False)[1:-1]]
    for text in texts:
        assert hide(f"<{text}>") == hide_secrets(f"<{text}>") == "<{env: ODD_KEY}>", text
    for before in ("", "u", "me:", "user:"):
        code = base64.b64encode(f"{before}{secret}".encode()).decode()
        beginning, instead, end = hide(f"Basic {code}").partition("{env: ODD_KEY}")
        assert instead
        assert len(beginning) <= len("Basic ") + 2 + 4 * len(before) / 3 and len(end) <= 4
    assert hide_in({"a": [secret, 1, {"b": (None, f"x{secret}")}]}) == {
        "a": ["{env: ODD_KEY}", 1, {"b": [None, "x{env: ODD_KEY}"]}]
    }


def test_a_secret_is_hidden_where_a_text_was_cut_off_inside_it(judge_key: None):
    read_variable("JUDGE_KEY", "k")
    for length in range(SHORTEST, len(SECRET) + 1):
        for end in ("", " ...", "... (a.py, line 3)"):
            assert hide(f"key {SECRET[:length]}{end}") == f"key {{env: JUDGE_KEY}}{end}"
    elsewhere = f"{SECRET[:-1]}, and more"
    assert hide(elsewhere) == elsewhere


@pytest.mark.parametrize(
    ("name", "value", "key", "is_hidden"),
    [
        ("FIELD", "question", "data.train.prompt_key", False),
        ("KEY", "solution", "data.train.answer_key", False),
        ("FIELD", "correcthorse", "rewards.components.0.options.password", True),
        ("DB_PASSWORD", "horsebattery", "rewards.components.0.options.login", True),
        ("DB_PASSWORD", "horse", "rewards.components.0.options.login", False),
        ("PLACE", "runs/2026-11", "output_dir", False),
        ("PROJECT", "team7x", "logging.wandb_project", False),
        ("SITE", "team7x", "rewards.components.0.options.site", True),
        ("MINE", "q1w2e3r4", "teacher.servers.api_key_env", True),
    ],
)
def test_a_word_is_hidden_only_where_a_name_says_that_it_is_a_secret(
    name: str, value: str, key: str, is_hidden: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(name, value)
    assert read_variable(name, key) == value
    assert hide_secrets(f"the {value}?") == (f"the {{env: {name}}}?" if is_hidden else f"the {value}?")


def test_a_variable_that_is_a_part_of_a_path_leaves_the_path_as_it_is(
    good: Path, monkeypatch: pytest.MonkeyPatch
):
    """config.yaml had `output_dir: runs/{env: PROJECT}/x`, so that the resumed run began there anew."""
    monkeypatch.setenv("PROJECT", "team7x")
    monkeypatch.setenv("JUDGE_MODEL", "qwen3-8b")
    config = load_config(
        [good],
        [
            *("logging.wandb_project={env: PROJECT}", "output_dir=runs/team7x/run"),
            *(reward("{model: {env: JUDGE_MODEL}}"), "model.path=models/qwen3-8b"),
        ],
    )
    written = as_written(config)
    assert written["logging"]["wandb_project"] == {"env": "PROJECT"}
    assert written["output_dir"] == "runs/team7x/run" and written["model"]["path"] == "models/qwen3-8b"
    assert build_config(written) == config


def test_a_variable_inside_a_text_is_refused(good: Path):
    """It was given to the user's function as it stands."""
    key = "rewards.components.0.options.url"
    with pytest.raises(ConfigError, match=rf"^{key}: `\{{env: NAME\}}` stands for a whole value"):
        load_config([good], [reward("{url: 'https://{env: HOST}/v1'}")])


def test_keys_of_the_environment_are_hidden(good: Path, monkeypatch: pytest.MonkeyPatch):
    token, words = "wb-0123456789abcdef", {"PAD_TOKEN": "<|endoftext|>", "API_KEY": "/keys/of/2026.pem"}
    for name, value in {"WANDB_API_KEY": token, **words}.items():
        monkeypatch.setenv(name, value)
    load_config([good])
    assert hide_secrets(f"{token} {words}") == f"{{env: WANDB_API_KEY}} {words}"


def test_urls_in_data_keep_users_that_are_no_secrets_of_the_run(good: Path):
    sections = yaml.load(good.read_text(), Loader)
    url = "https://me:open-sesame@host/?api_key=q1w2e3r4"
    judge = {"name": "judge", "function": "a.py:f", "options": {"url": url}}
    build_config(sections | {"rewards": {"components": [judge]}})
    other = "postgres://app:apple@db/x?token=t1"
    assert hide_secrets(f"{other} open-sesame") == f"{other} <redacted>"
    assert hide_secrets("q1w2e3r4") == "<redacted>"
    assert hide(other) == "postgres://<redacted>@db/x?token=<redacted>"


def test_a_short_secret_is_noted(good: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("SHORT_PASSWORD", "abcd")
    assert (
        main(["eval", str(good), reward("{password: {env: SHORT_PASSWORD}}")]) == 2
    )  # for want of data.eval
    assert "note: {env: SHORT_PASSWORD}: a secret of fewer than 6 characters" in capsys.readouterr().err
    assert hide("abcd") == "abcd"


@pytest.mark.parametrize("kind", [RuntimeError, BaseException])
def test_the_traceback_of_an_unexpected_error_hides_secrets(
    kind: type[BaseException], good: Path, judge_key: None, monkeypatch: pytest.MonkeyPatch, capsys
):
    """`main` is what the installed program calls, and `python -m`."""
    load_config([good], [reward("{api_key: {env: JUDGE_KEY}}")])

    def fail(options: object) -> int:
        raise kind(f"401 for {SECRET}")

    monkeypatch.setattr(keys, "run", fail)
    assert main(["keys"]) == 1
    shown = capsys.readouterr().err
    assert "401 for {env: JUDGE_KEY}" in shown and "Traceback" in shown and SECRET not in shown


def test_a_refused_value_of_a_variable_is_not_shown(good: Path, monkeypatch: pytest.MonkeyPatch):
    """A short one is not sought in texts, so that `hide` would leave it there."""
    monkeypatch.setenv("SHORT", "tml-1")
    with pytest.raises(ConfigError, match=r"^train\.steps: .*\(given: '\{env: SHORT\}'\)$"):
        load_config([good], ["train.steps={env: SHORT}"])


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
        ("{urls: ['http://host:80', 'http://HOST:80/']}", r"urls: a server is named twice"),
    ],
)
def test_servers_settings_hold_no_secret(servers: str, problem: str, good: Path):
    sections = yaml.load(good.read_text(), Loader)
    with pytest.raises(ConfigError, match=problem) as refused:
        build_config(sections | {"rollout": {"engine": "vllm", "servers": yaml.load(servers, Loader)}})
    assert not {"abc", "pw@"} & set(str(refused.value).split())


def test_an_argument_of_a_server_is_no_place_for_a_secret(good: Path, tmp_path: Path, judge_key: None):
    overrides = [
        "rollout.engine=vllm",
        "rollout.servers.args=[--x, {env: JUDGE_KEY}]",
        f"output_dir={tmp_path}",
    ]
    with pytest.raises(ConfigError, match=r"rollout\.servers\.args: one has a secret"):
        config = load_config([good], overrides)
        start_servers(config.model, config.rollout, config.output_dir, ModelCards(config), None, print)

"""Slips of typing and copying are refused, or warned of, in words that show the slip."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.inputs.good_config import GOOD, message

from megatron_gvpo.algorithms.recipe import FREE_MAPPINGS
from megatron_gvpo.checks.files import check_data_files
from megatron_gvpo.cli.configured import load
from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.core.json_files import read_json_object
from megatron_gvpo.core.section import Section
from megatron_gvpo.core.user_functions import spec_parts
from megatron_gvpo.core.yaml_files import read_yaml
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.complete_weights import stored_tensors
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.settings.advice import advice
from megatron_gvpo.settings.config import load_config, split_words

SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 20,
    "intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optimizer.lr = 1e-4", "write the key without spaces: optimizer.lr=VALUE"),
        ("rewards.components[0].weight=2", "behind a point: rewards.components.0.weight=VALUE"),
        ("optimizer.lr=1e−4", "expected a number, and '−' in it is U+2212 (MINUS SIGN)"),
        ("optimizer={lr: 1,0e-4}", "is there a comma in a number, in place of a point?"),
        ("data.system_prompt=None", "data.system_prompt: YAML reads this word as a text: write null"),
        ("logging.wandb_project=none", "logging.wandb_project: YAML reads this word as a text: write null"),
        ("rollout.servers.model_path=None", "rollout.servers.model_path: YAML reads this word as a text"),
        ("optimizer.lr=''", "optimizer.lr: Input should be a valid number (given: '')"),
        ("data.system_prompt=Note: be brief", "found {'Note': 'be brief'}; YAML reads a colon and a space"),
        ("data.system_prompt=Note: be brief", """as 'data.system_prompt="TEXT"'"""),
        ("logging.profile_steps=[30,40]", "the run ends before, with train.steps=20"),
        ("algorithm={recipe: gdpo, estimator: {ddof: 7}}", "algorithm.estimator.ddof: Input should be less"),
        ("algorithm={recipe: gdpo, estimator: {wheights: 7}}", "did you mean 'algorithm.estimator.weights'?"),
        ("rewards.components=[{name: format, options: {pattern: '('}}]", "'(' is not a regular expression"),
        ("rewards.components=[{name: math, options: {marker: ''}}]", "options.marker is empty"),
        ("rewards.components=[{name: math, options: {marker: null}}]", "such as '####' with its quotes"),
        ("rewards.components=[{name: math, options: {marker: 4}}]", "want a text in quotes, not 4"),
        ("rewards.components=[{name: math, options: {markr: '#'}}]", "options.markr: no such option; the"),
    ],
)
def test_a_value_that_cannot_be_meant_shows_the_slip(good: Path, override: str, problem: str) -> None:
    assert problem in message(good, override)


@pytest.mark.parametrize("metric", ["eval/pass@8", "eval/all@1", "eval/all@2", "eval/pass@n"])
def test_the_best_checkpoint_is_chosen_by_a_metric_that_evaluations_report(good: Path, metric: str) -> None:
    """By any other, none would be the best, stop_early would end nothing, and hf would be pushed."""
    words = ["data.eval={path: held_out.jsonl}", "eval={every: 5, k: [1, 4]}"]
    best = ["checkpoint.every=5", f"checkpoint.keep_best.metric={metric}"]
    problem = message(good, *words, *best)
    assert f"metric={metric}: with eval.k=[1, 4] evaluations report eval/all@4, eval/pass@1, " in problem
    for k in ("pass@4", "all@4", "pass@1", "maj@n"):
        load_config([good], [*words, best[0], f"checkpoint.keep_best.metric=eval/{k}"])


@pytest.mark.parametrize("section", ["rollout.servers", "rewards.components.0.judge.servers"])
def test_an_address_with_v1_and_a_key_in_place_of_its_variables_name(good: Path, section: str) -> None:
    """The error does not repeat what may be the key."""
    judge = [
        "rewards.components=[{name: j, judge: {model: m, servers: {engine: openai, urls: ['http://h']}}}]"
    ]
    words = ["rollout.engine=vllm", *judge]
    problem = message(good, *words, f"{section}.urls=['https://api.example/v1']")
    assert "'https://api.example/v1': give the address without /v1" in problem
    problem = message(good, *words, f"{section}.api_key_env=sk-abc123")
    assert "api_key_env: expected the name of an environment variable" in problem and "abc123" not in problem


def test_a_marker_that_yaml_reads_as_a_comment(tmp_path: Path) -> None:
    """With `marker: ####` in a file, every response without a box was wrong."""
    (file := tmp_path / "run.yaml").write_text(
        f"{GOOD}rewards:\n  components:\n    - name: math\n      options:\n        marker: ####\n"
    )
    with pytest.raises(ConfigError, match=r"options\.marker is empty: want a text"):
        load_config([file])


@pytest.mark.parametrize("text", ["Solve # it", "# Task", "####"])
def test_an_override_has_no_comments(good: Path, text: str) -> None:
    """YAML would read the text after a space and `#` as a comment, and leave it out without a word."""
    assert load_config([good], [f"data.system_prompt={text}"]).data.system_prompt == text
    quoted = load_config([good], ["rollout.stop=['# a', '#']", "optimizer.lr=1e-4"])
    assert quoted.rollout.stop == ("# a", "#")
    assert "(given: '1e-4 # low')" in message(good, "optimizer.lr=1e-4 # low")


def test_a_path_with_an_equals_sign_is_a_configuration(good: Path, tmp_path: Path, monkeypatch) -> None:
    """Sweeps call their directories so; the run's own config.yaml was taken for an override."""
    file = tmp_path / "runs" / "lr=1e-4" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(good.read_text())
    monkeypatch.chdir(tmp_path / "runs")
    words = [str(file), "lr=1e-4/config.yaml", "output_dir=runs/lr=1e-4", "optimizer.lr=1e-4"]
    assert split_words(words) == (words[:2], words[2:])
    options = argparse.Namespace(config=words, nproc=0)
    assert load(options).output_dir == "runs/lr=1e-4"


def test_an_empty_mapping_empties_options_and_the_like(good: Path, tmp_path: Path) -> None:
    judge = "{name: judge, function: 'a.py:f', options: {deep: {limit: 1}}}"
    before = ["data.chat_template_kwargs={enable_thinking: false}", f"rewards.components=[{judge}]"]
    for empty in ("rewards.components.0.options", "rewards.components.0.options.deep"):
        config = load_config([good], [*before, f"{empty}={{}}", "data.chat_template_kwargs={}"])
        assert config.data.chat_template_kwargs == {}
        assert config.rewards.components[0].options == ({} if empty.endswith("options") else {"deep": {}})
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text("data: {chat_template_kwargs: {}}\n")
    full = tmp_path / "full.yaml"
    full.write_text("data: {chat_template_kwargs: {enable_thinking: false}}\n")
    assert load_config([good, full, overlay]).data.chat_template_kwargs == {}


def test_an_empty_mapping_that_would_change_nothing_is_refused(good: Path) -> None:
    assert message(good, "optimizer.muon.steps=3", "optimizer.muon={}") == (
        "override optimizer.muon={}: it would change nothing, because keys are merged; give the keys that "
        "are to change"
    )
    muon = load_config([good], ["optimizer.muon={}"]).optimizer.muon
    assert muon is not None and muon.steps == 5


def test_every_mapping_that_no_class_describes_can_be_emptied() -> None:
    """Two of estimators are left out: `weights: null` gives none, and `constraints` cannot be empty."""

    def below(section: type[Section]) -> Iterator[type[Section]]:
        for inner in section.__subclasses__():
            yield from (inner, *below(inner))

    fields = [
        field
        for section in below(Section)
        if section.__module__.startswith("megatron_gvpo.")
        for field in section.model_fields.items()
    ]
    names = {name for name, field in fields if "dict[" in str(field.annotation)}
    assert names == {*FREE_MAPPINGS, "settings", "weights", "constraints"}  # `settings` is a recipe's


@pytest.mark.parametrize(
    ("overrides", "lost"),
    [
        (["algorithm.loss.kl_coef=0", "algorithm=grpo"], "algorithm.loss.kl_coef"),
        (
            ["algorithm.recipe=gvpo", "algorithm.loss.kl_coef=0", "algorithm.recipe=grpo"],
            "algorithm.loss.kl_coef",
        ),
        (
            ["algorithm=dapo", "algorithm.shapers.0.weight=1", "algorithm.shapers=[]"],
            "algorithm.shapers.0.weight",
        ),
    ],
)
def test_an_override_that_a_later_one_would_drop(good: Path, overrides: list[str], lost: str) -> None:
    last = overrides[-1]
    wanted = f"override {lost}: {last} comes after it and replaces what it changes: give {last} first"
    assert message(good, *overrides) == wanted


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm=grpo", "algorithm.loss.kl_coef=0"],
        [
            "algorithm.recipe=gpg",
            "algorithm=grpo",
            "algorithm.loss.clip_low=0.1",
            "algorithm.loss={kl_coef: 0}",
        ],
        ["data.eval.path=held_out.jsonl", "eval.every=5", "data.eval=null"],
        [
            "algorithm=grpo",
            "algorithm.loss.kl_coef=0",
            "algorithm.loss.kl_coef=0.1",
            "rollout.stop=[a]",
            "rollout.stop=[b]",
        ],
    ],
)
def test_a_later_override_of_the_same_key_wins(good: Path, overrides: list[str]) -> None:
    load_config([good], overrides)


def test_a_rate_that_changes_nothing_is_warned_of(good: Path) -> None:
    assert "changes no weight" in (advice(load_config([good], ["optimizer.lr=1e-40"])) or "")
    assert "changes no weight" not in (advice(load_config([good], ["optimizer.lr=1e-9"])) or "")


def test_mappings_that_merge_each_other_without_end(tmp_path: Path) -> None:
    """Fails on the former loader, which counted the pairs of 9 ** 20 merges."""
    levels = (f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 21))
    (file := tmp_path / "run.yaml").write_text("a0: &a0 {x: 1}\n" + "".join(levels))
    with pytest.raises(ConfigError, match=r"run.yaml, line \d+: .*merged by << have more than 100,000 keys"):
        read_yaml(file)
    file.write_text("a: &a {seed: 3}\ntrain: {<<: *a, steps: 4}\n")
    assert read_yaml(file)["train"] == {"seed": 3, "steps": 4}


def test_options_and_files_that_look_like_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'–' is not the hyphen with which options begin"):
        read_yaml(Path("–-resume"))
    (tmp_path / "run.toml").write_text("a = 1\n")
    with pytest.raises(ConfigError, match="it is TOML; a configuration is a YAML file"):
        read_yaml(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("mine:f", None),
        ("mine.py: f", None),
        ("./mine:f", r"write mine\.py:f"),
        ("mine.ipynb:f", r"neither a module nor a file that ends with \.py"),
        ("mine.py:f:g", r"write path/file\.py:function"),
    ],
)
def test_a_functions_name_is_a_file_or_a_module(
    tmp_path, monkeypatch, spec: str, problem: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(): pass\n")
    if problem is None:
        assert spec_parts(spec)[1] == "f"
    else:
        with pytest.raises(ValueError, match=problem):
            spec_parts(spec)


def test_a_generators_reward_needs_its_problems(good: Path, tmp_path: Path) -> None:
    """Other records would score 0, each with an error, in every step."""
    file = tmp_path / "a.jsonl"
    words = [f"data.train.path={file}", "rewards.components=[{name: reasoning_gym}]"]
    file.write_text(json.dumps({"prompt": "1+1=", "answer": 2}))
    with pytest.raises(ConfigError, match="line 1: the reward reasoning_gym asks a problem's generator"):
        check_data_files(load_config([good], words), "train")
    file.write_text(json.dumps({"prompt": "1+1=", "answer": 2, "reasoning_gym": {}}))
    check_data_files(load_config([good], words), "train")
    check_data_files(load_config([good], ["data.train.path=reasoning_gym:x", words[1]]), "train")


def test_a_models_directory_that_was_not_downloaded_whole(tmp_path: Path) -> None:
    (tmp_path / "q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="it has GGUF files, which are quantised"):
        ModelCard.read(tmp_path)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="it is a pointer of Git LFS"):
        read_json_object(tmp_path / "config.json")
    with pytest.raises(DataError, match=r"tokenizer\.json: it is a pointer of Git LFS"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "a.safetensors.incomplete").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"the download of a\.safetensors\.incomplete has not ended"):
        stored_tensors(tmp_path, "model.path")

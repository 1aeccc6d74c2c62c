"""The record of a run, and the comparison of a resumed run with it."""

from __future__ import annotations

import json
import shlex
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from megatron_gvpo.algorithms.base import Block
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.secrets import as_written
from megatron_gvpo.core.section import EVERY_KEY, Section
from megatron_gvpo.runs.one_machine import load_run
from megatron_gvpo.runs.record import check_unchanged, fingerprints, settings_of, write_record
from megatron_gvpo.runs.settings_diff import changes, listed
from megatron_gvpo.settings.config import Config, load_config
from megatron_gvpo.settings.rewards import RewardsConfig


def sections(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections of a configuration; those whose keys are all of one kind without what is inside."""
    yield path, section
    for name, field in section.model_fields.items():
        for inner in (field.annotation, *typing.get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, Section) and not issubclass(inner, Block):
                yield from sections(inner, f"{path}{name}.")


@pytest.mark.parametrize(("path", "section"), list(sections(Config)), ids=lambda value: str(value) or "top")
def test_every_key_says_whether_it_changes_the_mathematics(path: str, section: type[Section]):
    """A new key goes into `fixed_keys` or `free_keys` of its section; see `Section`."""
    if EVERY_KEY in (section.fixed_keys, section.free_keys):
        assert () in (section.fixed_keys, section.free_keys)
        return
    named = [*section.fixed_keys, *section.free_keys]
    assert len(named) == len(set(named)) and set(named) <= section.model_fields.keys()
    for name, field in section.model_fields.items():
        inner = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        assert name in named or inner, f"{path}{name} is in neither list"


@pytest.fixture
def run(tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of a run that has left a record in `out`."""
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    Path("mine.py").write_text("def reward(prompt, rollout): return 1.0\n")
    good.write_text(good.read_text().replace("runs/x", "out"))
    write(good)
    return good


REWARD = 'rewards.components=[{name: mine, function: "mine.py:reward", options: {share: 0.5}}]'


def write(good: Path, *overrides: str) -> None:
    Path("out").mkdir(exist_ok=True)
    write_record(load_config([good], [REWARD, *overrides]), 0, 2)


def compare(run: Path, *overrides: str, allowed: tuple[str, ...] = ()) -> str:
    return listed(check_unchanged(load_config([run], [REWARD, *overrides]), allowed))


def test_the_saved_configuration_is_the_run_s_and_trains_again(run, monkeypatch):
    assert compare(run) == ""
    for recipe in ("gvpo_history", "ppo", "dapo"):
        config = load_config([run], [f"algorithm={recipe}", REWARD, "data.train.demonstration_key=solution"])
        monkeypatch.setattr(sys, "argv", ["/bin/megatron-gvpo", "train", str(run)])
        write_record(config, 0, 2)
        assert load_config(["out/config.yaml"]) == config
    record = json.loads(Path("out/run.json").read_text())
    assert [start["from_step"] for start in record["starts"]] == [0] * 4
    last = record["starts"][-1]
    assert last["command"] == shlex.join(["megatron-gvpo", "train", str(run)])
    assert last["world_size"] == 2 and {"torch", "transformers", "python"} < last["versions"].keys()
    assert last["git"]["directory"] is None, "the working directory is not a repository"
    assert last["git"]["megatron_gvpo"] is None or len(last["git"]["megatron_gvpo"]["commit"]) == 40


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("train.seed=1", r"train\.seed was 0 and is 1\."),
        ("optimizer.lr=2e-5", r"optimizer\.lr was 1e-05 and is 2e-05\."),
        ("optimizer.betas=[0.9,0.99]", r"optimizer\.betas was \[0\.9, 0\.95\] and is \[0\.9, 0\.99\]\."),
        ("model.dtype=float32", r'model\.dtype was "bfloat16" and is "float32"\.'),
        ("train.prompts_per_step=8", r"train\.prompts_per_step was 4 and is 8\."),
        ("rollout.temperature=0.5", r"rollout\.temperature was 1\.0 and is 0\.5\."),
        ("algorithm.loss.beta=0.3", r"algorithm\.loss\.beta was .* and is 0\.3\."),
        ("algorithm=dapo", r'algorithm\.recipe was "gvpo" and is "dapo"\.'),
        ("rewards.components.0.options.share=0.6", r"rewards\.components\.0\.options\.share was 0\.5 and"),
        ("data.train.limit=5", r"data\.train\.limit was null and is 5\."),
    ],
)
def test_what_changes_the_mathematics_is_refused_unless_it_is_allowed(run, override, change):
    with pytest.raises(ConfigError, match=rf"^output_dir=out: the run there was trained otherwise: {change}"):
        compare(run, override)
    with pytest.raises(ConfigError) as refused:
        compare(run, override)
    key = str(refused.value).rpartition("--allow-change ")[2]
    assert override.startswith(key.removesuffix(".recipe"))
    section = "algorithm" if key.startswith("algorithm") else key
    assert compare(run, override, allowed=(section,)) != "", "it is said"


@pytest.mark.parametrize(
    "override",
    ["train.steps=99", "parallel.tp=2", "logging.progress=off", "checkpoint.every=3", "eval.n=7"],
)
def test_what_does_not_is_said(run, override):
    assert compare(run, override).startswith(override.partition("=")[0] + " was ")


JUDGE = "{model: m, servers: {urls: ['http://a:1']}, request: %s}"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rewards.components.0.options=%s", ""),
        ("rewards.components.0.options.rules=[%s]", ".0"),
        ("rewards.components=[{name: quality, judge: " + JUDGE + "}]", ".0.judge.request"),
        ("data.chat_template_kwargs=%s", ""),
        ("rollout.conversation={environment: 'mine.py:reward', options: %s}", ".options"),
        ("algorithm.shapers=[{name: custom, function: 'shape.py:f', options: %s}]", ".0.options"),
    ],
)
def test_an_entry_that_only_one_side_has_in_a_mapping_of_the_users_is_refused(run, override, key):
    Path("shape.py").write_text("def f(group, **options): return []\n")
    write(run, override % "{first: 3, second: null}")
    key = override.partition("=")[0] + key
    for now, change in (
        ("{second: null}", f"{key}.first was 3 and is absent"),
        ("{first: 3}", f"{key}.second was null and is absent"),
        ("{first: 3, second: null, third: null}", f"{key}.third was absent and is null"),
    ):
        with pytest.raises(ConfigError) as refused:
            compare(run, override % now)
        assert f"trained otherwise: {change}. Resume" in str(refused.value)
        allowed = str(refused.value).rpartition("--allow-change ")[2]
        assert compare(run, override % now, allowed=(allowed,)) == change


def test_a_reward_models_servers_may_move_and_its_verdicts_may_not_change():
    def rewards(url: str, too_long: str) -> RewardsConfig:
        model = {"path": "m", "too_long": too_long, "servers": {"urls": [url]}}
        return RewardsConfig(components=[{"name": "quality", "model": model}])

    before, after = rewards("http://a:1", "error"), rewards("http://b:2", "drop")
    differences = changes(before.model_dump(mode="json"), after)
    fixed_by_key = {change.key: change.fixed for change in differences}
    at = "components.0.model"
    assert fixed_by_key == {f"{at}.too_long": True, f"{at}.servers.urls": False}


def test_other_paths_with_the_same_content_are_no_change(run):
    Path("train.jsonl").rename("moved.jsonl")
    assert (
        compare(run, "data.train.path=moved.jsonl")
        == 'data.train.path was "train.jsonl" and is "moved.jsonl"'
    )


@pytest.mark.parametrize(
    ("file", "key"), [("train.jsonl", "data.train.path"), ("mine.py", "rewards.components.0.function")]
)
def test_changed_files_are_found(run, file, key):
    before = Path(file).read_text()
    Path(file).write_text(before.replace("1", "3"))
    with pytest.raises(
        ConfigError, match=rf"{key} was .*(\d+) bytes, sha256 \w+.* and is .*\1 bytes"
    ) as refused:
        compare(run)
    assert f"--allow-change {key}" in str(refused.value)
    assert compare(run, allowed=(key,)).startswith(key)


def test_changed_files_that_options_and_commands_name_are_found(run: Path) -> None:
    """A list of words or a rubric decides a reward as its function does; only Python files were compared."""
    for name in ("words.txt", "rubric.md", "server.js", "program"):
        Path(name).write_text("one\n")
    options = {
        "words": "words.txt",
        "more": [{"rubric": str(Path("rubric.md").absolute())}],
        "none": "x" * 999,
    }
    component = {"name": "mine", "function": "mine.py:reward", "options": options}
    mcp = [{"command": ["program", "server.js"]}]
    settings = (
        f"rewards.components={json.dumps([component])}",
        f"rollout.conversation={json.dumps({'mcp': mcp})}",
    )
    write(run, *settings)
    Path("program").write_text("updated\n")
    assert compare(run, *settings) == ""
    keys = {
        "words.txt": "rewards.components.0.options.words",
        "rubric.md": "rewards.components.0.options.more.0.rubric",
        "server.js": "rollout.conversation.mcp.0.command.1",
    }
    for name, key in keys.items():
        Path(name).write_text("two\n")
        with pytest.raises(ConfigError, match=rf'{key} was "4 bytes, sha256 \w+" and is "4 bytes'):
            compare(run, *settings)
        assert compare(run, *settings, allowed=(key,)).startswith(key)
        Path(name).write_text("one\n")


@pytest.mark.parametrize("named", ["mine.py:f", "mine:f"])
@pytest.mark.parametrize("changed", ["mine.py", "judge.py", "inner/__init__.py", "inner/deep.py"])
def test_changed_files_that_a_users_file_imports_are_found(run: Path, named: str, changed: str) -> None:
    """The resumed run would go on with another reward. Only the file that is named was compared before."""
    Path("inner").mkdir()
    Path("mine.py").write_text("import json\n\ndef f(*_):\n    from judge import score\n    return 10\n")
    Path("judge.py").write_text("from inner.deep import limit\nimport numpy, absent  # 10\n")
    Path("inner/__init__.py").write_text("# 10\n")
    Path("inner/deep.py").write_text("from . import __name__\nimport judge\nlimit = 10\n")
    Path("json.py").write_text("# hidden by Python's own\n")
    own = f"rewards.components.0.function={named}"
    write(run, own)
    Path("json.py").write_text("# changed\n")
    assert compare(run, own) == ""
    Path(changed).write_text(Path(changed).read_text().replace("10", "11"))
    key = "rewards.components.0.function"
    file = "" if changed == "mine.py" else f"{changed}: "
    with pytest.raises(ConfigError, match=rf'{key} was "{file}\d+ bytes, sha256'):
        compare(run, own)
    assert compare(run, own, allowed=(key,)).startswith(key)


@pytest.mark.parametrize(("named", "own"), [("kit:f", "kit/__init__.py"), ("kit.inner:f", "kit/inner.py")])
@pytest.mark.parametrize("changed", ["kit/__init__.py", "kit/inner.py", "kit/beside.py"])
def test_changed_files_of_a_package_are_found(run: Path, named: str, own: str, changed: str) -> None:
    Path("kit").mkdir()
    Path("kit/__init__.py").write_text("from .inner import f\n")
    Path("kit/inner.py").write_text("from .beside import limit\ndef f(*_): return limit\n")
    Path("kit/beside.py").write_text("limit = 10\n")
    function = f"rewards.components.0.function={named}"
    write(run, function)
    assert compare(run, function) == ""
    Path(changed).write_text(Path(changed).read_text() + "# an edit\n")
    file = "" if changed == own else f"{Path(changed).name}: "
    line = rf'rewards\.components\.0\.function was "{file}\d+ bytes, sha256 \w+" and is [^;]*'
    with pytest.raises(ConfigError, match=rf"trained otherwise: {line}\. Resume"):
        compare(run, function)


@pytest.mark.parametrize(
    ("talk", "keys"),
    [
        ("{environment: talk.py:Talk}", ["environment"]),
        ("{program: talk.py:run}", ["program"]),
        ("{tools: [python, talk.py:add], parser: talk.py:calls}", ["parser", "tools.1"]),
        ("{mcp: [{command: [python, talk.py]}]}", ["mcp.0.command.1"]),
    ],
)
def test_a_changed_file_of_conversations_is_found(run: Path, talk: str, keys: list[str]) -> None:
    """The resumed run would mix two environments."""
    own = f"rollout.conversation={talk}"
    Path("talk.py").write_text("1")
    write(run, own)
    assert compare(run, own) == ""
    Path("talk.py").write_text("3")
    for key in keys:
        with pytest.raises(ConfigError, match=rf'rollout\.conversation\.{key} was "1 bytes, sha256'):
            compare(run, own, allowed=tuple(f"rollout.conversation.{k}" for k in keys if k != key))


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("{loss: {name: custom, function: own.py:f, reads: [reward]}}", "loss.function"),
        ("{recipe: grpo, estimator: {name: custom, function: own.py:f}}", "estimator.function"),
        ("{members: [{name: custom, function: own.py:f}]}", "members.0.function"),
        ("{shapers: [{name: affine}, {name: custom, function: own.py:f}]}", "shapers.1.function"),
    ],
)
def test_a_changed_file_of_the_method_is_found(run: Path, method: str, key: str) -> None:
    """The resumed run would go on with another loss, under the same configuration."""
    own = f"algorithm={method}"
    Path("own.py").write_text("def f(*given): return 1")
    write(run, own)
    assert compare(run, own) == ""
    Path("own.py").write_text("def f(*given): return 2")
    with pytest.raises(ConfigError, match=rf'algorithm\.{key} was "23 bytes, sha256'):
        compare(run, own)
    assert compare(run, own, allowed=("algorithm",)).startswith(f"algorithm.{key} ")


def test_a_directory_of_data_is_compared_by_names_and_content(tmp_path, good):
    (tmp_path / "data").mkdir()
    config = load_config([good], [f"data.train.path={tmp_path}/data"])
    seen = []
    for name, text in (("a.jsonl", "1"), ("b.jsonl", "2"), ("b.jsonl", "3")):
        (tmp_path / "data" / name).write_text(text)
        seen.append(fingerprints(config)["data.train.path"]["sha256"])
    assert len(set(seen)) == 3


def test_secrets_stay_out_of_the_record(run, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret-value")
    reward = (
        'rewards.components=[{name: mine, function: "mine.py:reward", options: {api_key: {env: JUDGE_KEY}}}]'
    )
    monkeypatch.setattr(sys, "argv", ["megatron-gvpo", "train", "judge=sk-very-secret-value"])
    config = load_config([run], [reward])
    write_record(config, 0, 1)
    text = Path("out/config.yaml").read_text() + Path("out/run.json").read_text()
    assert "sk-very-secret-value" not in text and "JUDGE_KEY" in text
    assert listed(check_unchanged(config, ())) == ""
    assert load_config(["out/config.yaml"]) == config


def test_a_secret_that_the_record_lacks_may_come_from_a_variable(run, monkeypatch):
    judge = "{name: mine, function: 'mine.py:reward', options: {api_key: sk-literal-value-1}}"
    Path("literal.yaml").write_text(f"rewards: {{components: [{judge}]}}\n")
    write_record(load_config([run, "literal.yaml"]), 0, 1)
    monkeypatch.setenv("JUDGE_KEY", "sk-other-value-2")
    again = load_run(Path("out"), ["rewards.components.0.options.api_key={env: JUDGE_KEY}"])
    assert again.rewards.components[0].options == {"api_key": "sk-other-value-2"}
    assert [change.key for change in check_unchanged(again, ())] == ["rewards.components.0.options.api_key"]


def test_an_edited_configuration_is_compared_as_the_run_had_it(run):
    """The run's own config.yaml was compared with itself, so that an edited learning rate went unnoticed."""
    file = Path("out/config.yaml")
    before, seed = file.read_text(), load_config([run]).train.seed
    file.write_text(before.replace(f"seed: {seed}", "seed: 77"))
    edited = load_config([file])
    with pytest.raises(ConfigError, match=rf"train\.seed was {seed} and is 77\..*\(config\.yaml differs"):
        check_unchanged(edited, ())
    assert "train.seed was" in listed(check_unchanged(edited, ("train.seed",)))
    assert compare(run) == "", "the settings of the run itself"
    record = json.loads(Path("out/run.json").read_text())
    del record["config"]  # as earlier versions wrote it
    Path("out/run.json").write_text(json.dumps(record))
    assert listed(check_unchanged(edited, ())) == ""


def test_a_key_that_a_new_version_has_added_had_its_default(good: Path):
    config = load_config([good])
    old = as_written(config)
    del old["train"]["seed"], old["algorithm"]["loss"]["beta"]
    assert changes(old, config) == []
    differences = changes(old, load_config([good], ["train.seed=4", "algorithm.loss.beta=0.3"]))
    assert listed(differences) == "algorithm.loss.beta was 0.1 and is 0.3; train.seed was 0 and is 4"


def test_a_key_that_a_new_version_no_longer_has_is_not_compared(good: Path):
    config = load_config([good])
    old = as_written(config)
    old["train"]["former"] = old["algorithm"]["loss"]["former"] = 1
    assert changes(old, config) == []


def test_what_cannot_be_compared_is_named(run):
    with pytest.raises(ConfigError, match=r"--allow-change optimizer\.learning_rate: .* no such key"):
        compare(run, allowed=("optimizer.learning_rate",))
    for name, content in (
        ("config.yaml", "[1]"),
        ("config.yaml", "a: [\x00"),
        ("config.yaml", "[" * 5_000),
        ("run.json", '{"files": 3}'),
    ):
        before = Path("out", name).read_text()
        Path("out", name).write_text(content)
        with pytest.raises(ConfigError, match=rf"out/{name}: "):
            compare(run)
        Path("out", name).write_text(before)
    for name in ("config.yaml", "run.json"):
        aside = Path("out", name).rename(Path("out", "aside"))
        with pytest.raises(ConfigError, match=rf"out/{name} is missing, with which settings and data are"):
            compare(run, "train.seed=4")
        aside.rename(Path("out", name))
    for name in ("config.yaml", "run.json"):
        Path("out", name).unlink()
    assert compare(run, "train.seed=4") == "", "a run of an earlier version has no record"


def test_a_step_has_the_settings_under_which_it_ran(run: Path):
    """Steps 1 to 5 of the start that ended at 7 were kept, and 41 on came after a second change."""
    Path("out/run.json").unlink()
    for step, steps in ((0, 50), (5, 60), (5, 60), (40, 60), (40, 90)):
        write_record(
            load_config([run], [REWARD, f"train.steps={steps}", f"logging.tensorboard={step > 5}"]), step, 1
        )
    expected = {1: (50, 0), 5: (50, 0), 6: (60, 5), 40: (60, 5), 41: (None, 40)}
    for step, (steps, since) in expected.items():
        settings, begin = settings_of(Path("out"), step)
        assert (settings and yaml.safe_load(settings)["train"]["steps"], begin) == (steps, since)
        assert load_run(Path("out"), step=step).train.steps == (steps or 90)

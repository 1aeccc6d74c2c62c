"""A user's file is checked by its source: a wrong name or argument is an error before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tiny_run import configure

from megatron_gvpo.checks.preflight import preflight
from megatron_gvpo.checks.user_source import check_source, check_tool
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.user_functions import load_function

# Importing it fails: nothing of it may run.
SOURCE = """
import os.path as place
from operator import pos as other

class Half:
    "It lacks a method."
    size: int = 3
    def reset(self, prompt, seed): pass

class Whole:
    def __init__(self, size=NOWHERE, *, deep: "int" = 1): pass
    async def reset(self, prompt, seed): pass
    def step(self, said): pass

class Deaf(object if 1 else None):
    pass

class Short:
    def reset(self, prompt): pass
    def step(self, said): pass

class Derived(Half):
    pass

@other
class Decorated:
    pass

def run(prompt, endpoint): pass
def alone(prompt): pass
def score(prompt, rollout, scale=1): pass

if place:
    later = run
raise RuntimeError("nothing runs")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(
    ("key", "name", "options", "problem"),
    [
        (
            "environment",
            "Nothing",
            {},
            "has no function 'Nothing'; it has: Half, Whole, Deaf, Short,",
        ),
        ("environment", "Half", {}, "it lacks step; an environment is a class with reset(prompt, seed) and"),
        ("environment", "run", {}, "it lacks reset and step"),
        ("environment", "Whole", {"wide": 1}, "it cannot be made with the options {'wide': 1}: got an unex"),
        (
            "environment",
            "Short",
            {},
            "reset does not take what it is called with, reset(prompt, seed): too",
        ),
        ("program", "Whole", {}, "it is a class; a program is a function run(prompt, endpoint)"),
        (
            "program",
            "alone",
            {},
            "it is called as run(prompt, endpoint) with options {}: too many positional",
        ),
        ("program", "nothing", {}, "has no function 'nothing'"),
        ("tools", "nothing", {}, "has no function 'nothing'"),
    ],
)
def test_what_a_conversation_names_is_checked_before_anything_is_loaded(
    task: Path, file: Path, tmp_path: Path, key: str, name: str, options: dict[str, int], problem: str
) -> None:
    named = [f"{file}:{name}"] if key == "tools" else f"{file}:{name}"
    talk = json.dumps({key: named, **({"options": options} if options else {})})
    rewards = () if key == "tools" else ("rewards.components=[{name: environment}]",)
    with pytest.raises(ConfigError, match=rf"rollout\.conversation\.{key}=.*mine\.py:{name}: ") as error:
        preflight(configure(task, tmp_path / "out", f"rollout.conversation={talk}", *rewards), "train", 1)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("nothing", {}, "has no function 'nothing'"),
        ("alone", {}, "it is called as f(prompt, rollout, **options) with options {}: too many"),
        ("score", {"scale": 2, "shift": 1}, "got an unexpected keyword argument 'shift'"),
    ],
)
def test_rewards_are_checked_so_too(
    task: Path, file: Path, tmp_path: Path, name: str, options: dict[str, int], problem: str
) -> None:
    component = json.dumps([{"name": "mine", "function": f"{file}:{name}", "options": options}])
    with pytest.raises(ConfigError, match=r"rewards\.components\.0\.function=") as error:
        preflight(configure(task, tmp_path / "out", f"rewards.components={component}"), "train", 1)
    assert problem in str(error.value)


def test_what_only_running_it_can_tell_is_not_refused(file: Path, tmp_path: Path) -> None:
    assert all(check_source(f"{file}:{name}") is None for name in ("Derived", "Decorated", "Deaf", "later"))
    assert check_source(f"{file}:other") is check_source(f"{file}:place") is None
    assert check_source(f"{file}:Whole") is not None
    for text in ("from os import *", "globals()['x'] = 1", "def __getattr__(name): pass"):
        (tmp_path / "dynamic.py").write_text(text)
        assert check_source(f"{tmp_path}/dynamic.py:anything") is None


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import json\nimport no_such_module.part\n", "line 2: there is no module 'no_such_module'"),
        ("from no_such_module import part\n", "line 1: there is no module 'no_such_module'"),
        ("from . import part\n", "line 1: a relative import, and the file is not in a package"),
        ("import beside\nimport json, os.path\n", None),
        ("try:\n    import no_such_module\nexcept ImportError:\n    pass\n", None),
        ("import sys\nsys.path.append('/elsewhere')\nimport no_such_module\n", None),
    ],
)
def test_modules_that_a_file_imports_are_looked_for(source: str, problem: str | None, tmp_path: Path) -> None:
    """Otherwise the run would load its model first, and then fail in the workers."""
    (tmp_path / "beside.py").touch()
    file = tmp_path / "mine.py"
    file.write_text(source + "def score(prompt, rollout): pass\n")
    if problem is None:
        check_source(f"{file}:score")
        return
    with pytest.raises(ValueError, match=rf"importing {file} failed: {problem}"):
        check_source(f"{file}:score")


def test_rewards_whose_helpers_have_one_name_are_refused(task: Path, tmp_path: Path) -> None:
    """The second was scored by the helper of the first, without a word."""
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "same_name.py").write_text(f"def extract(text): return '{directory}'\n")
        (tmp_path / directory / "reward.py").write_text(
            "def score(prompt, rollout):\n    from same_name import extract\n    return extract('')\n"
        )
    specs = [f"{tmp_path / directory / 'reward.py'}:score" for directory in ("a", "b")]
    components = json.dumps([{"name": f"r{i}", "function": spec} for i, spec in enumerate(specs)])
    second = tmp_path / "b" / "same_name.py"
    problem = rf"it imports same_name from {second}, but .*a/same_name\.py takes its place: rename one"
    with pytest.raises(ConfigError, match=rf"rewards\.components\.1\.function={specs[1]}: {problem}"):
        preflight(configure(task, tmp_path / "out", f"rewards.components={components}"), "train", 1)
    assert load_function(specs[0])(None, None) == "a"
    with pytest.raises(ValueError, match=problem):
        load_function(specs[1])
    second.rename(second.with_name("other_name.py"))
    file = tmp_path / "b" / "reward.py"
    file.write_text(file.read_text().replace("same_name", "other_name"))
    assert load_function(specs[1])(None, None) == "b"
    assert load_function(specs[0]).__module__ != load_function(specs[1]).__module__


def test_a_module_that_is_not_installed() -> None:
    with pytest.raises(ValueError, match=r"importing no_such\.part failed: there is no module no_such"):
        check_source("no_such.part:score")
    assert check_source("operator:pos") is None


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        ("completions, **kwargs", "TRL's"),
        ("prompts, completions, **kwargs", "TRL's"),
        ("solution_str, answer", "verl's"),
    ],
)
def test_rewards_of_other_trainers_are_named(arguments: str, form: str, task: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def score({arguments}): pass\n")
    component = json.dumps([{"name": "mine", "function": f"{file}:score"}])
    with pytest.raises(ConfigError, match=rf"that of {form} rewards; .*docs/howto/migrate.md"):
        preflight(configure(task, tmp_path / "out", f"rewards.components={component}"), "train", 1)


@pytest.mark.parametrize(
    ("arguments", "text", "problem"),
    [
        ("city", "Names.", "its argument city needs a type, as city: str"),
        ("city: str", "Names.", "its argument city needs a line under Args:"),
        (
            "city: str, *, far: bool = True",
            "Names.\n\n    Args:\n        city: It.",
            "its argument far needs a line",
        ),
        ("city: str", "Names.\n\n    Args:\n        city (str): It.", None),
        ("", "", None),
    ],
)
def test_tools_are_checked_so_too(arguments: str, text: str, problem: str | None, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f'def country({arguments}):\n    """{text}"""\n')
    if problem is None:
        check_tool(f"{file}:country")
        return
    with pytest.raises(ValueError, match=f"line 1: {problem}"):
        check_tool(f"{file}:country")


def test_tools_without_a_chat_template_are_refused_by_the_files(task: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text('def now():\n    """Tells the time."""\n')
    tools = f"rollout.conversation={{tools: ['{file}:now']}}"
    with pytest.raises(ConfigError, match=r"tools need a chat template.*has none \(chat_template.jinja\)"):
        preflight(configure(task, tmp_path / "out", tools), "train", 1)

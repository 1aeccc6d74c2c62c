"""Every block of README.md and docs/ is run, or says why not; its YAML is a configuration.

The marks that blocks have are explained in tests/helpers/doc_blocks.py.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.doc_blocks import NEEDS, ROOT, Block, blocks, commands, outside_of_blocks, pages
from helpers.inputs.good_config import GOOD

from megatron_gvpo import cli
from megatron_gvpo.core.yaml_files import Loader
from megatron_gvpo.settings.config import build_config
from megatron_gvpo.settings.tinker import TinkerConfig

ALL = [block for page in pages() for block in blocks(page)]
RUN = sorted({block.page for block in ALL if block.kind == "run"})
CONFIGURED = ("train", "eval", "export")  # commands that take overrides


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in ALL if block.language in languages]


@pytest.mark.parametrize("page", pages())
def test_code_is_fenced_and_has_a_language(page: str):
    assert [str(block) for block in blocks(page) if not block.language] == []
    indented = re.findall(
        r"\n\n {4,}\S[^\n]*", re.sub(r"(?m)^ *[-*\d][^\n]*(\n+ +[^\n]*)*", "", outside_of_blocks(page))
    )
    assert indented == []


@pytest.mark.parametrize("block", of("bash", "python"))
def test_every_command_block_is_run_or_says_why_not(block: Block):
    assert block.kind in ("run", "file", "elsewhere", "needs"), (
        f"{block} has no mark (tests/helpers/doc_blocks.py)"
    )
    if block.kind == "needs":
        assert block.value in NEEDS
    if block.kind == "elsewhere":
        path, _, why = block.value.partition(": ")
        assert path.startswith(("tests/", ".ci/")) and (ROOT / path).is_file() and why


@pytest.mark.parametrize("block", [pytest.param(b, id=str(b)) for b in ALL if b.kind == "file"])
def test_a_file_is_named_in_the_text_above_it(block: Block):
    above = outside_of_blocks(block.page).split("\n")[max(0, block.line - 8) : block.line - 1]
    assert f"`{block.value}`" in "\n".join(line for line in above if "<!--" not in line)


@pytest.mark.parametrize("block", [p for p in of("bash") if p.values[0].kind in ("needs", "elsewhere")])
def test_commands_that_are_not_run_are_understood(block: Block):
    """The command line's parser takes every `megatron-gvpo ...` in them."""
    for words in commands(block):
        if words[0] == "megatron-gvpo":
            cli.parse(words[1:])


@pytest.mark.parametrize("block", of("yaml"))
def test_yaml_is_a_configuration(block: Block, monkeypatch: pytest.MonkeyPatch):
    """A block is a whole configuration, or part of one, after the files that commands name before it."""
    from megatron_gvpo.algorithms.recipe import merge

    files = {b.value: b for b in blocks(block.page) if b.kind == "file" and b.language == "yaml"}
    values = yaml.load(GOOD, Loader)
    for words in (words for b in blocks(block.page) if b.language == "bash" for words in commands(b)):
        if block.kind == "file" and block.value in words:
            for word in words[: words.index(block.value)]:
                values = merge(values, yaml.load(files[word].text, Loader)) if word in files else values
    for variable in re.findall(r"\{env: (\w+)\}", block.text):
        monkeypatch.setenv(variable, f"tml-the value of {variable}")
    own = yaml.load(block.text, Loader)
    if "serve" in own:
        TinkerConfig.model_validate(own)
    else:
        build_config(merge(values, own))


@pytest.mark.parametrize("block", of("json", "jsonl"))
def test_json_is_json(block: Block):
    for line in block.text.splitlines():
        json.loads(line)


@pytest.fixture
def quickstart(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory like the repository after the quickstart, with the tiny task, and the current one."""
    from megatron_gvpo.core.user_functions import forget_functions
    from megatron_gvpo.megatron import parallel

    for name in ("examples", "benchmarks", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    runs = tmp_path / "runs" / "quickstart"
    (runs / "task").mkdir(parents=True)
    (runs / "sft").mkdir()
    for link, target in {
        "task/model": "model",
        "task/data": "data",
        "sft/hf": "model",
        "hf": "model",
    }.items():
        (runs / link).symlink_to(task / target)
    monkeypatch.chdir(tmp_path)
    forget_functions()  # names are relative to the current directory
    yield tmp_path
    forget_functions()
    parallel.shut_down()  # a Trainer from Python leaves its process group up


@pytest.mark.parametrize("page", RUN)
def test_the_page_runs(page: str, quickstart: Path):
    """The page's files are written and its blocks run, in order. A command that fails fails the test."""
    for block in blocks(page):
        if block.kind == "file":
            Path(block.value).write_text(block.text)
        elif block.kind == "run" and block.language == "bash":
            run_bash(block, quickstart)
        elif block.kind == "run":
            file = Path(f"block_{block.line}.py")
            file.write_text(block.text)
            runpy.run_path(str(file), run_name="__main__")


def run_bash(block: Block, directory: Path) -> None:
    """Run the commands by bash, and those of the program in this process, where nothing is loaded anew.

    In bash, `megatron-gvpo` only notes its arguments. A block with a loop is run as a whole, others line by
    line.
    """
    programs, calls = directory / "bin", directory / "calls"
    programs.mkdir(exist_ok=True)
    notes = f"printf '%q ' \"$@\" >> {calls}; echo >> {calls}"
    for name, script in {"megatron-gvpo": notes, "python": f'exec {sys.executable} "$@"'}.items():
        (programs / name).write_text(f"#!/bin/bash\n{script}\n")
        (programs / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    lines = block.text.replace("\\\n", " ").splitlines()
    loop = any(re.match(r"\s*(for|if|while) ", line) for line in lines)
    for text in [block.text] if loop else lines:
        calls.write_text("")
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], env=environment, timeout=300)
        assert done.returncode == 0, f"{block}: {text.strip()} ended with {done.returncode}"
        for call in calls.read_text().splitlines():
            words = shlex.split(call)
            words += block.overrides if words[0] in CONFIGURED else ()
            code = cli.main(words)
            assert code == 0, f"{block}: megatron-gvpo {shlex.join(words)} ended with {code}"

"""AGENTS.md, the skills and the citation say what is true: their files, commands and versions exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from helpers.doc_blocks import blocks
from helpers.paths import ROOT

from megatron_gvpo import __version__
from megatron_gvpo.cli import COMMANDS

PAGES = [ROOT / "AGENTS.md", *sorted((ROOT / "skills").glob("*/SKILL.md"))]
# A path begins with one of these, and ends where a placeholder begins.
_PATH = re.compile(r"`?((?:docs|tests|examples|core|algorithms|megatron_gvpo|skills)/[\w./-]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_names_files_that_exist(page: Path) -> None:
    text = page.read_text()
    paths = {match.rstrip("./") for match in _PATH.findall(text) if "<" not in match}
    assert paths, page
    paths -= {block.value for block in blocks(str(page)) if block.kind == "file"}  # the page writes them
    missing = [
        path
        for path in sorted(paths)
        if not any((root / path).exists() for root in (ROOT, ROOT / "megatron_gvpo"))
        and f"{path}<" not in text
        and f"{path}/<" not in text
        and not path.endswith("/ROOM")
    ]
    assert missing == [], page


def test_the_documentation_names_files_of_the_package_that_exist() -> None:
    package = ROOT / "megatron_gvpo"
    rooms = "|".join(path.name for path in package.iterdir() if path.is_dir())
    file = re.compile(rf"`(?:megatron_gvpo/)?((?:{rooms})/[\w/]+\.py)")
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for name in file.findall(page.read_text())
        if not (package / name).is_file()
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_a_page_names_commands_that_exist(page: Path) -> None:
    known = {command.__name__.rpartition(".")[2] for command in COMMANDS}
    text = page.read_text()
    assert set(re.findall(r"megatron-gvpo ([a-z]+)", text)) <= known
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)\b", text)) <= targets


def test_the_skills_have_a_name_and_a_description() -> None:
    for page in PAGES[1:]:
        head = yaml.safe_load(page.read_text().split("---")[1])
        assert head["name"] == page.parent.name.replace("_", "-")
        assert len(head["description"]) > 40


def test_the_citation_has_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__

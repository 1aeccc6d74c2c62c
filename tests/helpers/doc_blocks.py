"""The fenced blocks of README.md and docs/, each with the mark that says how it is tested.

A mark is an HTML comment on the line before the block:

    <!-- run -->                        run by tests/docs/test_commands.py, in the order of the page
    <!-- run small -->                  the same, with the sizes of the tests' tiny task
    <!-- run small: train.steps=2 -->   the same, with further overrides; also without `small`
    <!-- file: NAME -->                 written to NAME, for the blocks after it
    <!-- insert: NAME: BEGINNING -->    in skills: put into NAME, before the first line with this beginning
    <!-- elsewhere: PATH: WHY -->       run by PATH, a file of the repository, because it takes minutes
    <!-- needs: gpu -->                 not run here; also cluster, servers, network
"""

from __future__ import annotations

import re
from typing import NamedTuple

from helpers.paths import ROOT

SMALL = (
    *("train.prompts_per_step=4", "rollout.n=4", "rollout.max_tokens=10", "eval.n=2", "eval.k=[1,2]"),
    *(
        "eval.sampling.max_tokens=10",
        "optimizer.warmup_steps=0",
        "logging.progress=lines",
        "logging.tensorboard=false",
    ),
)
NEEDS = ("gpu", "cluster", "servers", "network")

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```", re.M | re.S)
_MARK = re.compile(r"<!-- (?P<mark>[^\n]*?) -->\n *\Z")


class Block(NamedTuple):
    page: str  # relative to the repository
    line: int
    language: str
    text: str
    mark: str  # empty without a mark

    @property
    def kind(self) -> str:
        """run, file, elsewhere, needs, or empty."""
        return re.split("[ :]", self.mark)[0]

    @property
    def value(self) -> str:
        """The text after the colon of the mark."""
        return self.mark.partition(": ")[2]

    @property
    def overrides(self) -> list[str]:
        """The overrides for every command of a `run` block that takes a configuration."""
        small = self.mark.partition(":")[0] == "run small"
        return [*(SMALL if small else ()), *self.value.split()]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """All Markdown pages that are tested, relative to the repository."""
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [file.relative_to(ROOT).as_posix() for file in files]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    parsed = []
    for fence in _FENCE.finditer(text):
        mark = _MARK.search(text[: fence.start()])
        line = text.count("\n", 0, fence.start()) + 1
        parsed.append(
            Block(page, line, fence["language"].strip(), fence["text"], mark["mark"] if mark else "")
        )
    return parsed


def outside_of_blocks(page: str) -> str:
    """The page's text, every line of a fenced block emptied."""
    return _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), (ROOT / page).read_text())


def commands(block: Block) -> list[list[str]]:
    """The words of each command line of a bash block; comments are left out, long lines joined."""
    import shlex

    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]

"""The commit that this package was made of, read from its git checkout or from the file that the build wrote.

setup.py runs this file, too, so it imports nothing but the standard library.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

FILE = "commit.txt"  # a file in the package's directory in wheels and images
_SECONDS = 10.0  # the most seconds that git may take


@dataclass(frozen=True, slots=True)
class Commit:
    commit: str
    dirty: bool  # tracked files differ from the commit

    def __str__(self) -> str:
        """The line of commit.txt: the commit's name, and ` changed` if files differ from it."""
        return f"{self.commit} changed" if self.dirty else self.commit


def checked_out(directory: Path) -> Commit | None:
    """The commit that is checked out in `directory`; None if git knows none, or takes more than 10 s."""
    try:
        commit = _git(directory, "rev-parse", "HEAD")
        return Commit(commit, bool(_git(directory, "status", "--porcelain", "--untracked-files=no")))
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or a slow file system
        return None


def package_commit(package: Path) -> Commit | None:
    """The commit of the package in the directory `package`, or None if nothing names it.

    A package that is only installed somewhere below another repository is not of that repository's commit.
    """
    try:
        return _parsed((package / FILE).read_text())
    except FileNotFoundError:
        pass
    try:
        of_git = _git(package, "ls-files", "__init__.py")
    except (OSError, subprocess.SubprocessError):
        return None
    return checked_out(package) if of_git else None


def _parsed(text: str) -> Commit | None:
    commit, _, rest = text.strip().partition(" ")
    return Commit(commit, rest == "changed") if commit else None


def _git(directory: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(directory), *words],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=True,
    ).stdout.strip()

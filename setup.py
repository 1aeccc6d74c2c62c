"""Writes the commit into wheels and source distributions; everything else is in pyproject.toml."""

import runpy
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

PACKAGE = Path(__file__).resolve().parent / "megatron_gvpo"


def write_commit(built: Path) -> None:
    functions = runpy.run_path(str(PACKAGE / "core" / "commit.py"))
    commit = functions["package_commit"](PACKAGE)
    if commit is not None:
        (built / functions["FILE"]).write_text(f"{commit}\n")


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable installation asks git whenever it is asked
            write_commit(Path(self.build_lib) / PACKAGE.name)


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: Any) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir) / PACKAGE.name)


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})

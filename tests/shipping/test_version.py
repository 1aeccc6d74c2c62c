"""`megatron-gvpo --version` names the commit of a checkout, a wheel, and a wheel of a source archive."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers.paths import ROOT

from megatron_gvpo import __version__

BUILT = ("megatron_gvpo", "setup.py", "pyproject.toml", "README.md", "LICENSE", ".gitignore")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=environment or None, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def commit_all(repository: Path) -> str:
    """Makes the directory a repository with all its files in one commit; returns the commit's name."""
    run("git", "init", "--quiet", cwd=repository)
    run("git", "add", "--all", cwd=repository)
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    run("git", *who, "commit", "--quiet", "--message", "all", cwd=repository)
    return run("git", "rev-parse", "HEAD", cwd=repository)


def shown_version(package_root: Path) -> str:
    """The output of `--version` of the package that lies in `package_root`."""
    command = (sys.executable, "-P", "-m", "megatron_gvpo", "--version")
    return run(*command, cwd=package_root, PATH="/usr/bin:/bin", PYTHONPATH=str(package_root))


def build(source: Path, kind: str, out: Path) -> Path:
    """Build a `wheel`, `sdist` or `editable` as pip does, with the setuptools of this environment."""
    out.mkdir(exist_ok=True)
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    return out / run(sys.executable, "-W", "ignore", "-c", program, cwd=source).splitlines()[-1]


def unpacked(wheel: Path, directory: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A repository of what a build needs, and the name of its one commit."""
    repository = tmp_path_factory.mktemp("source")
    listed = run("git", "ls-files", *BUILT, cwd=ROOT).splitlines()
    for name in listed:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_bytes((ROOT / name).read_bytes())
    return repository, commit_all(repository)


def test_a_checkout_names_its_commit_and_that_files_are_changed(source: tuple[Path, str]):
    repository, commit = source
    assert re.fullmatch(r"\d+\.\d+\.\d+(-[\w.]+)?", __version__), "Semantic Versioning"
    assert shown_version(repository) == f"megatron-gvpo {__version__} (commit {commit[:12]})"
    readme = repository / "README.md"
    text = readme.read_text()
    try:
        readme.write_text("changed")
        assert shown_version(repository) == f"megatron-gvpo {__version__} (commit {commit[:12]}, changed)"
    finally:
        readme.write_text(text)


def test_a_wheel_names_the_commit_that_it_was_built_from(source: tuple[Path, str], tmp_path: Path):
    """Also where it is installed below another repository, whose commit is not the program's."""
    repository, commit = source
    (tmp_path / "theirs.txt").write_text("of another project")
    commit_all(tmp_path)
    wheel = build(repository, "wheel", tmp_path / "dist")
    assert wheel.name == f"megatron_gvpo-{__version__}-py3-none-any.whl"
    installed = unpacked(wheel, tmp_path / "site")
    assert shown_version(installed) == f"megatron-gvpo {__version__} (commit {commit[:12]})"
    (installed / "megatron_gvpo" / "commit.txt").unlink()
    assert shown_version(installed) == f"megatron-gvpo {__version__} (commit unknown)"


def test_a_wheel_from_a_source_archive_names_the_commit(source: tuple[Path, str], tmp_path: Path):
    repository, commit = source
    with tarfile.open(build(repository, "sdist", tmp_path / "dist")) as archive:
        archive.extractall(tmp_path, filter="data")
    [archived] = tmp_path.glob("megatron_gvpo-*")
    installed = unpacked(build(archived, "wheel", tmp_path / "dist"), tmp_path / "site")
    assert shown_version(installed) == f"megatron-gvpo {__version__} (commit {commit[:12]})"


def test_an_editable_installation_writes_no_commit(source: tuple[Path, str], tmp_path: Path):
    """It asks git each time: what it wrote would be wrong after the next commit."""
    build(source[0], "editable", tmp_path)
    assert not (source[0] / "megatron_gvpo" / "commit.txt").exists()
    assert version("megatron-gvpo") == __version__

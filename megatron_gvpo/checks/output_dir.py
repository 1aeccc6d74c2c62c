"""Checks that a run can write to its output directory, and that it would not replace its own input."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.written import HEADER, OWN

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config


# Keys with these last names have files and directories that a run reads, or functions in files.
_READ = ("path", "model", "model_path", "function", "convert", "packages")


def check_output_dir(config: Config) -> None:
    """Raises ConfigError if a run cannot write to its output directory, or would replace its own inputs."""
    if not config.output_dir.strip():
        raise ConfigError("output_dir is empty: name a directory")
    directory = Path(config.output_dir)
    resolved = Path(os.path.realpath(directory))  # which takes links that lead back to themselves
    if resolved == Path(resolved.anchor):
        raise ConfigError(
            f"output_dir={directory} is the root of the file system: name a directory for the run"
        )
    there = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(there):
        raise ConfigError(f"output_dir={directory}: {there} is not a directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"output_dir={directory}: nothing can be written in {there}: permission denied")
    own_file = directory / "config.yaml"
    if own_file.is_file() and not own_file.read_bytes().startswith(HEADER.encode()):
        raise ConfigError(
            f"output_dir={directory}: a run writes its configuration to {own_file}, and another file "
            "has this name: rename it, or give another output_dir"
        )
    for key, path in _inputs(config.model_dump(exclude={"output_dir"})):
        if os.path.isdir(path) and directory.exists() and os.path.samefile(path, directory):
            raise ConfigError(f"output_dir={directory} is {key}: a run must not write into what it reads")
        for own in (directory / name for name in OWN):
            if os.path.lexists(path) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(own)):
                raise ConfigError(
                    f"{key}={path} is in {own}, which a run in output_dir={directory} replaces: give another "
                    "output_dir"
                )


def _inputs(values: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """Keys and paths of the files and directories that a configuration names to be read."""
    named = values.items() if isinstance(values, Mapping) else enumerate(values)
    for name, value in named:
        key = f"{at}.{name}" if at else str(name)
        if isinstance(value, Mapping | list | tuple):
            yield from _inputs(value, key)
        elif isinstance(value, str) and value and name in _READ:
            yield key, value.rpartition(".py:")[0] + ".py" if ".py:" in value else value

"""Checks of the files that a run reads and writes, before libraries and the model are loaded.

They check that the first record of each data file has the fields that the configuration names, because a
wrong key or a missing file is the commonest mistake of a first run; that the run can write to its output
directory; and that it would not replace its own input.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.data.generated import KEY, PREFIX
from megatron_gvpo.data.known_forms import as_dataset, recogniser
from megatron_gvpo.data.sources import Record, field_of, is_local, read_records
from megatron_gvpo.runs.written import HEADER, OWN
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.sections import DatasetConfig


def check_data_files(config: Config, command: str) -> None:
    """Raises ConfigError for a file of data that is missing, or whose first record lacks a field.

    Nothing is fetched or generated, and no function of the user's (`convert`) is called. The job that `slurm`
    writes may run on a machine with files that this machine lacks.
    """
    for dataset, sampler in ((config.data.train, config.algorithm.sampler), (config.data.eval, "engine")):
        if dataset is None or not is_local(dataset.path):
            continue
        if command == "slurm" and not os.path.lexists(dataset.path):
            continue
        try:
            record = _first_record(dataset, sampler)
            if record is not None and dataset is config.data.train:
                _check_generated(config, record)
        except DataError as error:
            raise ConfigError(str(error)) from None


def _check_generated(config: Config, record: Record) -> None:
    """Raises DataError if a reward asks the generator of a problem, and no generator made this record."""
    names = [component.name for component in config.rewards.components if component.built_in]
    if KEY in names and KEY not in record.fields and config.algorithm.sampler == "engine":
        raise DataError(
            f"{record.where}: the reward {KEY} asks a problem's generator, and this record has no field "
            f"{KEY!r}: name a generator as data.train.path, {PREFIX}NAME, or another reward"
        )


def _first_record(dataset: DatasetConfig, sampler: str) -> Record | None:
    """The first record; None where a function converts it.

    Raises DataError if its form is unknown, or if it lacks a field that a key names.
    """
    record = next(read_records(dataset.path, dataset.split, dataset.subset, limit=1), None)
    if record is None:
        raise DataError(f"{dataset.path}: no records")
    if dataset.convert is not None:
        return None
    record = recogniser(dataset, sampler)(record)
    keys = as_dataset(dataset, sampler)
    for name in ("prompt_key", "answer_key", "demonstration_key", "responses_key"):
        if (field := getattr(keys, name)) is not None:
            field_of(record, field, name)
    return record


# Keys with these ends name files and directories that a run reads. Functions in files may have any key.
_READ = (".path", ".speculation.model", ".model_path", ".packages")


def check_output_dir(config: Config) -> None:
    """Raises ConfigError if a run cannot write to its output directory, or would replace its own inputs."""
    if not config.output_dir.strip():
        raise ConfigError("output_dir is empty: name a directory")
    if "${" in config.output_dir:  # a variable of OmegaConf or Hydra, or of a shell in single quotes
        raise ConfigError(
            f"output_dir={config.output_dir}: nothing fills in ${{...}} here; write the name itself"
        )
    directory = Path(config.output_dir)
    resolved = Path(os.path.realpath(directory))  # realpath accepts links that lead back to themselves
    if resolved == Path(resolved.anchor):
        raise ConfigError(
            f"output_dir={directory} is the root of the file system: name a directory for the run"
        )
    existing = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(existing):
        raise ConfigError(f"output_dir={directory}: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"output_dir={directory}: nothing can be written in {existing}: permission denied, or read-only"
        )
    own_file = directory / "config.yaml"
    if own_file.is_file() and not own_file.read_bytes().startswith(HEADER.encode()):
        raise ConfigError(
            f"output_dir={directory}: a run writes its configuration to {own_file}, and another file "
            "has this name: rename it, or give another output_dir"
        )
    for key, path in inputs(config):
        if os.path.isdir(path) and directory.exists() and os.path.samefile(path, directory):
            raise ConfigError(f"output_dir={directory} is {key}: a run must not write into what it reads")
        for own in (directory / name for name in OWN):
            if os.path.lexists(path) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(own)):
                raise ConfigError(
                    f"{key}={path} is in {own}, which a run in output_dir={directory} replaces: give another "
                    "output_dir"
                )


def inputs(config: Config) -> Iterator[tuple[str, str]]:
    """Keys and paths of the files and directories that a configuration names to be read.

    Some may not exist: the name of a hub data set has the same keys.
    """
    yield from _inputs(config.model_dump(exclude={"output_dir"}))


def _inputs(values: Any, at: str = "") -> Iterator[tuple[str, str]]:
    named = values.items() if isinstance(values, Mapping) else enumerate(values)
    for name, value in named:
        key = f"{at}.{name}" if at else str(name)
        if isinstance(value, Mapping | list | tuple):
            yield from _inputs(value, key)
        elif isinstance(value, str) and ".py:" in value:
            yield key, value.rpartition(".py:")[0] + ".py"
        elif isinstance(value, str) and value and key.endswith(_READ):
            yield key, value

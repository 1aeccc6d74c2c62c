"""The first record of each data file has the fields that the configuration names.

A wrong key or a missing file is the commonest mistake of a first run. Without this check it is found only
after the libraries and the model have been loaded.
"""

from __future__ import annotations

import os

from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.data.generated import KEY, PREFIX
from megatron_gvpo.data.known_forms import as_dataset, recogniser
from megatron_gvpo.data.sources import Record, field_of, is_local, read_records
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.sections import DatasetConfig


def check_data_files(config: Config, command: str) -> None:
    """Raises ConfigError for a file of data that is missing, or whose first record lacks a field.

    Nothing is fetched or generated, and no function of the user's (`convert`) is called. The job that `slurm`
    writes may run where a file is that is not on this machine.
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

    Raises DataError if it is of no known form, or lacks a field that a key names.
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

"""The first record of each data file has the fields that the configuration names.

A wrong key or a missing file is the commonest mistake of a first run. Without this check it is found only
after the libraries and the model have been loaded.
"""

from __future__ import annotations

import os

from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.data.known_forms import as_dataset, recogniser
from megatron_gvpo.data.sources import field_of, is_local, read_records
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
            _check_first_record(dataset, sampler)
        except DataError as error:
            raise ConfigError(str(error)) from None


def _check_first_record(dataset: DatasetConfig, sampler: str) -> None:
    """Raises DataError if it is of no known form, or lacks a field that a key names."""
    record = next(read_records(dataset.path, dataset.split, dataset.subset, limit=1), None)
    if record is None:
        raise DataError(f"{dataset.path}: no records")
    if dataset.convert is not None:
        return
    record = recogniser(dataset, sampler)(record)
    keys = as_dataset(dataset, sampler)
    for key in (keys.prompt_key, keys.answer_key, keys.demonstration_key, keys.responses_key):
        if key is not None:
            field_of(record, key)

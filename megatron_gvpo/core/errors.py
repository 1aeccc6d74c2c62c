"""The errors of the package that users see. This module imports nothing."""

from __future__ import annotations


class ConfigError(ValueError):
    """The configuration cannot run. The message names the key, its value and a right one."""


class RolloutError(RuntimeError):
    """A server or an engine gave no responses; the message names it and the reason."""


class RewardError(ValueError):
    """Rewards from which the method cannot learn; every rank has the same ones, and raises it."""


class DataError(ValueError):
    """Data that cannot be trained on; the message names the file, line and field."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; earlier checkpoints are untouched."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing or has changed since the save; an older checkpoint may be intact."""

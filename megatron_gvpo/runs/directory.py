"""Locks a run's output directory, and removes the files that the run replaces."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_gvpo.core.collectives import all_ranks_agree
from megatron_gvpo.core.environment import is_first_process
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.existing_run import Earlier, check_earlier_run, newest_step, remove_earlier_run
from megatron_gvpo.runs.lock import RunLock
from megatron_gvpo.runs.record import check_unchanged, write_record
from megatron_gvpo.runs.settings_diff import listed
from megatron_gvpo.settings.config import Config

log = logging.getLogger(__name__)


class RunDirectory:
    """A run's claim on its output directory.

    `earlier`: how the run treats an earlier one there; `allowed`: the keys that may differ from its settings
    though they change the mathematics. The methods are collectives: rank 0 looks and writes, and its
    ConfigErrors are raised on all ranks.
    """

    def __init__(self, config: Config, earlier: Earlier, allowed: Sequence[str] = ()) -> None:
        self._config, self._earlier, self._allowed = config, earlier, allowed
        self._path = Path(config.output_dir)
        self._is_main = is_first_process()
        self._newest = newest_step(self._path)
        self._begun = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock of the directory.

        Raises ConfigError if another run holds it, or has written to the directory meanwhile.
        """
        with ExitStack() as opened:

            def claim() -> None:
                opened.enter_context(RunLock(self._config.output_dir))
                if not self._begun:
                    check_earlier_run(self._config, self._earlier)
                if (newest := newest_step(self._path)) != self._newest:
                    raise ConfigError(
                        f"output_dir={self._path}: another run has been there since this one looked: its "
                        f"newest checkpoint was of step {self._newest}, and is of step {newest}; start again"
                    )

            self._on_rank_0(claim)
            try:
                yield
            finally:
                self._newest = newest_step(self._path)

    def begin(self, step: int, resumed: bool, run: str | None) -> None:
        """Prepare the directory for a run from `step`: remove an earlier run's files, unless it is continued.

        The record of the run is written; `run` is the id in the checkpoint that is continued. A log line
        names the settings that differ from those of the continued run.
        """

        def write() -> None:
            changed = check_unchanged(self._config, self._allowed) if resumed else []
            if not (resumed or self._begun):
                if self._newest is not None and self._earlier != "overwrite":
                    raise ConfigError(
                        f"output_dir={self._path}: no checkpoint there was read; nothing was removed"
                    )
                remove_earlier_run(self._config.output_dir)
            # By this directory `--resume=auto` distinguishes a run whose checkpoints were removed from one
            # that never had any.
            (self._path / "checkpoints").mkdir(exist_ok=True)
            versions = write_record(self._config, step, int(os.environ.get("WORLD_SIZE", "1")), run)
            if changed or versions:
                differences = [listed(changed), *versions] if changed else versions
                log.warning("continued with other settings: %s", "; ".join(differences))

        self._on_rank_0(write)
        self._begun = True

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        with all_ranks_agree(ConfigError):
            try:
                if self._is_main:
                    action()
            except OSError as error:
                raise ConfigError(f"output_dir={self._path}: {error}") from error

"""Writes the responses of a run to OUTPUT_DIR/rollouts, in a thread beside training."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from megatron_gvpo.observe.rollouts.reader import DIRECTORY
from megatron_gvpo.observe.rollouts.schema import file_name, step_of
from megatron_gvpo.observe.rollouts.table import Responses, table
from megatron_gvpo.runs.written import drop_oldest

if TYPE_CHECKING:
    from megatron_gvpo.settings.sections import RolloutFilesConfig

log = logging.getLogger(__name__)

SECONDS = 300.0  # longest wait for one file; a step's responses are megabytes


class RolloutWriter:
    """Writes a file for each step and evaluation; used on rank 0, which has all responses.

    `components` are the names of the reward's. An earlier run's files up to `resume_step` stay; with None,
    none of them. A file is complete or absent: it is written under another name and then renamed. An error of
    a write is raised by the next `write`, or by `close`.
    """

    def __init__(
        self,
        output_dir: Path,
        settings: RolloutFilesConfig,
        components: Sequence[str],
        resume_step: int | None,
    ) -> None:
        self._directory, self._settings, self._components = output_dir / DIRECTORY, settings, components
        self._remove_after(-1 if resume_step is None else resume_step)
        self._waiting: queue.Queue[Responses | None] = queue.Queue(maxsize=1)
        self._failed: Exception | None = None
        self._has_dropped = False
        self._thread = threading.Thread(target=self._work, name="rollout files", daemon=True)
        self._thread.start()

    def problem(self, step: int) -> str | None:
        """A warning if the file of a step that a resumed run reported is missing; else None.

        The thread may be two files behind a checkpoint, so that a kill takes them.
        """
        settings, lost = self._settings, []
        for each in range(max(1, step - 2), step + 1):
            if settings.saves(each) and not (self._directory / file_name("train", each)).exists():
                lost.append(each)
        if step not in lost:
            return None
        steps = f"{'step' if len(lost) == 1 else 'steps'} {', '.join(map(str, lost))}"
        return (
            f"{self._directory} has no file of {steps}: the run ended before the responses were written, or "
            "saved none. The checkpoint is whole, and nothing writes them again"
        )

    def write(self, responses: Responses) -> None:
        """Queue the responses, which must not change any more; wait while two files are unwritten."""
        self._check()
        try:
            self._waiting.put(responses, timeout=SECONDS)
        except queue.Full:
            raise OSError(f"{self._directory}: a file of rollouts took over {SECONDS:g} s") from None

    def close(self) -> None:
        """Wait until all files are written. Raises OSError if a file takes too long; it may be lost."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=SECONDS)
            self._thread.join(SECONDS)
        if self._thread.is_alive() and self._failed is None:
            self._failed = OSError(f"{self._directory}: a file of rollouts took over {SECONDS:g} s")
        self._check()

    def _check(self) -> None:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _work(self) -> None:
        while (responses := self._waiting.get()) is not None:
            try:
                self._write(responses)
                self._drop_oldest()
            except Exception as error:  # it is raised later, in the trainer's thread
                self._failed = error

    def _write(self, responses: Responses) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / file_name(responses.kind, responses.step)
        aside = path.with_name(path.name + ".tmp")
        with aside.open("wb") as file:
            pq.write_table(
                table(responses, self._components, self._settings.groups), file, compression="zstd"
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)

    def _drop_oldest(self) -> None:
        removed = drop_oldest(self._steps(), self._settings.max_gb)
        if removed and not self._has_dropped:
            log.warning(
                "%s has reached logging.rollouts.max_gb=%g: from now on the oldest files are removed, "
                "first %s",
                self._directory,
                self._settings.max_gb,
                removed[0].name,
            )
            self._has_dropped = True

    def _remove_after(self, last: int) -> None:
        for path, step in self._steps().items():
            if step > last:
                path.unlink()
        for path in self._directory.glob("*.parquet.tmp"):
            path.unlink()

    def _steps(self) -> dict[Path, int]:
        """The run's files, each with its step."""
        steps = {path: step_of(path.name) for path in self._directory.glob("*.parquet")}
        return {path: step for path, step in steps.items() if step is not None}

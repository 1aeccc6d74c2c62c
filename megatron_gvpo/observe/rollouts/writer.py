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

if TYPE_CHECKING:
    from megatron_gvpo.settings.sections import RolloutFilesConfig

log = logging.getLogger(__name__)

SECONDS = 300.0  # longest wait for one file; a step's responses are megabytes


class RolloutWriter:
    """Writes a file for each step and evaluation that it is given; for rank 0, which has all responses.

    `components` are the names of the reward's. Of an earlier run's files those up to `resume_step` stay; None
    keeps none. A file is complete or absent: it is written under another name and then renamed. An error of
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
        self._full = False
        self._thread = threading.Thread(target=self._work, name="rollout files", daemon=True)
        self._thread.start()

    def write(self, responses: Responses) -> None:
        """Hand over the responses, which nobody may change any more; waits while two files are behind."""
        self._check()
        try:
            self._waiting.put(responses, timeout=SECONDS)
        except queue.Full:
            raise OSError(f"{self._directory}: a file of rollouts took over {SECONDS:g} s") from None

    def close(self) -> None:
        """Wait until all files are written. Raises OSError for one that takes too long, which may be lost."""
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
                self._drop_oldest(responses.step)
            except Exception as error:  # raised later, in the trainer's thread
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

    def _drop_oldest(self, newest: int) -> None:
        """Remove the oldest steps' files while all together are above the limit; those of `newest` stay."""
        sizes = {path: path.stat().st_size for path in self._files()}
        total, limit = sum(sizes.values()), self._settings.max_gb * 1e9
        for path in sorted(sizes, key=_step):
            if total <= limit or _step(path) == newest:
                break
            path.unlink(missing_ok=True)
            total -= sizes[path]
            if not self._full:
                log.warning(
                    "%s has reached logging.rollouts.max_gb=%g: from now on the oldest files are removed, "
                    "first %s",
                    self._directory,
                    self._settings.max_gb,
                    path.name,
                )
            self._full = True

    def _remove_after(self, step: int) -> None:
        for path in self._files():
            if _step(path) > step:
                path.unlink()
        for path in self._directory.glob("*.parquet.tmp"):
            path.unlink()

    def _files(self) -> list[Path]:
        return [path for path in self._directory.glob("*.parquet") if step_of(path.name) is not None]


def _step(path: Path) -> int:
    step = step_of(path.name)
    assert step is not None
    return step

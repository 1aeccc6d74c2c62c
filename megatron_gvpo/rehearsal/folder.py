"""A rehearsal's own folder in the temporary directory, and the end of those that a killed one has left."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "rehearsal-"
_LOCK = "lock"  # a file in the folder, locked while its rehearsal runs, however that ends


@contextmanager
def rehearsal_folder() -> Iterator[Path]:
    """A folder for the block, which is removed after it, as are those of this user's dead rehearsals."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # another rehearsal may remove it at the same time
            _remove_if_dead(lock)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        with open(folder / "unlocked", "w") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            os.rename(folder / "unlocked", folder / _LOCK)  # no other rehearsal sees it without its lock
            yield folder


def _remove_if_dead(lock: Path) -> None:
    """Raises OSError for a folder that a rehearsal has."""
    if lock.is_symlink() or os.lstat(lock.parent).st_uid != os.geteuid():
        return
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)

"""The lock on an output directory: one run at a time writes there.

The lock is an open-file-description lock on OUTPUT_DIR/run.lock. The kernel releases it when the process
ends, however it ends. NFS servers know it: they keep machines apart, and release the lock of one that failed
when its lease is over (`tests/runs/test_lock_on_nfs.py`). Programs that the run starts do not hold it (the
descriptor is closed on exec), nor do forked children, which close it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import struct
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.written import json_object

log = logging.getLogger(__name__)

FILE = "run.lock"
# Seconds to wait for a lock. The first is for a lock of a living process, which may be about to end, as a
# killed process lives on for a moment; the second for a process that is ending, which frees its memory first,
# or is on another machine.
PATIENCE_WITH_LIVING, PATIENCE = 1.0, 10.0
# Seconds to wait for the lock of an earlier start of the same cluster job: an NFS server keeps the lock of a
# machine that failed until the machine's lease is over, which takes 90 s by default.
PATIENCE_WITH_FAILED_NODE = 120.0
_EXITING = 0x4  # PF_EXITING in the flags of /proc/PID/stat

_open: set[int] = set()  # descriptors of the locks that this process holds


def _close_in_child() -> None:
    while _open:
        with suppress(OSError):
            os.close(_open.pop())


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """A context manager that holds the lock on `output_dir`, which it makes if it must.

    On exit it removes its file, and directories that it made if they are still empty.
    """

    def __init__(self, output_dir: str) -> None:
        self._directory = Path(output_dir)
        self._made: list[Path] = []
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Raises ConfigError, which names host, process and time, if another run holds the lock."""
        try:
            chain = (self._directory, *self._directory.parents)
            self._made = [path for path in chain if not os.path.lexists(path)]
            self._directory.mkdir(parents=True, exist_ok=True)
            _wait_until_free(self._directory)
            self._take()
        except OSError as error:
            self.release()
            problem = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise ConfigError(
                f"output_dir={self._directory}: the lock {FILE} cannot be written: {problem}"
            ) from None
        except ConfigError:
            self.release()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):
                (self._directory / FILE).unlink()
            _open.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
        with suppress(OSError):  # the directory is not empty, because the run has written something
            while self._made:
                self._made.pop(0).rmdir()

    def _take(self) -> None:
        path = self._directory / FILE
        while self._descriptor is None:
            # A link could lead to another user's file.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            try:
                if _lock(descriptor, path):
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        _open.add(self._descriptor)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, (json.dumps(_holder()) + "\n").encode(), 0)


def _lock(descriptor: int, path: Path) -> bool:
    """Lock the open file; False if it no longer has this path, because its holder has just removed it.

    Raises ConfigError if another run holds the lock. On a file system without locks it recognises a run on
    this machine by the process that the file names, and warns that runs on other machines are not kept out.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _whole_file(fcntl.F_WRLCK))
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise ConfigError(_refusal(path.parent)) from None
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        if _lives_here(_read_holder(path.parent)):
            raise ConfigError(_refusal(path.parent)) from None
        log.warning(
            "output_dir=%s: its file system has no locks (%s): nothing keeps a run on another machine out",
            path.parent,
            error.strerror,
        )
        return True


def check_unlocked(output_dir: str) -> None:
    """Raises ConfigError, which names host, process and time, if a run writes to the directory.

    It writes nothing. It waits for a run that is ending.
    """
    _wait_until_free(Path(output_dir))


def _wait_until_free(directory: Path) -> None:
    begin = time.monotonic()
    while is_locked(directory):
        if time.monotonic() - begin >= _patience(_read_holder(directory)):
            raise ConfigError(_refusal(directory))
        time.sleep(0.1)


def is_locked(directory: Path) -> bool:
    """True if a run writes to the output directory."""
    try:
        descriptor = os.open(directory / FILE, os.O_RDONLY | os.O_NONBLOCK)  # a pipe may have this name
    except OSError:  # there is no such file, or a later write reports why it cannot be read
        return False
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _whole_file(fcntl.F_WRLCK))
    except OSError:
        return False
    finally:
        os.close(descriptor)
    kind: int = struct.unpack_from("h", answer)[0]
    return kind != fcntl.F_UNLCK


def _whole_file(kind: int) -> bytes:
    """A `struct flock` of 64-bit Linux for the whole file."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)


def _holder() -> dict[str, Any]:
    job, start = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
    if "MEGATRON_GVPO_LOGS" in os.environ:  # in a job of `slurm`, `k8s` or `sky` its name is JOB.START
        job, _, start = Path(os.environ["MEGATRON_GVPO_LOGS"]).name.rpartition(".")
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "process": _process(os.getpid()),
        "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "job": job,
        "start": start,
    }


def _read_holder(directory: Path) -> dict[str, Any]:
    """The holder's description of itself; empty while it has not written it."""
    return json_object(directory / FILE)


def _lives_here(holder: dict[str, Any]) -> bool:
    """True if the holder is a process of this machine; a pod's successor may have its host name and pid."""
    process = holder.get("process")
    is_here = holder.get("host") == platform.node()
    return is_here and process is not None and process == _process(holder.get("pid"))


def _patience(holder: dict[str, Any]) -> float:
    if _lives_here(holder):
        return PATIENCE_WITH_LIVING
    own = _holder()
    earlier_start = holder.get("job") == own["job"] is not None and holder.get("start") != own["start"]
    return PATIENCE_WITH_FAILED_NODE if earlier_start else PATIENCE


def _process(pid: object) -> str | None:
    """The machine's boot and the process's start, in clock ticks after it; None if it ends or has ended."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if int(fields[6]) & _EXITING else f"{boot} {fields[19]}"


def _refusal(directory: Path) -> str:
    holder = _read_holder(directory)
    who = "another run"
    if holder:
        who = f"a run on {holder.get('host')} (process {holder.get('pid')}, since {holder.get('since')})"
    gone = "" if _lives_here(holder) else f"; if that machine is gone, remove {directory / FILE}"
    return (
        f"output_dir={directory}: {who} is writing there: wait for its end, stop it, or give another "
        f"output_dir{gone}"
    )

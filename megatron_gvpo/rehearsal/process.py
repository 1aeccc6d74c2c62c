"""Starts the process of rehearsed ranks: its folder, its environment with the null CUDA, and its results."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.gpu_packages import REHEARSAL
from megatron_gvpo.rehearsal import transformer_engine
from megatron_gvpo.rehearsal.nullcuda import build
from megatron_gvpo.rehearsal.nullcuda.build import NullCudaError
from megatron_gvpo.rehearsal.nullcuda.devices import GIB, Device, environment
from megatron_gvpo.rehearsal.progress import follow, to_stderr
from megatron_gvpo.rehearsal.rank import PROGRESS, RankJob

PREFIX = "rehearsal-"
_LOCK = "lock"  # the file in the folder that is locked while the rehearsal's process lives


@contextmanager
def rehearsal_folder() -> Iterator[Path]:
    """A folder that exists within the block. Folders of this user's dead rehearsals are removed, too."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_LOCK}"):
        with suppress(OSError):  # another rehearsal may remove it at the same time
            _remove_if_dead(lock)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        with open(folder / "unlocked", "w") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            # The file gets its name after it was locked, so that no other rehearsal finds it unlocked.
            os.rename(folder / "unlocked", folder / _LOCK)
            yield folder


def _remove_if_dead(lock: Path) -> None:
    """Remove the folder of a rehearsal that has ended. Raises OSError for the folder of a running one."""
    if lock.is_symlink() or os.lstat(lock.parent).st_uid != os.geteuid():
        return
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)


def environment_of_ranks(device: Device, count: int, usable: int) -> dict[str, str]:
    """The variables of a rank's process. Raises ConfigError if something is missing on this machine."""
    try:
        engine = transformer_engine.find()
        if engine is None:
            build.pytorch_libraries()  # fails first if PyTorch's libraries are missing
            raise ConfigError(
                "Transformer Engine with its compiled extension is missing: `megatron-gvpo rehearse --build` "
                f"compiles it once, in about ten minutes, and keeps it in {build.cache()}"
            )
        library = build.build(engine.package)
    except NullCudaError as error:
        raise ConfigError(str(error)) from None
    _check_reservation(usable)
    compiled = build.cache()
    path = [
        str(part) for part in (Path(__file__).parents[2], engine.path, os.environ.get("PYTHONPATH")) if part
    ]
    return environment(library, device, count, usable) | {
        REHEARSAL: "1",
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))),
        # A process that trains on the CPU disables torch.compile for its children (megatron/cpu/device.py). A
        # GPU run compiles, and keeps fewer activations.
        "TORCH_COMPILE_DISABLE": "0",
        "TORCHDYNAMO_DISABLE": "0",
        # Kernels compiled for a device that is not there stay apart, and no helper process compiles them.
        "TRITON_CACHE_DIR": str(compiled / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def _check_reservation(size: int) -> None:
    """Raises ConfigError if this process may not reserve the device's addresses, which takes no memory."""
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        mmap.mmap(-1, size, flags=flags).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"no room to reserve {size / GIB:.0f} GiB of address space ({error}): raise `ulimit -v`, or set "
            "vm.overcommit_memory to 0 or 1; no memory is used"
        ) from None


def run_jobs(
    jobs: Sequence[RankJob],
    variables: dict[str, str],
    folder: Path,
    report: Callable[[str], None] = to_stderr,
) -> Iterator[dict[str, Any]]:
    """Run the jobs in one process, and yield their results in order. All its files are in `folder`.

    `report` gets a line for each phase that ends. Raises ConfigError if a rank refuses the configuration,
    StuckRankError if a phase does not end, RankFailedError if a rank ends otherwise.
    """
    file = folder / "jobs.json"
    file.write_text(json.dumps([asdict(job) for job in jobs]))
    module = "megatron_gvpo.rehearsal.rank"
    command = [sys.executable, "-W", "ignore", "-m", module, str(file), str(os.getpid())]
    # Libraries make folders of temporary files when they are imported, and a rank may be killed.
    environment = os.environ | variables | {"TMPDIR": str(folder)}
    output = folder / "output"
    with output.open("w") as opened:
        process = subprocess.Popen(command, env=environment, stdout=opened, stderr=opened, text=True)
    try:
        code = follow(process, folder / PROGRESS, report)
    finally:
        process.kill()  # its ranks end with it
        process.wait()
    for number, job in enumerate(jobs):
        result_file, log = folder / f"result-{number}", folder / f"log-{number}"
        if not result_file.is_file():
            raise RankFailedError(job.rank, code, output.read_text(errors="replace"))
        result: dict[str, Any] = json.loads(result_file.read_text())
        if "failed" in result:
            raise RankFailedError(job.rank, result["failed"], log.read_text(errors="replace"))
        if "error" in result:
            raise ConfigError(result["error"])
        yield result


class RankFailedError(Exception):
    """A rank's process ended with an error that the configuration did not cause."""

    def __init__(self, rank: int, code: int, log: str) -> None:
        lines = [line for line in log.splitlines() if line.strip()]
        end = f"rank {rank} failed with exit code {code}"
        if code == -signal.SIGKILL:
            end = f"rank {rank} was killed by SIGKILL: this machine may have had no memory left"
        super().__init__("\n".join([*lines[-40:], end]))

"""Runs a function of a module under tests/ on real gloo process groups of several sizes.

    launch("gradient_worker:run", [1, 2, 4], "a directory")

starts one clean process, which imports megatron-core and Megatron-Bridge (this takes longer than most tests)
and then forks the ranks of every size, one size after the other. Every rank has a default process group. The
function gets the remaining strings, and writes its results to files. A size may occur several times, and
`run_number()` tells which run it is: new ranks are cheap, while a Megatron layout that is no longer used is
not, because its groups keep hundreds of threads.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from real_parts import used

COLLECTIVE_TIMEOUT = timedelta(seconds=120)


def launch(target: str, sizes: Sequence[int], *arguments: str, timeout: float = 600) -> None:
    """Run `target` ("module:function") once with every number of ranks in `sizes`.

    Raises AssertionError with the end of the output if a rank fails, or is not done in `timeout` seconds.
    """
    command = [sys.executable, "-W", "ignore", __file__, target, ",".join(map(str, sizes)), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            problem = f"exit status {code}" if (code := process.wait(timeout)) else None
        except subprocess.TimeoutExpired:
            problem = f"not done after {timeout:.0f} s"
        finally:
            _kill_session(process)
        log.seek(0)
        assert problem is None, (
            f"{target} on {sizes} ranks: {problem}; its output ends:\n{log.read()[-6000:]}"
        )
    for size in set(sizes):
        used(f"megatron-core and Megatron-Bridge, {size} rank{'s' * (size > 1)}")


def forget_layout() -> None:
    """Tear down a Megatron layout so that the next one can be built; megatron-core leaves its groups behind.

    Every group has its own threads: hundreds for many layouts, which would crowd the machine.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def run_number() -> int:
    """The position of this run in the `sizes` of its launch; called in a rank."""
    return int(os.environ["LAUNCH_RUN"])


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """End the process and the ranks, which are in the session of the process that forked them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rank(rank: int, target: str, size: int, run: int, store: str, arguments: Sequence[str]) -> None:
    import torch.distributed as dist

    os.environ["LAUNCH_RUN"] = str(run)

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
    )
    module, function = target.split(":")
    getattr(importlib.import_module(module), function)(*arguments)
    dist.destroy_process_group()


def _main(target: str, sizes: str, *arguments: str) -> None:
    import torch.multiprocessing as mp

    for module in ("megatron_gvpo.megatron.policy", target.split(":")[0]):
        importlib.import_module(module)
    importlib.import_module("megatron_gvpo.megatron.cpu.bridge").import_bridge()
    for run, size in enumerate(map(int, sizes.split(","))):
        print(f"{target}, run {run}, on {size} rank(s)", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            store = str(Path(directory) / "store")
            mp.start_processes(_rank, (target, size, run, store, arguments), nprocs=size, start_method="fork")


if __name__ == "__main__":
    _main(*sys.argv[1:])

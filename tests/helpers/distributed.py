"""Runs a function of a module under tests/ on real gloo process groups of several sizes.

    launch("helpers.workers.gradient_worker:run", [1, 2, 4], "a directory")

With `emulated`, every rank has an emulated GPU.

The first launch starts one clean process that imports megatron-core and Megatron-Bridge, which takes longer
than most tests, and lives as long as pytest. Each launch forks it, and the fork forks the ranks of every
size, one size after the other. Every rank has a default process group. The function gets the remaining
strings, and writes its results to files. A size may occur several times, and `run_number()` tells which run
it is: new ranks are cheap, while a Megatron layout that is no longer used is not, because its groups keep
hundreds of threads.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from helpers.paths import IMPORTS
from helpers.suite.real_parts import used

IMPORT_SECONDS = 900.0  # enough on a busy machine
# true in the process that forks emulated ranks
IS_EMULATED = __name__ == "__main__" and sys.argv[1:] == ["emulated"]
# A rank with an emulated GPU may compute for minutes on a busy machine while the others wait for it.
COLLECTIVE_TIMEOUT = timedelta(seconds=900 if IS_EMULATED else 120)

FAILED_PATIENCE = 5.0  # seconds; ranks that fail together reach the end of a run within them


def launch(
    target: str,
    sizes: Sequence[int],
    *arguments: str,
    timeout: float = 600,
    emulated: bool | str = False,
) -> None:
    """Run `target` ("module:function") once with every number of ranks in `sizes`.

    `emulated`: the name of the GPU that each rank emulates; True is "h100".

    Raises AssertionError with the end of the output if a rank fails, or is not done in `timeout` seconds.
    """
    device = "h100" if emulated is True else emulated or ""
    server = _fork_server(device)
    variables = _variables(device)
    with tempfile.NamedTemporaryFile("r") as log:
        order = {
            "target": target,
            "sizes": list(sizes),
            "arguments": arguments,
            "environment": {**os.environ, **variables, "OMP_NUM_THREADS": "1"},
            "path": sys.path,
            "directory": os.getcwd(),
            "log": log.name,
        }
        assert server.stdin is not None
        server.stdin.write(json.dumps(order).encode() + b"\n")
        server.stdin.flush()
        process = _answer(server, IMPORT_SECONDS)
        if process is None:  # a late answer would be taken for the answer to the next order
            server.kill()
            _fork_server.cache_clear()
        assert process is not None, f"{target}: no process for the ranks after {IMPORT_SECONDS:.0f} s"
        try:
            code = _answer(server, timeout)
            problem = f"not done after {timeout:.0f} s" if code is None else f"exit status {code}"
        finally:
            with contextlib.suppress(ProcessLookupError):  # the ranks are in the session of their parent
                os.killpg(process, signal.SIGKILL)
        if code is None:
            _answer(server, IMPORT_SECONDS)
        assert code == 0, f"{target} on {sizes} ranks: {problem}; its output ends:\n{log.read()[-6000:]}"
    for size in set(sizes):
        used(f"megatron-core and Megatron-Bridge, {size} rank{'s' * (size > 1)}")
    if emulated:
        used("emulated GPU")


@functools.cache
def _variables(device: str) -> dict[str, str]:
    """Environment variables of a process whose emulated GPUs are of this kind; "" means none."""
    if not device:
        return {}
    from helpers import on_null_cuda

    return on_null_cuda.emulated_environment(device=device)


@functools.cache
def _fork_server(device: str) -> subprocess.Popen[bytes]:
    """Return the process that has imported the libraries.

    It reads one order from each line, and answers with two numbers: the fork's process id and exit status.
    """
    variables = {**os.environ, **_variables(device)}
    path = os.pathsep.join([IMPORTS, variables.get("PYTHONPATH", "")])
    environment = {**variables, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-m", "helpers.distributed", *(["emulated"] if device else [])]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)
    atexit.register(server.kill)
    return server


def _answer(server: subprocess.Popen[bytes], timeout: float) -> int | None:
    """The next number that the server writes, or None if it writes none in time."""
    assert server.stdout is not None
    if not select.select([server.stdout], [], [], timeout)[0]:
        return None
    line = server.stdout.readline()
    assert line, f"the process that forks the ranks has ended with {server.wait()}"
    return int(line)


def forget_layout(has_failed: bool = False) -> None:
    """Tear down a Megatron layout so that the next one can be built; megatron-core leaves its groups behind.

    Every group has its own threads: hundreds for many layouts, which would crowd the machine. `has_failed`:
    an error is on its way, perhaps on this rank alone, and does not wait long for the others.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_gvpo.core.collectives import all_have_failed

    parallel_state.destroy_model_parallel()
    if has_failed and not all_have_failed(FAILED_PATIENCE):
        return  # the others wait elsewhere, and end with this rank
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def run_number() -> int:
    """The position of this run in the `sizes` of its launch; called in a rank."""
    return int(os.environ["LAUNCH_RUN"])


def _rank(rank: int, target: str, size: int, run: int, store: str, arguments: Sequence[str]) -> None:
    import torch.distributed as dist

    os.environ["LAUNCH_RUN"] = str(run)
    os.environ["LOCAL_RANK"] = str(rank)
    backend = "gloo"
    if IS_EMULATED:
        import torch

        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
    )
    module, function = target.split(":")
    getattr(importlib.import_module(module), function)(*arguments)
    dist.destroy_process_group()


def _run(order: dict[str, Any]) -> None:
    """Fork the ranks of every size, in the environment and directory of the test that asks for them."""
    import torch.multiprocessing as mp

    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    # this process's path has Transformer Engine, too
    sys.path[:] = dict.fromkeys([*order["path"], *sys.path])
    target, arguments = order["target"], order["arguments"]
    importlib.import_module(target.split(":")[0])
    for run, size in enumerate(order["sizes"]):
        print(f"{target}, run {run}, on {size} rank(s)", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            store = str(Path(directory) / "store")
            mp.start_processes(_rank, (target, size, run, store, arguments), nprocs=size, start_method="fork")


def _fork(order: dict[str, Any]) -> int:
    """Run an order in a process and session of its own; returns its process id."""
    if (process := os.fork()) != 0:
        return process
    code = 1
    try:
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
        for stream, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(file, stream)
        _run(order)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve() -> None:
    gc.disable()
    os.environ.pop("LD_PRELOAD", None)  # its children do not need the preloaded library
    if IS_EMULATED:
        from megatron_gvpo.emulation import emulated_gpu

        emulated_gpu.install()
    importlib.import_module("megatron_gvpo.megatron.policy")
    if IS_EMULATED:
        importlib.import_module("megatron.bridge")
    else:
        importlib.import_module("megatron_gvpo.megatron.cpu.bridge").import_bridge()
    gc.freeze()  # forks share memory with this process only as long as no process writes to it
    gc.enable()
    for line in sys.stdin:
        process = _fork(json.loads(line))
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()

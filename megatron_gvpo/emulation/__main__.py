"""`python -m megatron_gvpo.emulation PROGRAM [ARGUMENT ...]`: runs a Python program on emulated GPUs.

PROGRAM is a file, or `-m` and a module. Example: `python -m megatron_gvpo.emulation -m megatron_gvpo train
CONFIG.yaml`. With --nproc, each rank has an emulated GPU of its own. Other processes that the program starts,
such as rollout servers, have no emulated GPU.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from megatron_gvpo.core import launch
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.emulation import emulated_gpu
from megatron_gvpo.rehearsal.nullcuda import counters
from megatron_gvpo.rehearsal.nullcuda.devices import DEVICES, GIB

_GPUS = 8


def main(arguments: list[str]) -> int:
    """Run the program and return its exit code. A process without the null CUDA first restarts with it."""
    program = arguments[1:] if arguments[:1] == ["-m"] else arguments
    if not program:
        print("usage: python -m megatron_gvpo.emulation PROGRAM.py|-m MODULE [ARGUMENT ...]", file=sys.stderr)
        return 2
    if not counters.is_loaded():
        try:
            variables = emulated_gpu.environment(DEVICES["h100"], _GPUS, 16 * GIB)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        command = [sys.executable, "-m", "megatron_gvpo.emulation", *arguments]
        os.execve(sys.executable, command, os.environ | variables)
    os.environ.pop("LD_PRELOAD", None)  # the library is loaded in this process; its children do not need it
    launch.program[:] = ["-m", "megatron_gvpo.emulation", *launch.program]
    emulated_gpu.install()
    sys.argv = program
    if arguments[0] == "-m":
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)  # as Python does for a file
        runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

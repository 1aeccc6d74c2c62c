"""Starts a program inside the sandbox: `python -I -S launcher.py MARK MEMORY SECONDS DISK`.

It sets the limits, writes a byte to descriptor MARK to show that the sandbox has started, closes all
descriptors but the standard ones, and runs the program that came on its standard input. It imports nothing of
this package, because the package is not inside the sandbox.
"""

from __future__ import annotations

import os
import resource
import sys
import traceback
from types import ModuleType, TracebackType

DESCRIPTORS = 64  # open files that a program may have
NAME = "/tmp/program.py"
PACKAGES = "/packages"


def main() -> None:
    mark, memory, seconds, disk = map(int, sys.argv[1:])
    with open(0, "rb", closefd=False) as file:
        source = file.read()
    for limit, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    with open("/dev/null", "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.write(mark, b"\n")
    os.closerange(3, 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

    with open(NAME, "wb") as file:  # lets tracebacks show its lines
        file.write(source)
    if os.path.isdir(PACKAGES):
        sys.path.append(PACKAGES)
    sys.argv = [NAME]
    sys.excepthook = _without_launcher
    module = ModuleType("__main__")
    module.__file__ = NAME
    sys.modules["__main__"] = module
    exec(compile(source, NAME, "exec", dont_inherit=True), module.__dict__)


def _without_launcher(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback that begins with the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


if __name__ == "__main__":
    main()

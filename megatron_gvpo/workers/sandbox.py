"""Runs a program of the policy in a bubblewrap sandbox: no network, no host files, bounded resources."""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron_gvpo.core.clock import running_seconds
from megatron_gvpo.workers.seccomp import MACHINES, filter_program

DISK = 64 << 20  # bytes of files that a program may write, all in memory
OUTPUT = 32 << 10  # bytes that a program may write to its standard output and error
START = 60.0  # seconds in which a sandbox must start
FILES, THREADS = 4096, 64  # limits of a program, because each file and thread takes memory of the kernel
_LOOK = 0.05  # seconds between two looks at their numbers
_PYTHON = "/python/bin/python3"
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")  # the system's libraries, such as the C library
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "LD_LIBRARY_PATH": "/python/lib",
    "PYTHONHASHSEED": "0",  # makes a program's output reproducible
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program in a sandbox without network, and returns what it prints. "
        "Nothing is kept from one program to the next.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}


class SandboxFailed(Exception):  # noqa: N818 - it is not a fault of this program
    """Raised if a sandbox did not start, which is not the program's fault."""


class Outcome(NamedTuple):
    """The output of a program (standard output and error), and how it ended: "" if it ended well."""

    output: str
    problem: str = ""

    def __str__(self) -> str:
        """The text that the policy sees."""
        if not self.problem:
            return self.output or "[no output]"
        line = "\n" if self.output and not self.output.endswith("\n") else ""
        return f"{self.output}{line}[{self.problem}]"


class Sandbox:
    """Runs Python programs, each in a new sandbox, of which nothing remains afterwards.

    A program sees the system's shared libraries, Python's standard library and `packages` (a directory with
    Python packages), all of them read-only, and an empty /tmp of DISK bytes and FILES files. It is one
    process of up to THREADS threads, and takes at most `seconds` and `memory_mb` MiB of address space.
    """

    def __init__(self, seconds: float, memory_mb: int, packages: str | None = None) -> None:
        self._seconds, self._memory, self._packages = seconds, memory_mb << 20, packages

    def check(self) -> None:
        """Raises ValueError, with a remedy, if sandboxes cannot run on this machine."""
        if platform.machine() not in MACHINES:
            raise ValueError(f"it runs on {' and '.join(MACHINES)} only, and this is {platform.machine()}")
        if shutil.which("bwrap") is None:
            raise ValueError("bubblewrap is not installed: apt-get install bubblewrap (0.8 or newer)")
        if self._packages is not None and not Path(self._packages).is_dir():
            raise ValueError(f"packages={self._packages}: no such directory")
        try:
            outcome = self.run("print(6 * 7)")
        except SandboxFailed as error:
            raise ValueError(f"{error}: {_remedy(str(error))}") from None
        if outcome != ("42\n", ""):
            raise ValueError(f"a program that prints 42 gave {outcome.output[:200]!r}, {outcome.problem}")

    def run(self, source: str) -> Outcome:
        """Run the program. Raises SandboxFailed."""
        program = os.memfd_create("program")
        rules = os.memfd_create("rules")
        mark, mark_inside = os.pipe()
        info, info_inside = os.pipe()
        opened = [program, rules, mark, info, info_inside, mark_inside]
        try:
            for file, data in (
                (program, source.encode(errors="surrogatepass")),
                (rules, filter_program(platform.machine())),
            ):
                with open(file, "wb", closefd=False) as out:
                    out.write(data)
                os.lseek(file, 0, os.SEEK_SET)
            try:
                process = subprocess.Popen(
                    self._command(rules, mark_inside, info_inside),
                    stdin=program,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(rules, mark_inside, info_inside),
                    env={},
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxFailed(f"bubblewrap cannot be started: {error}") from None
            os.close(opened.pop())
            os.close(opened.pop())
            with process:
                try:
                    return self._follow(process, mark, info)
                finally:
                    process.kill()  # the processes inside end with it
        finally:
            for file in opened:
                os.close(file)

    def _follow(self, process: subprocess.Popen[bytes], mark: int, info: int) -> Outcome:
        """Read the program's output until it ends, or a limit is reached. Raises SandboxFailed."""
        assert process.stdout is not None
        output = _Output(process.stdout.fileno())
        output.read_until(mark, running_seconds() + START)
        if not select.select([mark], [], [], 0)[0]:
            raise SandboxFailed(f"a sandbox did not start in {START:g} seconds")
        if not os.read(mark, 1):  # the process has ended
            output.read_until(None, running_seconds() + 1.0)
            raise SandboxFailed(f"a sandbox did not start: {' '.join(output.text().split())[-300:]}")
        deadline, excess, first = running_seconds() + self._seconds, None, _first_process(info)
        while excess is None and not (output.ended or output.too_long) and running_seconds() < deadline:
            output.read_until(None, min(deadline, running_seconds() + _LOOK))
            excess = _excess(first)
        if excess is not None:
            return Outcome(output.text(), excess)
        if output.too_long:
            return Outcome("", f"more than {OUTPUT} bytes of output")
        if not output.ended:
            return Outcome(output.text(), f"it took longer than {self._seconds:g} seconds")
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(START)
            return Outcome(output.text(), _ending(code))
        return Outcome(output.text(), f"it took longer than {self._seconds:g} seconds")

    def _command(self, rules: int, mark: int, info: int) -> list[str]:
        # The absolute path, because the environment has no PATH.
        arguments = [
            shutil.which("bwrap") or "bwrap",
            "--unshare-all",
            "--unshare-user",
            "--disable-userns",
            "--die-with-parent",
        ]
        arguments += ["--new-session", "--clearenv", "--uid", "65534", "--gid", "65534"]
        arguments += ["--hostname", "sandbox", "--seccomp", str(rules), "--info-fd", str(info)]
        for name, value in _ENVIRONMENT.items():
            arguments += ["--setenv", name, value]
        for directory in _LIBRARIES:
            arguments += ["--ro-bind-try", directory, directory]
        for outside, inside in _interpreter().items():
            arguments += ["--ro-bind", outside, inside]
        for directory in _third_party():  # an empty directory hides the real one
            arguments += ["--size", "4096", "--tmpfs", directory, "--remount-ro", directory]
        arguments += ["--ro-bind", str(Path(__file__).with_name("sandbox_launcher.py")), "/launcher.py"]
        if self._packages is not None:
            arguments += ["--ro-bind", self._packages, "/packages"]
        for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
            arguments += ["--dev-bind", device, device]
        arguments += ["--size", str(DISK), "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/", "--"]
        limits = (mark, self._memory, int(self._seconds) + 1, DISK)
        return [*arguments, _PYTHON, "-I", "-S", "-B", "/launcher.py", *map(str, limits)]


class _Output:
    """The output of a program. The output is read until it exceeds its limit."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._data = descriptor, b""
        self.ended = False

    @property
    def too_long(self) -> bool:
        return len(self._data) > OUTPUT

    def text(self) -> str:
        return self._data[:OUTPUT].decode(errors="replace")

    def read_until(self, other: int | None, deadline: float) -> None:
        """Read until all writers have ended, or `other` can be read, or the time is over."""
        descriptors = [self._descriptor, *([] if other is None else [other])]
        while not self.ended and not self.too_long and (seconds := deadline - running_seconds()) > 0:
            ready, _, _ = select.select(descriptors, [], [], seconds)
            if other in ready:
                return
            if self._descriptor in ready:
                data = os.read(self._descriptor, OUTPUT + 1)
                self._data += data
                self.ended = not data


def _interpreter() -> dict[str, str]:
    """The files of this Python, without its third-party packages, and where they are in the sandbox."""
    release = f"python{sys.version_info.major}.{sys.version_info.minor}"
    binary = os.path.realpath(sys.executable)
    files = {binary: _PYTHON, sysconfig.get_path("stdlib"): f"/python/lib/{release}"}
    library = sysconfig.get_config_var("INSTSONAME")
    shared = Path(sysconfig.get_config_var("LIBDIR") or "/", str(library))
    if shared.is_file():
        files[str(shared)] = f"/python/lib/{library}"
    return files


def _third_party() -> list[str]:
    """Directories in the sandbox with packages beside the standard library, Python's and the system's."""
    release = f"python{sys.version_info.major}.{sys.version_info.minor}"
    mounts = {sysconfig.get_path("stdlib"): f"/python/lib/{release}", "/usr/lib/python3": "/usr/lib/python3"}
    return [
        f"{inside}/{name}"
        for outside, inside in mounts.items()
        for name in ("site-packages", "dist-packages")
        if Path(outside, name).is_dir()
    ]


def _first_process(info: int) -> int | None:
    """The number of the sandbox's first process, from bubblewrap's report; None without one."""
    if not select.select([info], [], [], 0)[0]:
        return None
    number = json.loads(os.read(info, 4096) or b"{}").get("child-pid")
    return number if isinstance(number, int) else None


def _excess(first: int | None) -> str | None:
    """The problem if a sandbox has too many files or threads; None if not, or if it has just ended.

    The kernel has no limit for the files and threads of one sandbox. `first`: the sandbox's first process,
    whose only child is the program.
    """
    try:
        disk = os.statvfs(f"/proc/{first}/root/tmp")
        if disk.f_files - disk.f_ffree > FILES:
            return f"more than {FILES} files"
        [program] = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        if len(os.listdir(f"/proc/{program}/task")) > THREADS:
            return f"more than {THREADS} threads"
    except (OSError, ValueError):  # the program has ended
        return None
    return None


def _ending(code: int) -> str:
    """Describes a program's end from bubblewrap's exit code; "" for a normal end."""
    if code == 0:
        return ""
    number = -code if code < 0 else code - 128
    if number == signal.SIGXCPU:
        return "too much computing time"
    if number in signal.valid_signals():
        return f"signal {number}, {signal.strsignal(number)}"
    return f"exit code {code}"


def _remedy(problem: str) -> str:
    if "Unknown option" in problem:
        return "this bubblewrap is too old; 0.8 or newer is needed"
    return (
        "bubblewrap must be allowed to make namespaces: in a container, by profiles that permit them "
        "(docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined); on Ubuntu "
        "24.04, by sysctl kernel.apparmor_restrict_unprivileged_userns=0"
    )

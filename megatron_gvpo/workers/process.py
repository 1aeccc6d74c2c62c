"""A process that runs the user's code under a guard: started, heard and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from megatron_gvpo.workers.guard import PATIENCE
from megatron_gvpo.workers.output import Output, Printout


class GuardedProcess:
    """A process that runs `module.work(channel)`, the socket to it, and what it prints."""

    def __init__(self, module: str, printout: Printout) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end, leash = os.pipe()
        self._leash: int | None = leash
        output, their_output = os.pipe()
        self.output = Output(output, printout)
        guard = [sys.executable, "-u", "-m", "megatron_gvpo.workers.guard"]
        try:
            self._process = subprocess.Popen(
                [*guard, str(theirs.fileno()), str(end), module],
                pass_fds=[theirs.fileno(), end],
                stdin=subprocess.DEVNULL,
                stdout=their_output,
                stderr=their_output,
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(end)
            os.close(their_output)

    def waits_for(self) -> list[int]:
        """The descriptors from which its replies and its output come."""
        output = self.output.descriptor
        return [self.channel.fileno(), *([] if output is None else [output])]

    def stop(self, patience: float = 0.0) -> int:
        """End the process after `patience` seconds, and all that it started; its exit code (-n: signal n)."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        if self._leash is not None:
            with suppress(OSError):
                os.write(self._leash, b"\n")
            os.close(self._leash)
            self._leash = None
        try:
            code = self._process.wait(2 * PATIENCE)
        except subprocess.TimeoutExpired:  # someone has stopped the guard
            self._process.kill()
            code = self._process.wait()
        self.output.drain()
        self.output.close()
        self.channel.close()
        return code


def how_it_ended(code: int) -> str:
    """An exit code as text."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.strsignal(-code)}"

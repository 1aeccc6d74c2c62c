"""A server rank's end of a mailbox: memory in which the trainer's rank beside it puts parts of the weights.

The mailbox has room for two rounds of a push: while this rank loads one, the next is put in. Two counters in
the machine's shared memory say how many rounds have been put in and taken out. The bytes are behind them in
the same file, or in the memory of the GPU that both processes use (CUDA IPC).
megatron_gvpo.weights.colocated is the trainer's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from megatron_gvpo_memory import in_memory, mapped, opened

HEADER = 64  # bytes before the rounds in the file
POLL = 0.0005  # seconds between two looks at the counters
STOP_POLL = 0.05  # seconds between two checks whether the push has failed elsewhere


def seat(memory: str, device: torch.device) -> dict[str, Any]:
    """The machine and the GPU of this rank.

    "node" is the trainer rank that has written its number to the run's directory `memory` in this machine's
    shared memory, None if it has no such directory; "gpu" is a UUID, "" on a CPU. Raises PermissionError for
    a directory that is not a run's.
    """
    file = in_memory(f"{memory}/node")
    node = int(file.read_text()) if file.exists() else None
    return {
        "node": node,
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "",
    }


class Inbox:
    """The rounds of one push, one after another."""

    def __init__(self, where: dict[str, Any], rounds_before: int) -> None:
        """`where`: "file", "turn" (the most bytes of a round), and "handle" of a GPU's memory or None.

        `rounds_before`: rounds of earlier pushes, which the counters have counted. Raises PermissionError for
        a file that is not in a run's directory.
        """
        size, handle = 2 * where["turn"], where["handle"]
        flat = mapped(where["file"], HEADER if handle else HEADER + size)
        # The number of rounds that were written, and the number that were read.
        self._counters = flat[:16].view(torch.int64)
        self._data = opened(handle, size) if handle else flat[HEADER:]
        self._turn, self._before = where["turn"], rounds_before

    def wait(self, number: int, timeout: float, is_stopped: Callable[[], bool]) -> torch.Tensor:
        """Wait until round `number` is in the mailbox, and return its bytes, uint8 [turn].

        Raises RuntimeError if `is_stopped`, or after `timeout` seconds.
        """
        begin = last_check = time.monotonic()
        while self._counters[0] <= self._before + number:
            now = time.monotonic()
            if now - last_check > STOP_POLL:
                last_check = now
                if is_stopped():
                    raise RuntimeError("the push has failed at another rank")
            if now - begin > timeout:
                raise RuntimeError(f"the trainer's rank has put in no round {number} for {timeout:g} s")
            time.sleep(POLL)
        first = (self._before + number) % 2 * self._turn
        return self._data[first : first + self._turn]

    def took(self, number: int, is_last: bool) -> None:
        """Note that this rank no longer needs the round's bytes, nor after the last round the memory."""
        if self._data.is_cuda:
            torch.cuda.current_stream(self._data.device).synchronize()
        if is_last:
            del self._data
        self._counters[1] = self._before + number + 1

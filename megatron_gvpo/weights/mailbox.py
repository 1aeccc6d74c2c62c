"""The trainer's end of mailboxes: memory from which one rank of a server takes its parts of the weights.

Both are processes on the same machine, and on the same GPU if they have one. A mailbox has room for two
rounds of a push. megatron_gvpo_mailbox, in the servers, is the other end and describes the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.weights.node import reserved, shared_storage

HEADER = 64  # bytes before the rounds in the file


class Mailbox:
    """The mailbox of one server rank, for all pushes over one group."""

    def __init__(self, file: Path, turn: int, device: torch.device) -> None:
        """`turn`: bytes of a round at most. Raises PushFailed if there is no memory for the file."""
        self._file, self._turn, self._device = file, max(1, turn), device
        self._on_gpu = device.type == "cuda"
        file.unlink(missing_ok=True)  # a server that has left an earlier group may still write in its file
        flat = reserved(file, HEADER + (0 if self._on_gpu else 2 * self._turn))
        self._counters = flat[:16].view(torch.int64)  # rounds put in, rounds taken out
        self._data = flat[HEADER:]
        self._put = 0

    def open(self) -> dict[str, Any]:
        """Prepare for a push; returns where the memory is, for the server's end."""
        handle = None
        if self._on_gpu:
            self._data = torch.empty(2 * self._turn, dtype=torch.uint8, device=self._device)
            handle = shared_storage(self._data)
        return {"file": str(self._file), "turn": self._turn, "handle": handle}

    def has_room(self) -> bool:
        """True if the server has taken out the round before the last."""
        return bool(self._counters[1] >= self._put - 1)

    def is_empty(self) -> bool:
        return bool(self._counters[1] >= self._put)

    def room(self) -> Tensor:
        """The memory of the next round, uint8 [turn], if the mailbox `has_room`."""
        first = self._put % 2 * self._turn
        return self._data[first : first + self._turn]

    def put(self) -> None:
        """Note that the next round is complete."""
        self._put += 1
        self._counters[0] = self._put

    def close(self) -> None:
        """Free the GPU's memory until the next push."""
        if self._on_gpu:
            self._data = self._data.new_empty(0)

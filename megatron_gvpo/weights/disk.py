"""Sends weights by files that every server can read: slow, but without a process group."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.server import Server
from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.transport import PushFailed, PushSettings, Transport, WeightReceiver, each


class DiskReceiver(WeightReceiver):
    """The call to a server that a push by files needs."""

    @abstractmethod
    async def load_directory(self, directory: Path, version: str, timeout: float) -> None:
        """Load the safetensors files of the directory, as a whole update with this version."""


class Disk(Transport):
    """Writes one directory of safetensors files per push, complete or absent, then removes the one before.

    In `directory`, `version_*` and `partial` belong to the transport.
    """

    host_buckets: ClassVar[bool] = True

    def __init__(self, receiver: Callable[[Server], DiskReceiver], directory: Path, timeout: float) -> None:
        self._receiver, self._root, self._timeout = receiver, directory, timeout
        self._handles: list[ServerHandle] = []
        self._version, self._files = -1, 0

    @classmethod
    def create(cls, settings: PushSettings, receiver: Callable[[Server], Any]) -> Self:
        return cls(receiver, settings.directory, settings.rollout.weights.timeout)

    async def begin(self, handles: Sequence[ServerHandle], version: int) -> None:
        self._handles, self._version, self._files = list(handles), version, 0
        with writing(self._aside):
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside.mkdir(parents=True)

    async def send(self, bucket: Bucket) -> int:
        file = self._aside / f"model-{self._files:05d}.safetensors"
        self._files += 1
        with writing(file):
            await asyncio.to_thread(save_file, dict(bucket.tensors()), file, {"format": "pt"})
        return bucket.flat.nbytes

    async def end(self) -> None:
        final = self._root / f"version_{self._version}"
        with writing(final):
            shutil.rmtree(final, ignore_errors=True)
            self._aside.rename(final)
        version = str(self._version)
        await each(
            self._handles,
            lambda handle: self._receiver(handle.server).load_directory(final, version, self._timeout),
        )
        for old in self._root.glob("version_*"):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    async def close(self) -> None:
        for own in (*self._root.glob("version_*"), self._aside):
            shutil.rmtree(own, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder is not empty, and may belong to the user
            self._root.rmdir()

    @property
    def _aside(self) -> Path:
        return self._root / "partial"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a full or unwritable disk into a failed push, which is tried again and names the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # the empty list: no server is at fault
        raise PushFailed(f"{path} cannot be written: {error}", []) from None

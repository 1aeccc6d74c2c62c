"""Weights by files that every server can read: slow, and free of any process group."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_gvpo.config.schema import Config
from megatron_gvpo.rollout.pool import Member
from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.transport import PushFailed, each


def run_directory(config: Config) -> Path:
    """One of this run's alone: `rollout.weights.directory` may be other runs', too, and hold other things.

    Absolute, as servers may have been started elsewhere.
    """
    out, shared = Path(config.output_dir).absolute(), config.rollout.weights.directory
    if shared is None:
        return out / "weights"
    digest = hashlib.blake2b(str(out.resolve()).encode(), digest_size=4).hexdigest()
    return Path(shared).absolute() / f"{out.name}-{digest}"


class Disk:
    """A directory of safetensors files a push, complete or absent; the one before is removed after it.

    Everything in `directory` is the transport's.
    """

    def __init__(self, directory: Path, timeout: float) -> None:
        self._root, self._timeout = directory, timeout
        self._members: list[Member] = []
        self._version, self._files = -1, 0

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    async def begin(self, members: Sequence[Member], version: int) -> None:
        self._members, self._version, self._files = list(members), version, 0
        with _named(self._aside):
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside.mkdir(parents=True)

    async def send(self, bucket: Bucket) -> int:
        file = self._aside / f"model-{self._files:05d}.safetensors"
        self._files += 1
        with _named(file):
            await asyncio.to_thread(save_file, dict(bucket.tensors()), file, {"format": "pt"})
        return bucket.flat.nbytes

    async def end(self) -> None:
        final = self._root / f"version_{self._version}"
        with _named(final):
            shutil.rmtree(final, ignore_errors=True)
            self._aside.rename(final)
        await each(self._members, lambda m: m.server.load_directory(final, str(self._version), self._timeout))
        for old in self._root.glob("version_*"):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def over(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    @property
    def _aside(self) -> Path:
        return self._root / "partial"


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """A full or unwritable disk as a failed push: the servers keep waiting, and the run says why."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise PushFailed(f"{path} cannot be written: {error}", []) from None  # no server's fault

"""Sends adapters as files that every server can read; the engine serves each under a name with its version.

The servers keep the weights that they started with, and each push is an adapter of a new name. A request
names the adapter that it wants, so a server that has restarted refuses it rather than sample from the base.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from megatron_gvpo.huggingface.adapter_layers import adapted_layers, adapter_of, check_limits
from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.http import ServerRefused
from megatron_gvpo.servers.server import Server, answer_of
from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.disk import writing
from megatron_gvpo.weights.transport import PushSettings, Transport, WeightReceiver, each

PREFIX = "gvpo-"  # begins the names of all adapters that a run gives to servers


class AdapterReceiver(WeightReceiver):
    """The calls to a server that a push of adapters needs."""

    load_path: ClassVar[str]
    unload_path: ClassVar[str]

    async def adapters(self, timeout: float) -> list[str]:
        """The names of the adapters that the server has."""
        models = await self._http.get("/v1/models", timeout=timeout)
        with answer_of(self._server, "/v1/models"):
            return [model["id"] for model in models["data"] if model["parent"] is not None]

    async def load_adapter(self, name: str, directory: Path, timeout: float) -> None:
        """Load the Hugging Face PEFT adapter in the directory under a name that the server does not have."""
        body = {"lora_name": name, "lora_path": str(directory)}
        try:
            await self._http.post(self.load_path, body, timeout=timeout)
        except ServerRefused as error:
            where = f"the adapter is in {directory}, which the server must see"
            raise ServerRefused(f"{error} ({where})", error.status) from None

    async def unload_adapter(self, name: str, timeout: float) -> None:
        """Forget an adapter that no request uses."""
        await self._http.post(self.unload_path, {"lora_name": name}, timeout=timeout)

    def use_adapter(self, name: str) -> None:
        """Make this run's requests to the server name this adapter from now on."""
        self._server.use_adapter(name)

    @abstractmethod
    async def name_version(self, version: str, timeout: float) -> None:
        """Set the version that the server reports for its weights."""

    @abstractmethod
    async def refusal(self, rank: int, layers: Sequence[str], timeout: float) -> str | None:
        """The reason why the server, as it was started, takes no adapters of this rank on these layers.

        The reason includes a remedy. Returns None if the server takes such adapters.
        """


class Adapter(Transport):
    """Writes a directory in the format of Hugging Face PEFT for each push, then removes the previous one.

    Everything in `root` belongs to the transport. `description`: the content of adapter_config.json.
    """

    host_buckets: ClassVar[bool] = True

    def __init__(
        self,
        receiver: Callable[[Server], AdapterReceiver],
        root: Path,
        description: dict[str, Any],
        timeout: float,
    ) -> None:
        self._receiver, self._root, self._timeout = receiver, root, timeout
        self._description = description
        digest = hashlib.blake2b(os.path.realpath(root).encode(), digest_size=4).hexdigest()
        self._run = f"{PREFIX}{digest}"
        self._handles: list[ServerHandle] = []
        self._version, self._tensors = -1, dict[str, Tensor]()

    @classmethod
    def check(cls, settings: PushSettings) -> None:
        check_limits(settings.rollout, settings.model, settings.cards.policy)

    @classmethod
    def create(cls, settings: PushSettings, receiver: Callable[[Server], Any]) -> Self:
        # This import is here because only the trainer's environment has xxhash.
        from megatron_gvpo.megatron.adapters.directory import adapter_config

        model, layers = settings.model, adapted_layers(settings.model, settings.cards.policy)
        description = adapter_config(adapter_of(model), layers, model.path)
        return cls(receiver, settings.directory, description, settings.rollout.weights.timeout)

    async def begin(self, handles: Sequence[ServerHandle], version: int) -> None:
        self._handles, self._version, self._tensors = list(handles), version, {}

    async def send(self, bucket: Bucket) -> int:
        self._tensors |= {name: tensor.clone() for name, tensor in bucket.tensors()}
        return bucket.flat.nbytes

    async def end(self) -> None:
        name = f"{self._run}-v{self._version}"
        directory = self._write(name)
        await each(
            self._handles, lambda handle: self._exchange(self._receiver(handle.server), name, directory)
        )
        for old in self._root.glob(f"{PREFIX}*"):
            if old != directory:
                shutil.rmtree(old, ignore_errors=True)

    async def close(self) -> None:
        for own in (*self._root.glob(f"{PREFIX}*"), self._root / "partial"):
            shutil.rmtree(own, ignore_errors=True)
        with suppress(OSError):  # the folder is not empty, and may belong to the user
            self._root.rmdir()

    def _write(self, name: str) -> Path:
        """Write the adapter, complete or not at all; returns its directory."""
        from megatron_gvpo.megatron.adapters.directory import write_adapter

        directory, aside = self._root / name, self._root / "partial"
        with writing(directory):
            for path in (aside, directory):
                shutil.rmtree(path, ignore_errors=True)
            write_adapter(aside, self._description, self._tensors)
            aside.rename(directory)
        self._tensors = {}
        return directory

    async def _exchange(self, receiver: AdapterReceiver, name: str, directory: Path) -> None:
        """Have one server load the adapter, and forget those of earlier versions and runs.

        The server is paused and has no requests of this run in flight, so none uses an earlier adapter.
        """
        earlier = [old for old in await receiver.adapters(self._timeout) if old.startswith(PREFIX)]
        if name in earlier:  # a push that did not end has left it
            await receiver.unload_adapter(name, self._timeout)
        await receiver.load_adapter(name, directory, self._timeout)
        receiver.use_adapter(name)
        for old in earlier:
            if old != name:
                await receiver.unload_adapter(old, self._timeout)
        await receiver.name_version(str(self._version), self._timeout)

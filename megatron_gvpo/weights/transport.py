"""The `Transport` protocol: a way to move buckets of weights to servers that have no requests in flight."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch

from megatron_gvpo.core.lazy_imports import load_class
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers.handle import ServerHandle
from megatron_gvpo.servers.http import ServerGone, ServerRefused
from megatron_gvpo.servers.server import Server
from megatron_gvpo.settings.sections import ModelConfig, RolloutConfig
from megatron_gvpo.settings.servers import run_directory
from megatron_gvpo.settings.transports import TRANSPORTS
from megatron_gvpo.weights.bucket import Bucket

if TYPE_CHECKING:
    from megatron_gvpo.megatron.model.own_weights import OwnWeights


@dataclass(frozen=True)
class PushSettings:
    """The settings of a run that its pushes and transports read."""

    rollout: RolloutConfig
    model: ModelConfig
    cards: ModelCards
    directory: Path  # a directory with files of this run only, which servers may read
    device: torch.device  # device that holds the buckets, unless the transport has them on the host

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        rollout: RolloutConfig,
        output_dir: str,
        cards: ModelCards,
        device: torch.device,
    ) -> PushSettings:
        """The settings of a run's pushes."""
        return cls(rollout, model, cards, run_directory(output_dir, rollout.weights), device)


class PushFailed(Exception):  # noqa: N818 - an outcome that the publisher handles
    """The weights did not reach `handles` completely, so these servers need another push."""

    def __init__(self, message: str, handles: Sequence[ServerHandle]) -> None:
        super().__init__(message)
        self.handles = list(handles)


async def each(handles: Sequence[ServerHandle], call: Callable[[ServerHandle], Awaitable[None]]) -> None:
    """Call all servers at once and wait for all. Raises PushFailed, which names the servers that failed."""
    results = await asyncio.gather(*(call(handle) for handle in handles), return_exceptions=True)
    raise_failed(
        [(handle, r) for handle, r in zip(handles, results, strict=True) if isinstance(r, BaseException)]
    )


def raise_failed(failed: Sequence[tuple[ServerHandle, BaseException]]) -> None:
    """Raise PushFailed that names the servers that failed, or the first error that is not a server's."""
    for _, error in failed:
        if not isinstance(error, ServerGone | ServerRefused):
            raise error
    if failed:
        raise PushFailed("; ".join(str(error) for _, error in failed), [handle for handle, _ in failed])


class WeightReceiver(ABC):
    """The trainer's HTTP client that has one server take a push, in the dialect of its engine.

    Each transport extends it with the calls that it needs, in its own module; megatron_gvpo.weights.receivers
    has a class per engine and transport. Every `timeout` is in seconds. The methods raise ServerRefused and
    ServerGone.
    """

    begin_path: ClassVar[str]
    begin_body: ClassVar[dict[str, Any] | None] = None
    end_path: ClassVar[str]
    already_begun: ClassVar[str]  # words with which the engine refuses to begin an update inside another

    def __init__(self, server: Server) -> None:
        self._server, self._http = server, server.http

    async def begin_update(self, timeout: float) -> None:
        """Announce a push. An earlier update that never ended is abandoned."""
        try:
            await self._http.post(self.begin_path, self.begin_body, timeout=timeout)
        except ServerRefused as error:
            if self.already_begun not in str(error):
                raise
            # A push that failed half-way left its update open. This push overwrites the weights that it
            # loaded.
            await self._http.post(self.end_path, timeout=timeout)
            await self._http.post(self.begin_path, self.begin_body, timeout=timeout)

    @abstractmethod
    async def end_update(self, version: str, timeout: float) -> None:
        """Tell the server that the weights are complete. From then on it reports this version."""


class Follower(Protocol):
    """The part of every rank except 0 in a push, besides the weight stream's collectives."""

    def follow(self, buckets: Iterator[Bucket]) -> None:
        """Take part in one push. `buckets` are rank 0's; the caller iterates the rest of them."""
        raise TypeError(f"{type(self).__name__} follows no buckets")

    def follow_own(self, own: OwnWeights) -> None:
        """Take part in one push in which every rank sends its own weights (`Traits.sends_own`)."""
        raise TypeError(f"{type(self).__name__} follows buckets")

    def close(self) -> None: ...


class Transport(Protocol):
    """Rank 0's part in a push: `begin`, `send` for each bucket, `end`; always `over`. TRANSPORTS lists them.

    The methods raise PushFailed, after which the next `begin` starts again. Where every rank sends the
    weights that it holds itself (`Traits.sends_own`), `send_own` takes the place of all `send`s, and a
    follower's `follow_own` that of `follow`.
    """

    host_buckets: ClassVar[bool] = False  # the transport reads buckets on the host, so they are filled there

    @classmethod
    def check(cls, settings: PushSettings) -> None:
        """Check the settings at the start of a run, on every rank. Raises ConfigError."""
        return None

    @classmethod
    @abstractmethod
    def create(cls, settings: PushSettings, receiver: Callable[[Server], Any]) -> Self:
        """Rank 0's transport. `receiver` makes a server's receiver.

        The other ranks call `follower` meanwhile, so both may use collectives.
        """

    @classmethod
    def follower(cls, settings: PushSettings) -> Follower | None:
        """Another rank's part in each push, if it has one."""
        return None

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last push."""
        return {}

    @abstractmethod
    async def begin(self, handles: Sequence[ServerHandle], version: int) -> None: ...

    async def send(self, bucket: Bucket) -> int:
        """Send a bucket; returns the bytes that went to each server.

        The buffer of the bucket is overwritten some time after this returns.
        """
        raise TypeError(f"{type(self).__name__} sends no buckets")

    async def send_own(
        self, own: OwnWeights, expected: Mapping[str, tuple[int, ...]], optional: frozenset[str]
    ) -> int:
        """Make all ranks send their own weights; return the bytes of the servers' tensors.

        `expected`: shapes of the servers' tensors by name; the trainer may lack those in `optional`. Raises
        ValueError for others that it lacks.
        """
        raise TypeError(f"{type(self).__name__} sends buckets")

    @abstractmethod
    async def end(self) -> None:
        """Return when all servers have all weights, under the version given to `begin`."""

    def over(self) -> None:
        """Note that the push has ended, in success or failure; called even if it failed before `begin`."""
        return None

    async def close(self) -> None:
        """Release everything at the end of the run."""
        return None


def transport_class(name: str) -> type[Transport]:
    """The transport of this name, a key of TRANSPORTS. Imports its module, which loads torch."""
    transport: type[Transport] = load_class(TRANSPORTS[name].implementation)
    return transport

"""What moves buckets of weights to servers, once nothing is in flight there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from megatron_gvpo.rollout.http import ServerGone, ServerRefused
from megatron_gvpo.rollout.pool import Member
from megatron_gvpo.weights.bucket import Bucket


class PushFailed(Exception):  # noqa: N818 - an outcome that the pusher deals with
    """The weights did not reach these servers whole: none of their updates counts."""

    def __init__(self, message: str, members: Sequence[Member]) -> None:
        super().__init__(message)
        self.members = list(members)


async def each(members: Sequence[Member], call: Callable[[Member], Awaitable[None]]) -> None:
    """Call all servers at once. Raises PushFailed, when all have answered, for those that failed."""
    results = await asyncio.gather(*(call(member) for member in members), return_exceptions=True)
    failed = [(m, r) for m, r in zip(members, results, strict=True) if isinstance(r, BaseException)]
    for _, error in failed:
        if not isinstance(error, ServerGone | ServerRefused):
            raise error
    if failed:
        raise PushFailed("; ".join(str(error) for _, error in failed), [m for m, _ in failed])


class Transport(Protocol):
    """A push is `begin`, `send` for every bucket, `end`. Raises PushFailed; then `begin` starts anew."""

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last push."""

    async def begin(self, members: Sequence[Member], version: int) -> None: ...

    async def send(self, bucket: Bucket) -> int:
        """Bytes sent, to each server. The bucket's buffer is overwritten some time after this returns."""

    async def end(self) -> None:
        """All servers have all weights, and call them `version`."""

    def over(self) -> None:
        """The push has ended, well or not; also where it never began."""

    async def close(self) -> None: ...

"""Conversations with an engine that answers many requests in one call: in rounds, all live ones at once.

A round begins when every live conversation waits for the policy. So what is sampled together does not depend
on how long environments take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from megatron_gvpo.groups import Rollout
from megatron_gvpo.rollout.request import Request

Generate = Callable[[Sequence[Request]], list[list[Rollout]]]


class Rounds:
    """The policy in `live` conversations that are held in one event loop."""

    def __init__(self, generate: Generate, live: int) -> None:
        self._generate, self._live = generate, live
        self._asked: list[tuple[int, Request, asyncio.Future[Rollout]]] = []

    async def say(self, conversation: int, request: Request) -> Rollout:
        """The policy's next turn, sampled once all others have asked or ended.

        A conversation may ask several times at once.
        """
        asked = conversation, request, asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._begin_round()
        try:
            return await asked[2]
        finally:
            if asked in self._asked:  # it was cancelled: nobody wants the answer any more
                self._asked.remove(asked)

    def ended(self, conversation: int) -> None:
        """The conversation needs no more turns."""
        self._live -= 1
        self._begin_round()

    def _begin_round(self) -> None:
        if not self._asked or len({conversation for conversation, _, _ in self._asked}) < self._live:
            return
        asked, self._asked = sorted(self._asked, key=lambda one: (one[0], one[1].seed)), []
        answers = self._generate([request for _, request, _ in asked])
        for (_, _, future), [rollout] in zip(asked, answers, strict=True):
            if not future.done():
                future.set_result(rollout)

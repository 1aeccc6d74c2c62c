"""The part of a weight receiver that all engines share: it begins an update over HTTP."""

from __future__ import annotations

from typing import ClassVar

from megatron_gvpo.rollout.http import ServerRefused
from megatron_gvpo.rollout.server import Server
from megatron_gvpo.weights.transport import WeightReceiver


class HttpReceiver(WeightReceiver):
    """Begins an update of one server. Subclasses name the engine's paths and its refusal."""

    begin_path: ClassVar[str]
    end_path: ClassVar[str]
    already_begun: ClassVar[str]  # words with which the engine refuses to begin an update inside another

    def __init__(self, server: Server) -> None:
        self._server, self._http = server, server.http

    async def begin_update(self, timeout: float) -> None:
        try:
            await self._http.post(self.begin_path, timeout=timeout)
        except ServerRefused as error:
            if self.already_begun not in str(error):
                raise
            # A push that failed half-way left its update open. This push overwrites what that one loaded.
            await self._http.post(self.end_path, timeout=timeout)
            await self._http.post(self.begin_path, timeout=timeout)

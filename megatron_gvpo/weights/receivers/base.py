"""The parts of weight receivers that all engines share, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from megatron_gvpo.rollout.http import ServerRefused
from megatron_gvpo.rollout.server import Server, answer_of
from megatron_gvpo.weights.adapters.transport import AdapterReceiver
from megatron_gvpo.weights.transport import WeightReceiver


class HttpReceiver(WeightReceiver):
    """Begins an update of one server. Subclasses name the engine's paths and its refusal."""

    begin_path: ClassVar[str]
    begin_body: ClassVar[dict[str, Any] | None] = None
    end_path: ClassVar[str]
    already_begun: ClassVar[str]  # words with which the engine refuses to begin an update inside another

    def __init__(self, server: Server) -> None:
        self._server, self._http = server, server.http

    async def begin_update(self, timeout: float) -> None:
        try:
            await self._http.post(self.begin_path, self.begin_body, timeout=timeout)
        except ServerRefused as error:
            if self.already_begun not in str(error):
                raise
            # A push that failed half-way left its update open. This push overwrites what that one loaded.
            await self._http.post(self.end_path, timeout=timeout)
            await self._http.post(self.begin_path, self.begin_body, timeout=timeout)


class HttpAdapterReceiver(HttpReceiver, AdapterReceiver):
    """Loads and unloads adapters of one server. Subclasses name the engine's paths."""

    load_path: ClassVar[str]
    unload_path: ClassVar[str]

    async def adapters(self, timeout: float) -> list[str]:
        models = await self._http.get("/v1/models", timeout=timeout)
        with answer_of(self._server, "/v1/models"):
            return [model["id"] for model in models["data"] if model["parent"] is not None]

    async def load_adapter(self, name: str, directory: Path, timeout: float) -> None:
        body = {"lora_name": name, "lora_path": str(directory)}
        try:
            await self._http.post(self.load_path, body, timeout=timeout)
        except ServerRefused as error:
            where = f"the adapter is in {directory}, which the server must see"
            raise ServerRefused(f"{error} ({where})", error.status) from None

    async def unload_adapter(self, name: str, timeout: float) -> None:
        await self._http.post(self.unload_path, {"lora_name": name}, timeout=timeout)

    def use_adapter(self, name: str) -> None:
        self._server.use_adapter(name)

"""Requires vLLM's API key on every path.

vLLM (0.32.0) itself does not check it on the paths that load weights.
"""

from __future__ import annotations

import hmac
import os
from typing import Any

OPEN = ("/health",)  # needs no key: the answer only shows that the server is alive


class Guard:
    """ASGI middleware (`--middleware megatron_gvpo_guard.Guard`): 401 for a request without the key."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": "Unauthorized: it takes the API key"}'})

    def _has_key(self, scope: Any) -> bool:
        keys = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(keys) == 1 and hmac.compare_digest(keys[0], self._expected)

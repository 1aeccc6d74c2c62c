"""One JSON request over HTTP, limited in time and size. The key is sent to the given address only."""

from __future__ import annotations

import base64
import json
import time
import urllib.request
from typing import Any
from urllib.parse import unquote, urlsplit

LONGEST = 2**26  # bytes of an answer
PART = 2**16  # bytes that are read at once


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: urllib would send it all headers, keys too, to whatever host it names."""

    def redirect_request(self, *_: object) -> None:
        return None


def post_json(url: str, body: Any, timeout: float, key: str | None = None) -> Any:
    """The decoded JSON answer to a POST of `body`. `timeout` is in seconds.

    A user and password in the URL go into a header, as browsers do it. The proxy that the environment names
    is used, except for this machine's own addresses. Raises OSError (HTTPError, TimeoutError),
    HTTPException, ValueError, and RecursionError for JSON that is nested too deep.
    """
    parts, headers = urlsplit(url), {"Content-Type": "application/json"}
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not host or parts.port == 0:  # raises ValueError above 65535
        raise ValueError("its URL does not begin with http:// or https:// and a host")
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
        url = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    handlers: list[urllib.request.BaseHandler] = [NoRedirect()]
    if host in ("localhost", "::1") or host.startswith("127."):
        handlers.append(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    deadline, received, size = time.monotonic() + timeout, [], 0
    with urllib.request.build_opener(*handlers).open(request, timeout=timeout) as answer:
        while part := answer.read1(PART):
            received.append(part)
            if (size := size + len(part)) > LONGEST:
                raise ValueError(f"an answer of more than {LONGEST:,} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no whole answer within {timeout:g} s")
    return json.loads(b"".join(received))

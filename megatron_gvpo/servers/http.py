"""JSON calls to a server over HTTP.

Every status is checked, every wait has a limit, and the server's own error message reaches the user.
"""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable
from typing import Any

import aiohttp

LONGEST = 2**30  # bytes of an answer, decompressed; the experts of a long response are some MiB
SHOWN = 600  # the most characters of a server's answer that an error quotes
CONNECT = 10.0  # seconds that a connection may take
OPENING = 64  # connections that are opened at once; a server's queue of new ones may be as short as 128
PUSHES = "X-Megatron-GVPO-Trainer"  # the header of clients that push weights
TOO_EARLY = 425  # the status if such a client asks for a sample before it has pushed (megatron_gvpo_watch)
FILES = 2**16  # the limit of open files to request; each connection is an open file


def spare_connections() -> int:
    """The number of connections to allow at once: three quarters of the files that this process may open.

    It first raises the process's limit of open files, which is usually 1,024: a step has more responses.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < FILES:
        soft = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return 3 * (FILES if soft == resource.RLIM_INFINITY else soft) // 4


async def open_session() -> aiohttp.ClientSession:
    """Open the session that all calls to a run's servers share."""
    # The number of connections has no limit, because the engines queue requests better than a client does.
    # No connection is used twice: a server may close an idle one just when a request takes it, and that would
    # look as if the server had died.
    connector = _Connector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, trust_env=False)


class _Connector(aiohttp.TCPConnector):
    """Opens a few connections at a time.

    A step sends a thousand requests at once. Where a machine is busy, that many new connections overflow the
    server's queue, and some would not be there within `CONNECT` seconds.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._opening = asyncio.Semaphore(OPENING)

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        async with self._opening:  # the time in this queue does not count towards `timeout`
            return await super().connect(req, traces, timeout)


class ServerRefused(Exception):  # noqa: N818 - the server's answer, which the caller may expect
    """The server answered with an error. `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_request(self) -> bool:
        """True if the request itself was wrong, so that every server would refuse it."""
        return 400 <= self.status < 500 and self.status not in (408, 425, 429)


class ServerGone(Exception):  # noqa: N818 - a state of the server
    """A server did not answer: the connection was refused or broke, or the time limit passed."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused  # true if no process listens at the address


class Http:
    """JSON calls to the server at `url`, over a session that calls to other servers share.

    `listens` is False while another process than the run's own server listens at `url`; then nothing is sent.
    `silence`: the seconds without a request after which the server is to give up a weight push of this client
    (megatron_gvpo_watch); None for a client that pushes none.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        api_key: str | None = None,
        listens: Callable[[], bool] | None = None,
        silence: float | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._session, self._listens = session, listens
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if silence is not None:
            self._headers[PUSHES] = f"{silence:g}"

    async def post(
        self, path: str, body: Any = None, *, timeout: float, params: dict[str, str] | None = None
    ) -> Any:
        """Return the decoded JSON answer, or its text if it is not JSON. Raises ServerRefused, ServerGone."""
        return await self._call("POST", path, timeout, json={} if body is None else body, params=params)

    async def get(self, path: str, *, timeout: float) -> Any:
        return await self._call("GET", path, timeout)

    async def _call(self, method: str, path: str, timeout: float, **arguments: Any) -> Any:
        where = f"{self.url}{path}"
        if self._listens is not None and not self._listens():
            raise ServerGone(f"{where}: the server that was started does not listen there", refused=True)
        connect = min(timeout, CONNECT)
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=connect)
        try:
            async with self._session.request(
                method, where, headers=self._headers, timeout=limit, allow_redirects=False, **arguments
            ) as response:
                text = await _text(response)
                status = response.status
        except aiohttp.ClientConnectorError as error:
            is_refused = isinstance(error.os_error, ConnectionRefusedError)
            raise ServerGone(f"{where}: {error.os_error.strerror or error}", refused=is_refused) from None
        except aiohttp.ConnectionTimeoutError:
            raise ServerGone(f"{where}: no connection within {connect:g} s") from None
        except TimeoutError:
            raise ServerGone(f"{where}: no answer within {timeout:g} s") from None
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise ServerGone(f"{where}: {str(error) or type(error).__name__}") from None
        return _successful(where, status, text)


def _successful(where: str, status: int, text: str) -> Any:
    """Return the decoded JSON answer, or its text if it is not JSON. Raises ServerRefused for an error."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = text
    # SGLang reports some errors with status 200 and success: false.
    is_unsuccessful = isinstance(answer, dict) and answer.get("success") is False
    if status < 300 and not is_unsuccessful:
        return answer
    words = _words(answer)
    if 300 <= status < 400:  # no redirect is followed: the key is for this address alone
        words = "it redirects to another address, which is not followed: name the server's own"
    raise ServerRefused(f"{where}: status {status}: {words}", 400 if status < 400 else status)


async def _text(response: aiohttp.ClientResponse) -> str:
    """The text of an answer. Raises ServerGone for one that is longer than any of a rollout server."""
    parts, size = [], 0
    async for part in response.content.iter_chunked(2**20):
        parts.append(part)
        if (size := size + len(part)) > LONGEST:
            raise ServerGone(f"{response.url}: an answer of more than {LONGEST:,} bytes")
    return b"".join(parts).decode(errors="replace")


def _words(answer: Any) -> str:
    """The message inside an error answer, in any of the shapes that the servers use."""
    while isinstance(answer, dict):
        inner = next((answer[key] for key in ("error", "message", "detail") if answer.get(key)), None)
        if inner is None:
            answer = json.dumps(answer)
            break
        answer = inner
    text = str(answer).strip() or "(empty answer)"
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."

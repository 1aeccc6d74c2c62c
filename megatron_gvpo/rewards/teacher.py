"""A teacher on servers: rank 0 sends the tokens of responses, and all ranks get their log-probs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from array import array
from collections.abc import Coroutine, Sequence
from typing import Any

import torch
from aiohttp import ClientSession
from torch import Tensor

from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.rewards.reward_model import TOLERANCE
from megatron_gvpo.servers.http import Http, ServerRefused
from megatron_gvpo.servers.launch.start import DIALECTS, report
from megatron_gvpo.servers.leader import ModelClient
from megatron_gvpo.servers.model_requests import Misfit, Servers, check_model
from megatron_gvpo.servers.model_servers import Checkpoint, open_servers
from megatron_gvpo.settings.reward_servers import TeacherConfig
from megatron_gvpo.types import OnWait, TrainBatch

SECTION = "teacher.server"
PROBE = list(range(8))  # token ids whose log-probs tell one model from another
# A request: token ids, and the index of the first one whose log-prob is requested.
LogProbRequest = tuple[tuple[int, ...], int]


class ServedTeacher(ModelClient):
    """Log-probs of responses at temperature 1, from servers of the same engines as for rollouts.

    Every rank calls every method with the same rows. Token ids are sent as they were sampled. A segment of a
    conversation is a request of its own, and equal requests of a step are sent once.
    """

    def __init__(
        self, teacher: TeacherConfig, dtype: str, cards: ModelCards, output_dir: str, first_gpu: int
    ) -> None:
        """`dtype`: the servers compute in it. `output_dir`: the run's, which gets the servers' logs.

        `first_gpu`: the first GPU of the servers that start here.
        """
        assert teacher.server is not None, "the run has no teacher on servers"
        self._teacher, self._settings, self._dtype = teacher, teacher.server, dtype
        self._cards, self._output_dir, self._first_gpu = cards, output_dir, first_gpu
        super().__init__("teacher client")
        # The following attributes exist on rank 0 alone.
        self._servers: Servers | None = None
        self._probe: list[float] | None = None  # log-probs of PROBE by the first server
        # Requests of the present step.
        self._answers: dict[LogProbRequest, concurrent.futures.Future[list[float]]] = {}
        self._sent_tokens = self._waited_s = 0.0

    def ask(self, mini_batches: Sequence[TrainBatch]) -> None:
        """Send the responses of a step, which `score` will need. Does not wait for the answers."""
        earlier, self._answers = self._answers, {}
        self._waited_s = self._sent_tokens = 0.0
        if self._loop is None:
            return
        for request in {request: None for rows in mini_batches for request, _ in _requests(rows)}:
            answer = earlier.pop(request, None)
            self._answers[request] = self._send(request) if answer is None else answer
        for task in earlier.values():
            task.cancel()

    def score(self, rows: TrainBatch, on_wait: OnWait = None) -> Tensor:
        """Return the response tokens' log-probs, fp32 [r] on the CPU of every rank.

        `on_wait` is called from time to time while ranks wait. Raises RolloutError if a server refuses a
        request, or none answers within `teacher.server.start_timeout`.
        """
        begin_s = time.perf_counter()
        data = self.answer(lambda: self._column(rows), on_wait)
        self._waited_s += time.perf_counter() - begin_s
        return torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.zeros(0)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of the current step, on rank 0."""
        if self._servers is None:
            return {}
        return {
            "teacher/wait_s": self._waited_s,
            "teacher/tokens": self._sent_tokens,
            "teacher/requests": float(self._servers.requests),
            "teacher/failed_requests": float(self._servers.failures),
        }

    def _send(self, request: LogProbRequest) -> concurrent.futures.Future[list[float]]:
        assert self._loop is not None and self._servers is not None, "only rank 0 sends"
        ids, first = request
        self._sent_tokens += len(ids)
        timeout = self._servers.timeout
        return self._loop.submit(self._servers.ask(lambda http: self._logps(http, ids, first, timeout)))

    async def _column(self, rows: TrainBatch) -> bytes:
        """The log-probs of the rows' response tokens, as fp32 in memory."""
        column = array("f", bytes(4 * rows.offsets[-1]))
        for request, own in _requests(rows):
            if request not in self._answers:
                self._answers[request] = self._send(request)
            logps = await asyncio.wrap_future(self._answers[request])
            _, first = request
            for index, begin, count in own:
                start = index - first
                column[begin : begin + count] = array("f", logps[start : start + count])
        return column.tobytes()

    async def _logps(self, http: Http, ids: Sequence[int], first: int, timeout: float) -> list[float]:
        """The log-probs of the tokens from `first` on. Raises ServerGone, ServerRefused."""
        dialect = DIALECTS[self._settings.engine](http)
        logps = await dialect.score(ids, timeout, first)
        if len(logps) != len(ids) - first:
            raise ServerRefused(f"{http.url}: {len(logps)} log-probs of {len(ids) - first} tokens", 502)
        return logps

    async def _check(self, http: Http) -> None:
        """Compare a server's files with `teacher.path`, and its probe with the first server's.

        Raises Misfit.
        """
        timeout, engine = self._settings.request_timeout, self._settings.engine
        await http.get("/health", timeout=timeout)
        await check_model(http, engine, self._teacher.path, "teacher.path", timeout)
        try:
            logps = await self._logps(http, PROBE, 1, timeout)
        except ServerRefused as error:
            if not error.is_request:
                raise
            raise Misfit(f"{SECTION}: it does not speak as engine={engine} does: {error}") from None
        if self._probe is None:
            self._probe = logps
        difference = max(abs(a - b) for a, b in zip(logps, self._probe, strict=True))
        if difference > (limit := 10 * TOLERANCE[self._dtype]):
            raise Misfit(
                f"{SECTION}: {http.url} gives fixed tokens log-probs up to {difference:.3g} nats from those "
                f"of the first server, more than {limit:g}: it serves another model"
            )

    def start_servers(self, session: ClientSession) -> Coroutine[Any, Any, None]:
        checkpoint = None
        if not self._settings.urls:
            path, trust = self._teacher.path, self._teacher.trust_remote_code
            checkpoint = Checkpoint(path, self._cards.teacher, self._dtype, trust)
        opened = open_servers(
            SECTION,
            self._settings,
            checkpoint,
            self._output_dir,
            self._first_gpu,
            report,
            "teacher's server",
        )
        if opened.supervisor is not None:
            self._opened.callback(opened.supervisor.close)
        self._servers = Servers(opened, self._settings, session, self._check)
        return self._servers.check_all()


def _requests(rows: TrainBatch) -> list[tuple[LogProbRequest, list[tuple[int, int, int]]]]:
    """The requests of the rows, each with its own tokens: (index in it, index in [r], count)."""
    requests = []
    for i in range(len(rows)):
        for segment in rows.segments(i):
            own = [(index, rows.offsets[i] + begin, count) for index, begin, count in segment.own if count]
            if own:
                requests.append(((tuple(segment.ids), own[0][0]), own))
    return requests

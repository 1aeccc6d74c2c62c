"""Times the phases of a step: `with timer.phase("rollout"): ...`, then `timer.take()` once a step.

The same phases can be seen in other tools: as NVTX ranges in Nsight Systems, as spans with OpenTelemetry.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from megatron_gvpo.settings.sections import LoggingConfig


class PhaseTimer:
    """Counts wall-clock seconds by phase: `totals` over the whole run, `take` since the last take.

    A phase may be entered many times a step. Phases must not be nested. With `synchronize`, a phase waits
    for the GPU before its clock starts and stops, so that a kernel counts in the phase that launched it.
    `markers` show the phases to other tools.
    """

    def __init__(self, *, synchronize: bool = False, markers: Sequence[Marker] = ()) -> None:
        self.totals: dict[str, float] = {}
        self._since_take: defaultdict[str, float] = defaultdict(float)
        self._current: tuple[str, float] | None = None  # the current phase, and the time when it began
        self._synchronize = synchronize
        self._markers = markers

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block, also if the block raises."""
        start = self._now()
        self._current = (name, start)
        try:
            with ExitStack() as marked:
                for marker in self._markers:
                    marked.enter_context(marker.phase(name))
                yield
        finally:
            self._current = None
            seconds = self._now() - start
            self._since_take[name] += seconds
            self.totals[name] = self.totals.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return seconds by phase since the last take."""
        taken = dict(self._since_take)
        self._since_take.clear()
        return taken

    def current(self) -> tuple[str, float] | None:
        """Return the phase that runs and its seconds so far; None between phases. Any thread may ask."""
        now = self._current
        return None if now is None else (now[0], time.perf_counter() - now[1])

    def _now(self) -> float:
        if self._synchronize:
            import torch

            if torch.cuda.is_available():
                torch.cuda.synchronize()
        return time.perf_counter()


class Marker(Protocol):
    """Marks the phases of a step. Phases are not nested."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """A context manager around a phase."""

    def close(self) -> None:
        """Send the remaining spans; no call follows."""


def phase_markers(logging: LoggingConfig, output_dir: str, rank: int) -> list[Marker]:
    """The markers that the section `logging` configures. Raises ImportError if a package is missing."""
    markers: list[Marker] = []
    if logging.profiler == "nsys":
        markers.append(NvtxRanges())
    if logging.opentelemetry:
        markers.append(OpenTelemetrySpans(output_dir, rank))
    return markers


class NvtxRanges:
    """Each phase is a range that `nsys profile` draws above the kernels that it launched."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        import torch

        return torch.cuda.nvtx.range(name)

    def close(self) -> None:
        pass


class OpenTelemetrySpans:
    """Each phase is a span, on every rank, sent over HTTP to OTEL_EXPORTER_OTLP_ENDPOINT.

    OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, ...) apply. Spans are sent
    in the background; if a collector is down, spans are lost, but the run loses no time.
    """

    def __init__(self, output_dir: str, rank: int) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ImportError(
                f"logging.opentelemetry=true needs a package that cannot be imported ({error}): "
                "pip install 'megatron-gvpo[opentelemetry]'"
            ) from None
        of_run: dict[str, str | int] = {
            "service.name": "megatron-gvpo",
            "rank": rank,
            "output_dir": output_dir,
        }
        self._provider = TracerProvider(resource=Resource.create(of_run), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("megatron_gvpo")

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        with self._tracer.start_as_current_span(name):
            yield

    def close(self) -> None:
        self._provider.shutdown()

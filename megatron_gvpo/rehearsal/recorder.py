"""Records each phase of a rehearsal: memory, seconds of the host, and calls to the device."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from megatron_gvpo.rehearsal.compile_clock import CompileClock
from megatron_gvpo.rehearsal.nullcuda import counters
from megatron_gvpo.rehearsal.world import FakeWorld

GIB = 2**30


@dataclass
class Phase:
    """Memory in GiB: allocated at the end; the most allocated and the most reserved since the phase began."""

    name: str
    seconds: float  # of this machine, without `compile_seconds`
    compile_seconds: float  # of torch.compile and Triton
    allocated: float
    peak: float
    reserved: float
    counts: dict[str, int] = field(default_factory=dict)  # the null CUDA's counters, those above 0
    collectives: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)  # by group and operation
    results: dict[str, Any] = field(default_factory=dict)
    out_of_memory: str | None = None  # PyTorch's message, with which the phase ended


class PhaseRecorder:
    """`with recorder.phase(name) as results:`; after an out-of-memory error no further phase should begin."""

    def __init__(self, world: FakeWorld) -> None:
        self.phases: list[Phase] = []
        self._world = world
        self._clock = CompileClock()
        self._clock.install()
        self._highest = self._reserved = 0  # bytes
        self._reset = torch.cuda.reset_peak_memory_stats
        # The memory profile resets the peak within an update.
        torch.cuda.reset_peak_memory_stats = self._keep_peak  # type: ignore[assignment]

    def _keep_peak(self, *device: Any) -> None:
        self._highest = max(self._highest, torch.cuda.max_memory_allocated())
        reserved = torch.cuda.max_memory_reserved()
        self._reserved = max(self._reserved, reserved)
        self._reset(*device)

    @property
    def is_out_of_memory(self) -> bool:
        return bool(self.phases) and self.phases[-1].out_of_memory is not None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[dict[str, Any]]:
        self._highest = self._reserved = 0
        self._reset()
        self._world.traffic.clear()
        before, begin, compiled = counters.read(), time.perf_counter(), self._clock.seconds
        results: dict[str, Any] = {}
        problem = None
        try:
            yield results
        except torch.OutOfMemoryError as error:
            problem = str(error).partition(" If reserved but")[0]
        seconds, compiling = time.perf_counter() - begin, self._clock.seconds - compiled
        self._keep_peak()
        counts = {key: value - before[key] for key, value in counters.read().items()}
        collectives: dict[str, dict[str, dict[str, int]]] = {}
        for (group, operation), traffic in sorted(self._world.traffic.items()):
            collectives.setdefault(group, {})[operation] = asdict(traffic)
        self.phases.append(
            Phase(
                name=name,
                seconds=round(seconds - compiling, 2),
                compile_seconds=round(compiling, 2),
                allocated=torch.cuda.memory_allocated() / GIB,
                peak=self._highest / GIB,
                reserved=self._reserved / GIB,
                counts={key: value for key, value in counts.items() if value},
                collectives=collectives,
                results=results,
                out_of_memory=problem,
            )
        )


def host_gib() -> float:
    """The most host memory that this process has had, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB

"""Profiles the steps of `logging.profile_steps` with torch.profiler or Nsight Systems."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    import torch.profiler

    from megatron_gvpo.settings.sections import LoggingConfig


def profile_window(logging: LoggingConfig, output_dir: Path, rank: int) -> ProfileWindow:
    """Return the window over the steps logging.profile_steps; with None it never profiles and costs nothing.

    With `logging.profiler: nsys`, `nsys profile --capture-range=cudaProfilerApi` records the window.
    With torch's profiler, it writes two files to `output_dir`: `profile/rank<r>_steps<first>-<last>.json.gz`,
    a Chrome trace, and the same name with `.txt`, a table of the operators by their own time.
    """
    record: Recording = CudaProfiler()
    if logging.profiler == "torch":
        record = TorchProfiler(output_dir / "profile", rank, logging.profile_steps)
    return ProfileWindow(logging.profile_steps, record)


class Recording(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


class ProfileWindow:
    """Call `window.step(n)` at the start of every step n, inside `with window:`.

    A run that ends or fails inside the window still writes its trace.
    """

    def __init__(self, profile_steps: tuple[int, int] | None, record: Recording) -> None:
        self._steps = profile_steps
        self._record = record
        self._running = False

    def step(self, n: int) -> None:
        if self._steps is None:
            return
        first, last = self._steps
        is_inside = first <= n <= last
        if is_inside and not self._running:
            self._running = True
            self._record.start()
        elif not is_inside:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._running:
            self._running = False
            self._record.stop()


class CudaProfiler:
    """Opens and closes the capture range of Nsight Systems."""

    def start(self) -> None:
        import torch

        torch.cuda.profiler.start()

    def stop(self) -> None:
        import torch

        torch.cuda.profiler.stop()


class TorchProfiler:
    """Writes the files of a rank that `profile_window` names."""

    def __init__(self, directory: Path, rank: int, steps: tuple[int, int] | None) -> None:
        self._stem = directory / f"rank{rank}_steps{steps[0]}-{steps[1]}" if steps else directory
        self._profiler: torch.profiler.profile | None = None

    def start(self) -> None:
        import torch.profiler as torch_profiler

        self._profiler = torch_profiler.profile(activities=torch_profiler.supported_activities())
        self._profiler.start()

    def stop(self) -> None:
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._stem.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(f"{self._stem}.json.gz")
        averages = profiler.key_averages()
        on_gpu = any(event.self_device_time_total > 0 for event in averages)
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = averages.table(sort_by=order, row_limit=60, max_name_column_width=80)
        Path(f"{self._stem}.txt").write_text(table)

"""Profiles the steps of `logging.profile_steps` with torch.profiler."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import torch.profiler


def profile_window(profile_steps: tuple[int, int] | None, output_dir: Path, rank: int) -> ProfileWindow:
    """Return the window over steps [first, last], both included; None never profiles and costs nothing.

    It writes two files to `output_dir`: `profile/rank<r>_steps<first>-<last>.json.gz`, a Chrome trace, and
    the same name with `.txt`, a table of the operators by their own time.
    """
    return ProfileWindow(profile_steps, output_dir / "profile", rank)


class ProfileWindow:
    """Call `window.step(n)` at the start of every step n, inside `with window:`.

    A run that ends or fails inside the window still writes its trace.
    """

    def __init__(self, profile_steps: tuple[int, int] | None, directory: Path, rank: int) -> None:
        self._steps = profile_steps
        self._directory = directory
        self._rank = rank
        self._profiler: torch.profiler.profile | None = None

    def step(self, n: int) -> None:
        if self._steps is None:
            return
        first, last = self._steps
        inside = first <= n <= last
        if inside and self._profiler is None:
            self._start()
        elif not inside and self._profiler is not None:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None:
            self._stop()

    def _start(self) -> None:
        import torch.profiler as torch_profiler

        self._profiler = torch_profiler.profile(activities=torch_profiler.supported_activities())
        self._profiler.start()

    def _stop(self) -> None:
        assert self._profiler is not None and self._steps is not None
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        stem = self._directory / f"rank{self._rank}_steps{self._steps[0]}-{self._steps[1]}"
        profiler.export_chrome_trace(f"{stem}.json.gz")
        averages = profiler.key_averages()
        on_gpu = any(event.self_device_time_total > 0 for event in averages)
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        Path(f"{stem}.txt").write_text(averages.table(sort_by=order, row_limit=60, max_name_column_width=80))

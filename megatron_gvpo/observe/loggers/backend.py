"""The interface of a metrics backend (TensorBoard, W&B, ...), and the records passed to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron_gvpo.observe.alerts import Alert


class Sample(NamedTuple):
    """One response in the form in which it is shown to people."""

    kind: str  # "train" or "eval"; "demonstration" for a solution in the data
    prompt: str
    response: str
    reward: float


class RunInfo(NamedTuple):
    """The facts of a run that a backend gets when it opens."""

    output_dir: Path
    name: str  # the run's name at the service, unless the settings give one
    resumed: bool
    config: Mapping[str, Any]  # the configuration as written, without secrets


class Backend(Protocol):
    """A backend for metrics and samples, on rank 0. Steps come in order."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step; values may be NaN or infinite."""

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Add a table of a few responses of a step."""

    def tell(self, alert: Alert) -> None:
        """Add an alert, in words."""

    def close(self) -> None:
        """Finish the output. No other call follows."""

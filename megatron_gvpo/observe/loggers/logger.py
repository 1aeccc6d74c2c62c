"""Gives the metrics of a step to metrics.jsonl, to TensorBoard and to the services that are configured.

A resumed run continues from a checkpoint: metrics.jsonl and TensorBoard drop the steps that the interrupted
run logged after it. So the records of an interrupted and resumed run equal those of an uninterrupted one. The
services only append: they keep such steps, and do not get them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.json_files import JsonlWriter
from megatron_gvpo.observe.alerts import Alert
from megatron_gvpo.observe.loggers.backend import Backend, RunInfo, Sample
from megatron_gvpo.observe.loggers.services import open_services
from megatron_gvpo.observe.loggers.writers import TensorBoardWriter

if TYPE_CHECKING:
    from megatron_gvpo.settings.sections import LoggingConfig


class MetricLogger:
    """Writes the flat metrics of a step, `{"reward/mean": 0.4, ...}`, to every configured backend.

    Use it on rank 0 only. `resume_step` is the step of the checkpoint that the run continues from; None
    starts a new record. Log a step before you save its checkpoint: then no line can be missing after a
    crash. TensorBoard and the services show `run_config` beside the curves.

    Raises ImportError if `logging` names a service whose package is not installed.
    """

    def __init__(
        self,
        logging: LoggingConfig,
        output_dir: Path,
        *,
        resume_step: int | None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        keep_until = -1 if resume_step is None else resume_step
        metrics = output_dir / "metrics.jsonl"
        run = RunInfo(output_dir, output_dir.resolve().name, resume_step is not None, run_config or {})
        self._backends: list[Backend] = open_services(logging, run, keep_until)
        if logging.tensorboard:
            self._backends.append(TensorBoardWriter(output_dir / "tensorboard", keep_until, run_config))
        self._metrics = JsonlWriter(metrics, keep_until)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}
        for backend in self._backends:
            backend.log(step, numbers)
        self._metrics.log(step, numbers)

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        """Give a few responses of a step to the backends that show samples. Call it before `log`."""
        for backend in self._backends:
            backend.show(step, samples)

    def tell(self, alert: Alert) -> None:
        """Give an alert to the backends.

        metrics.jsonl does not need alerts, because they follow from its metrics.
        """
        for backend in self._backends:
            backend.tell(alert)

    def close(self) -> None:
        for backend in self._backends:
            backend.close()
        self._metrics.close()

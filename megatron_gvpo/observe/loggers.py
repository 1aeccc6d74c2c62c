"""Writes metrics to metrics.jsonl, and to TensorBoard and Weights & Biases if configured.

Every backend gets the last step that counts, and drops what an interrupted run logged after it. So the
records of an interrupted and resumed run equal those of an uninterrupted one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_gvpo.observe.jsonl import JsonlWriter

if TYPE_CHECKING:
    from megatron_gvpo.config.schema import LoggingConfig


class Backend(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricLogger:
    """Writes the flat metrics of a step, `{"reward/mean": 0.4, ...}`, to every configured backend.

    Use it on rank 0 only. `resume_step` is the step of the checkpoint that the run continues from; None
    starts a new record. Log a step before you save its checkpoint: then no line can be missing after a
    crash. TensorBoard and Weights & Biases show `run_config` beside the curves.

    Raises ImportError if `logging.wandb_project` is set and wandb is not installed.
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
        self._backends: list[Backend] = []
        if logging.wandb_project is not None:
            self._backends.append(WandbWriter(logging.wandb_project, output_dir, keep_until, run_config))
        if logging.tensorboard:
            self._backends.append(TensorBoardWriter(output_dir / "tensorboard", keep_until, run_config))
        self._backends.append(JsonlWriter(output_dir / "metrics.jsonl", keep_until))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {name: float(value) for name, value in metrics.items()}
        for backend in self._backends:
            backend.log(step, numbers)

    def close(self) -> None:
        for backend in self._backends:
            backend.close()


class TensorBoardWriter:
    """Writes TensorBoard event files; a purge mark hides the steps after `keep_until`."""

    def __init__(self, directory: Path, keep_until: int, run_config: Mapping[str, Any] | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = partial(_report_thread, threading.excepthook)
        self._writer = SummaryWriter(str(directory), purge_step=keep_until + 1, flush_secs=10)
        if run_config is not None:
            import yaml

            text = yaml.safe_dump(dict(run_config), sort_keys=False)
            self._writer.add_text("config", f"```yaml\n{text}```", global_step=keep_until + 1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, global_step=step)

    def close(self) -> None:
        self._writer.close()


def _report_thread(
    report: Callable[[threading.ExceptHookArgs], object], died: threading.ExceptHookArgs
) -> None:
    """Stay silent if TensorBoard's writer thread dies (of a full disk): the next `log` raises its error."""
    if not type(died.thread).__module__.startswith("tensorboard."):
        report(died)


class WandbWriter:
    """Writes to Weights & Biases, online or (WANDB_MODE=offline) offline; a resumed run continues its page.

    Weights & Biases ignores a step that it already has. A resumed run repeats such steps exactly.
    """

    def __init__(
        self, project: str, output_dir: Path, keep_until: int, run_config: Mapping[str, Any] | None
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise ImportError(
                f"logging.wandb_project={project!r} needs Weights & Biases, which is not installed: "
                "pip install wandb (or set logging.wandb_project=null)"
            ) from None
        id_file = output_dir / "wandb_run_id"
        resumed = keep_until >= 0 and id_file.is_file()
        self._run = wandb.init(
            project=project,
            dir=str(output_dir),
            id=id_file.read_text().strip() if resumed else None,
            resume="allow" if resumed else None,
            config=dict(run_config) if run_config is not None else None,
        )
        id_file.write_text(self._run.id + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()

"""Writes to Weights & Biases, online, or offline with WANDB_MODE=offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import wandb

from megatron_gvpo.observe.alerts import Alert
from megatron_gvpo.observe.loggers.backend import RunInfo, Sample


class WandbWriter:
    """A resumed run continues its page; the file wandb_run_id in output_dir keeps its name."""

    def __init__(self, project: str, run: RunInfo) -> None:
        id_file = run.output_dir / "wandb_run_id"
        resumed = run.resumed and id_file.is_file()
        self._run = wandb.init(
            project=project,
            dir=str(run.output_dir),
            id=id_file.read_text().strip() if resumed else None,
            resume="allow" if resumed else None,
            config=dict(run.config),
        )
        id_file.write_text(self._run.id + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        table = wandb.Table(columns=list(Sample._fields), data=[list(sample) for sample in samples])
        self._run.log({"samples": table}, step=step)

    def tell(self, alert: Alert) -> None:
        self._run.alert(title=alert.rule, text=str(alert), level="WARN")

    def close(self) -> None:
        self._run.finish()

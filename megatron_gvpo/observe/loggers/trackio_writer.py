"""Writes to trackio: a database on this machine (TRACKIO_DIR), or a Hugging Face Space (TRACKIO_SPACE_ID)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import trackio

from megatron_gvpo.observe.alerts import Alert
from megatron_gvpo.observe.loggers.backend import RunInfo, Sample


class TrackioWriter:
    """A resumed run continues the run of the same name; a run started again must find the name free."""

    def __init__(self, project: str, run: RunInfo) -> None:
        trackio.init(
            project=project,
            name=run.name,
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            config=dict(run.config),
            resume="allow" if run.resumed else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        trackio.log(dict(metrics), step=step)

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        table = trackio.Table(columns=list(Sample._fields), data=[list(sample) for sample in samples])
        trackio.log({"samples": table}, step=step)

    def tell(self, alert: Alert) -> None:
        trackio.alert(title=alert.rule, text=str(alert))

    def close(self) -> None:
        trackio.finish()

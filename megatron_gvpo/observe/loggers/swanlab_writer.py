"""Writes to SwanLab: its cloud, or files in OUTPUT_DIR/swanlab with SWANLAB_MODE=offline or local."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import swanlab

from megatron_gvpo.observe.alerts import Alert
from megatron_gvpo.observe.loggers.backend import RunInfo, Sample


class SwanlabWriter:
    """A resumed run continues its page; the file swanlab_run_id in output_dir keeps its name."""

    def __init__(self, project: str, run: RunInfo) -> None:
        id_file = run.output_dir / "swanlab_run_id"
        resumed = run.resumed and id_file.is_file()
        (directory := run.output_dir / "swanlab").mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=project,
            name=run.name,
            log_dir=str(directory),
            config=dict(run.config),
            id=id_file.read_text().strip() if resumed else None,
            resume="allow" if resumed else None,
        )
        id_file.write_text(self._run.id + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        texts = [
            swanlab.Text(f"{prompt}\n\n{response}", f"{kind}, reward {reward:.4g}")
            for kind, prompt, response, reward in samples
        ]
        self._run.log({"samples": texts}, step=step)

    def tell(self, alert: Alert) -> None:
        self._run.log({"alerts": swanlab.Text(str(alert), alert.rule)}, step=alert.step)

    def close(self) -> None:
        self._run.finish()

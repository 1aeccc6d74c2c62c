"""Backends of a run's metrics: TensorBoard, and the services Weights & Biases, trackio, MLflow and SwanLab.

A service's class is made from the project and the run, and then imports its package: a run needs only the
packages of the services to which it logs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_gvpo.observe.alerts import Alert
from megatron_gvpo.observe.loggers.backend import RunInfo, Sample


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

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        for kind in {sample.kind: None for sample in samples}:
            text = "\n\n".join(_markdown(sample) for sample in samples if sample.kind == kind)
            self._writer.add_text(f"samples/{kind}", text, global_step=step)

    def tell(self, alert: Alert) -> None:
        self._writer.add_text("alerts", f"**{alert.rule}**\n\n    {alert}", global_step=alert.step)

    def close(self) -> None:
        self._writer.close()


def _markdown(sample: Sample) -> str:
    """The sample as indented blocks, in which TensorBoard shows every character as it is."""
    blocks = (text.replace("\n", "\n    ") for text in (sample.prompt, sample.response))
    return "**reward {:.4g}**\n\n    {}\n\n→\n\n    {}".format(sample.reward, *blocks)


def _report_thread(
    report: Callable[[threading.ExceptHookArgs], object], died: threading.ExceptHookArgs
) -> None:
    """Stay silent if TensorBoard's writer thread dies (of a full disk): the next `log` raises its error."""
    if not type(died.thread).__module__.startswith("tensorboard."):
        report(died)


class WandbWriter:
    """Weights & Biases, online, or offline with WANDB_MODE=offline.

    A resumed run continues its page; the file wandb_run_id in output_dir keeps its name.
    """

    def __init__(self, project: str, run: RunInfo) -> None:
        import wandb

        id_file = run.output_dir / "wandb_run_id"
        resumed = run.resumed and id_file.is_file()
        self._table = wandb.Table
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
        table = self._table(columns=list(Sample._fields), data=[list(sample) for sample in samples])
        self._run.log({"samples": table}, step=step)

    def tell(self, alert: Alert) -> None:
        self._run.alert(title=alert.rule, text=str(alert), level="WARN")

    def close(self) -> None:
        self._run.finish()


class SwanlabWriter:
    """SwanLab's cloud, or files in OUTPUT_DIR/swanlab with SWANLAB_MODE=offline or local.

    A resumed run continues its page; the file swanlab_run_id in output_dir keeps its name.
    """

    def __init__(self, project: str, run: RunInfo) -> None:
        import swanlab

        id_file = run.output_dir / "swanlab_run_id"
        resumed = run.resumed and id_file.is_file()
        (directory := run.output_dir / "swanlab").mkdir(exist_ok=True)
        self._text = swanlab.Text
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
            self._text(f"{prompt}\n\n{response}", f"{kind}, reward {reward:.4g}")
            for kind, prompt, response, reward in samples
        ]
        self._run.log({"samples": texts}, step=step)

    def tell(self, alert: Alert) -> None:
        self._run.log({"alerts": self._text(str(alert), alert.rule)}, step=alert.step)

    def close(self) -> None:
        self._run.finish()


class TrackioWriter:
    """trackio: a database on this machine (TRACKIO_DIR), or a Hugging Face Space (TRACKIO_SPACE_ID).

    A resumed run continues the run of the same name; a run that starts again needs a free name.
    """

    def __init__(self, project: str, run: RunInfo) -> None:
        import trackio

        self._trackio = trackio
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
        self._trackio.log(dict(metrics), step=step)

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [list(sample) for sample in samples]
        self._trackio.log(
            {"samples": self._trackio.Table(columns=list(Sample._fields), data=rows)}, step=step
        )

    def tell(self, alert: Alert) -> None:
        self._trackio.alert(title=alert.rule, text=str(alert))

    def close(self) -> None:
        self._trackio.finish()


MOST_METRICS = 1000  # MLflow's limit for one request


class MlflowWriter:
    """MLflow: the server of MLFLOW_TRACKING_URI, or a database in OUTPUT_DIR, mlflow.db.

    A resumed run continues its MLflow run; the file mlflow_run_id in output_dir keeps its name. MLflow allows
    no "@" in a name: eval/pass@1 is eval/pass_at_1 there.
    """

    def __init__(self, experiment: str, run: RunInfo) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        here, server = run.output_dir.resolve(), os.environ.get("MLFLOW_TRACKING_URI")
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=server or f"sqlite:///{here / 'mlflow.db'}")
        id_file = run.output_dir / "mlflow_run_id"
        if run.resumed and id_file.is_file():
            self._run_id = id_file.read_text().strip()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(experiment)
        files = None if server else (here / "mlruns").as_uri()
        where = known.experiment_id if known else self._client.create_experiment(experiment, files)
        self._run_id = self._client.create_run(where, run_name=run.name).info.run_id
        self._client.log_dict(self._run_id, dict(run.config), "config.yaml")
        id_file.write_text(self._run_id + "\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        values = [
            self._metric(name.replace("@", "_at_"), value, now, step)
            for name, value in sorted(metrics.items())
        ]
        for first in range(0, len(values), MOST_METRICS):
            self._client.log_batch(self._run_id, values[first : first + MOST_METRICS])

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [sample._asdict() for sample in samples]
        self._client.log_dict(self._run_id, {"samples": rows}, f"samples/step_{step:06}.json")

    def tell(self, alert: Alert) -> None:
        self._client.set_tag(self._run_id, f"alert/{alert.step:06}/{alert.rule}", str(alert))

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

"""Writes to MLflow: the server of MLFLOW_TRACKING_URI, or a database in OUTPUT_DIR, mlflow.db."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric

from megatron_gvpo.observe.alerts import Alert
from megatron_gvpo.observe.loggers.backend import RunInfo, Sample

MOST_METRICS = 1000  # MLflow's limit for one request


class MlflowWriter:
    """A resumed run continues its MLflow run; the file mlflow_run_id in output_dir keeps its name.

    MLflow allows no "@" in a name: eval/pass@1 is eval/pass_at_1 there.
    """

    def __init__(self, experiment: str, run: RunInfo) -> None:
        here, server = run.output_dir.resolve(), os.environ.get("MLFLOW_TRACKING_URI")
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
            Metric(name.replace("@", "_at_"), value, now, step) for name, value in sorted(metrics.items())
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

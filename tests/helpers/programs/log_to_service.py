"""Logs a run, interrupted after step 4 and resumed from step 2, to one service; prints the service's records.

usage: log_to_service.py trackio|mlflow|swanlab OUTPUT_DIR, in the environment of services.txt
"""

import json
import math
import signal
import sys
from pathlib import Path

from megatron_gvpo.observe.alerts import Alert
from megatron_gvpo.observe.loggers.backend import Sample
from megatron_gvpo.observe.loggers.logger import MetricLogger
from megatron_gvpo.settings.sections import LoggingConfig

KEYS = {"trackio": "trackio_project", "mlflow": "mlflow_experiment", "swanlab": "swanlab_project"}


def main(service: str, output_dir: Path) -> None:
    config = LoggingConfig.model_validate({"tensorboard": False, KEYS[service]: "project"})
    before = signal.getsignal(signal.SIGINT)
    for resume_step, steps in ((None, range(5)), (2, range(3, 8))):
        run_config = {"train": {"steps": 8}}
        logger = MetricLogger(config, output_dir, resume_step=resume_step, run_config=run_config)
        assert signal.getsignal(signal.SIGINT) is before, "Ctrl-C must stay ours"
        for step in steps:
            logger.show(step, [Sample("train", "1+1=", "</b>\n2", 0.5)])
            if step in (1, 6):
                logger.tell(Alert(step, "no signal", "nothing to learn", "the prompts"))
            logger.log(step, {"eval/pass@1": step / 8, "train/loss": math.nan if step == 1 else 1.0})
        logger.close()
    readers = {"trackio": in_trackio, "mlflow": in_mlflow, "swanlab": in_swanlab}[service]
    print(json.dumps(readers(output_dir)))


def in_trackio(output_dir: Path) -> dict:
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("project", output_dir.name)
    return {
        "values": [[row["step"], row["eval/pass@1"]] for row in rows if "eval/pass@1" in row],
        "samples": [row["step"] for row in rows if "samples" in row],
        "alerts": [alert["text"] for alert in SQLiteStorage.get_alerts("project", output_dir.name)],
        "config": SQLiteStorage.get_run_config("project", output_dir.name)["train"],
    }


def in_mlflow(output_dir: Path) -> dict:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{output_dir.resolve() / 'mlflow.db'}")
    runs = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"]
    run_id = runs[0].info.run_id
    [artifacts] = (output_dir / "mlruns").glob("*/artifacts")
    return {
        "values": [[m.step, m.value] for m in client.get_metric_history(run_id, "eval/pass_at_1")],
        "samples": [int(path.stem[5:]) for path in sorted(artifacts.glob("samples/*.json"))],
        "alerts": [text for tag, text in runs[0].data.tags.items() if tag.startswith("alert")],
        "config": {"steps": 8} if "steps: 8" in (artifacts / "config.yaml").read_text() else None,
    }


def in_swanlab(output_dir: Path) -> dict:
    files = sorted((output_dir / "swanlab").glob("run-*"))
    every = sorted(path for run in files for path in run.glob("media/text/*.txt"))
    alerts = [path.read_text() for path in every if "nothing to learn" in path.read_text()]
    texts = [path for path in every if path.read_text() not in alerts]
    assert "</b>\n2" in texts[0].read_text()
    assert len({next(run.glob("*.swanlab")).name for run in files}) == 1, "one run, continued"
    config = (files[-1] / "files" / "config.yaml").read_text()
    return {
        "values": [],  # swanlab's records have a format of their own
        "samples": [int(path.name.partition("-")[0]) for path in texts],
        "alerts": alerts,
        "config": {"steps": 8} if "steps" in config and "8" in config else None,
    }


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

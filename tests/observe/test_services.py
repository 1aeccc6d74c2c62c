"""Runs logged to the real packages of the tracking services, without a network."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import HELPERS, IMPORTS
from helpers.programs.environments import environment_of
from helpers.suite.package_log import own_records
from helpers.suite.real_parts import used

from megatron_gvpo.observe.alerts import Alert
from megatron_gvpo.observe.loggers.backend import Sample
from megatron_gvpo.observe.loggers.logger import MetricLogger
from megatron_gvpo.observe.loggers.services import SERVICES, ServiceError
from megatron_gvpo.settings.sections import LoggingConfig


@pytest.fixture(scope="session")
def services_python() -> Path:
    """The Python of an environment with the services' packages, built once in the user's cache."""
    used("trackio, MLflow and SwanLab")
    return environment_of("services.txt")


@pytest.mark.parametrize("service", ["trackio", "mlflow", "swanlab"])
def test_a_resumed_run_continues_in_the_service_and_repeats_nothing(service, services_python, tmp_path):
    surroundings = {
        **os.environ,
        "PYTHONPATH": IMPORTS,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "SWANLAB_MODE": "offline",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # the environment is kept, and so is what its imports compile
    }
    surroundings.pop("MLFLOW_TRACKING_URI", None)
    script = [services_python, HELPERS / "programs" / "log_to_service.py", service, tmp_path / "run"]
    done = subprocess.run(script, env=surroundings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    contents = json.loads(done.stdout.splitlines()[-1])
    assert contents["samples"] == list(range(8))
    alerts = [f"step {step}: nothing to learn. Look at the prompts." for step in (1, 6)]
    assert sorted(contents["alerts"]) == alerts
    assert contents["config"] == {"steps": 8}
    if service != "swanlab":
        assert contents["values"] == [[step, step / 8] for step in range(8)]


def test_wandb_gets_a_table_of_samples(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = MetricLogger(LoggingConfig(tensorboard=False, wandb_project="p"), tmp_path, resume_step=None)
    logger.show(0, [Sample("eval", "1+1=", "two", 1.0)])
    logger.tell(Alert(0, "no signal", "nothing to learn", "the prompts"))
    logger.log(0, {"reward/mean": 1.0})
    logger.close()
    wandb.teardown()
    [records] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"nothing to learn" in records.read_bytes()
    [table] = tmp_path.glob("wandb/offline-run-*/files/media/table/samples*.json")
    assert json.loads(table.read_text())["data"] == [["eval", "1+1=", "two", 1.0]]


class Recording:
    """A stand-in for the package `wandb` that keeps the steps it gets."""

    id = "1"
    Table = dict

    def __init__(self) -> None:
        self.steps: list[int] = []

    def init(self, **_):
        return self

    def log(self, _, step):
        self.steps.append(step)

    def finish(self):
        pass


def log_steps(out: Path, steps: range, resume_step: int | None, **services: str) -> None:
    config = LoggingConfig(tensorboard=False, **services)
    logger = MetricLogger(config, out, resume_step=resume_step)
    for step in steps:
        logger.log(step, {"reward/mean": 1.0})
    logger.close()


def test_a_service_gets_each_step_once_however_often_the_run_is_resumed(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", service := Recording())
    log_steps(tmp_path, range(8), None, wandb_project="p")
    log_steps(tmp_path, range(5, 7), 4, wandb_project="p")  # interrupted before it was where the first was
    assert [record.getMessage() for record in own_records(caplog)] == [
        "Weights & Biases (logging.wandb_project=p) keeps steps 5 to 7 from before the interruption, and "
        "does not get them again; metrics.jsonl gets those of the resumed run"
    ]
    log_steps(tmp_path, range(5, 10), 4, wandb_project="p")
    assert service.steps == [*range(10)]
    log_steps(tmp_path, range(3), None, wandb_project="p")
    assert service.steps[10:] == [*range(3)], "another run begins"


def test_a_service_that_is_new_on_a_resume_gets_every_step_from_there(tmp_path, monkeypatch, caplog):
    log_steps(tmp_path, range(8), None)
    monkeypatch.setitem(sys.modules, "wandb", service := Recording())
    log_steps(tmp_path, range(5, 10), 4, wandb_project="p")
    assert service.steps == [*range(5, 10)] and own_records(caplog) == []


class Broken:
    """A stand-in for the package `wandb` whose service fails."""

    def __init__(self, at: str) -> None:
        self.at = at

    def init(self, **_):
        return self if self.at != "init" else self.fail()

    id = "1"

    def log(self, *_, **__):
        self.fail()

    def fail(self):
        raise ConnectionError("no route to host\nand much more")

    finish = Table = fail


def test_a_service_that_cannot_be_opened_is_named_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", Broken("init"))
    message = (
        r"^logging.wandb_project=p: Weights & Biases cannot be opened: ConnectionError: no route to host$"
    )
    with pytest.raises(ServiceError, match=message):
        MetricLogger(LoggingConfig(tensorboard=False, wandb_project="p"), tmp_path, resume_step=None)


def test_a_service_that_fails_costs_no_step(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", Broken("log"))
    logger = MetricLogger(LoggingConfig(tensorboard=False, wandb_project="p"), tmp_path, resume_step=None)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            logger.log(step, {"reward/mean": 1.0})
        logger.close()
    [warning] = own_records(caplog)
    assert warning.getMessage() == (
        "Weights & Biases (logging.wandb_project) failed at step 0 and gets no more of this run: "
        "ConnectionError: no route to host; metrics.jsonl has every step"
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.title)
def test_each_service_has_its_key(service):
    assert service.key in LoggingConfig.model_fields

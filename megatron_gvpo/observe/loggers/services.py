"""The tracking services that a run can log to, each with the key of the section `logging` that names it.

A new service is a class in `writers.py` and a line here.
"""

from __future__ import annotations

import configparser
import json
import logging
import netrc
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from megatron_gvpo.observe.alerts import Alert
from megatron_gvpo.observe.loggers.backend import Backend, RunInfo, Sample
from megatron_gvpo.observe.loggers.writers import MlflowWriter, SwanlabWriter, TrackioWriter, WandbWriter
from megatron_gvpo.runs.record import write_complete
from megatron_gvpo.runs.written import json_object

if TYPE_CHECKING:
    from megatron_gvpo.settings.sections import LoggingConfig

log = logging.getLogger(__name__)


class Service(NamedTuple):
    key: str  # key of the section `logging` whose value is the project
    title: str
    package: str  # imported when the key is set
    install: str
    writer: Callable[[str, RunInfo], Backend]  # made from the project and the run


SERVICES = (
    Service("wandb_project", "Weights & Biases", "wandb", "wandb", WandbWriter),
    Service("trackio_project", "trackio", "trackio", "trackio", TrackioWriter),
    Service("mlflow_experiment", "MLflow", "mlflow", "'megatron-gvpo[mlflow]'", MlflowWriter),
    Service("swanlab_project", "SwanLab", "swanlab", "swanlab", SwanlabWriter),
)


class ServiceError(RuntimeError):
    """A tracking service could not be opened: it lacks a key or a network, or has a run of this name."""


class _LastSteps:
    """The last step that each service has got, in services.json in the output directory.

    metrics.jsonl does not tell it: a resumed run drops steps there, and may name another service.
    """

    def __init__(self, run: RunInfo) -> None:
        self._file = run.output_dir / "services.json"
        self._steps = json_object(self._file) if run.resumed else {}

    def of(self, project: str) -> int:
        """`project`: the service's key with its value; -1 if it has no step."""
        step = self._steps.get(project)
        return step if type(step) is int else -1

    def write(self, project: str, step: int) -> None:
        self._steps[project] = step
        write_complete(self._file, json.dumps(self._steps) + "\n")


def open_services(config: LoggingConfig, run: RunInfo, resume_step: int) -> list[Backend]:
    """Opens every service that the section `logging` names.

    The services append. So they do not get a step again that the run logged before it was interrupted and
    resumed from `resume_step`; a warning names such steps. Raises ImportError, which names the key and the
    command, if a package is not installed, and ServiceError if a service cannot be opened.
    """
    opened: list[Backend] = []
    last_steps = _LastSteps(run)
    for service in SERVICES:
        if (project := getattr(config, service.key)) is None:
            continue
        try:
            import_module(service.package)
        except ImportError as error:
            raise ImportError(
                f"logging.{service.key}={project!r} needs {service.title}, which cannot be imported "
                f"({error}): pip install {service.install} (or set logging.{service.key}=null)"
            ) from None
        try:
            with _keeping_handlers():
                writer = service.writer(project, run)
        except Exception as error:
            raise ServiceError(
                f"logging.{service.key}={project}: {service.title} cannot be opened: {_described(error)}"
            ) from None
        name = f"{service.key}={project}"
        if (last := last_steps.of(name)) > resume_step:
            log.warning(
                "%s (logging.%s) keeps steps %d to %d from before the interruption, and does not get them "
                "again; metrics.jsonl gets those of the resumed run",
                service.title,
                name,
                resume_step + 1,
                last,
            )
        opened.append(_Tolerant(writer, service, last, partial(last_steps.write, name)))
    return opened


class _Tolerant:
    """A service that may fail without ending the run.

    After a first failure and its warning it gets no more records.

    metrics.jsonl has every step in any case.
    """

    def __init__(
        self, writer: Backend, service: Service, last: int, on_logged: Callable[[int], None]
    ) -> None:
        """`last`: the last step that the service has from before; `on_logged`: called with each new one."""
        self._writer: Backend | None = writer
        self._service = service
        self._last, self._on_logged = last, on_logged

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        def log_and_note(writer: Backend) -> None:
            writer.log(step, metrics)
            self._on_logged(step)

        self._try(step, log_and_note)

    def show(self, step: int, samples: Sequence[Sample]) -> None:
        self._try(step, lambda writer: writer.show(step, samples))

    def tell(self, alert: Alert) -> None:
        self._try(alert.step, lambda writer: writer.tell(alert))

    def close(self) -> None:
        self._try(None, lambda writer: writer.close())

    def _try(self, step: int | None, call: Callable[[Backend], None]) -> None:
        """Call the service, unless it has failed before or has this step already; None: at the end."""
        if self._writer is None or (step is not None and step <= self._last):
            return
        try:
            call(self._writer)
        except Exception as error:
            self._writer = None
            when = "at the end of the run" if step is None else f"at step {step}"
            log.warning(
                "%s (logging.%s) failed %s and gets no more of this run: %s; metrics.jsonl has every step",
                self._service.title,
                self._service.key,
                when,
                _described(error),
            )


@contextmanager
def _keeping_handlers() -> Generator[None]:
    """Restores the handlers of signals and exceptions, which some services replace.

    The handler for Ctrl-C saves the run.
    """
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    signals = {number: signal.getsignal(number) for number in numbers}
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
        for number, handler in signals.items():
            signal.signal(number, handler)


def _described(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


_WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_ANONYMOUS")
_WANDB_OFFLINE = ("offline", "disabled", "dryrun")
WANDB_MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")  # the modes that wandb takes


def wandb_is_ready() -> bool:
    """True if this machine is logged in to Weights & Biases, or uses it offline.

    Otherwise wandb would ask a question at the terminal. Nothing is imported, because the checks before a run
    call this.
    """
    if any(os.environ.get(name) for name in _WANDB_KEYS) or wandb_mode() in _WANDB_OFFLINE:
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    names = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    for file in (Path(name).expanduser() for name in names if name):
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if host in netrc.netrc(str(file)).hosts:
                return True
    return False


def wandb_mode() -> str:
    """The mode in WANDB_MODE, or the one that `wandb offline` has written."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    folder = os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")
    for file in (Path("wandb/settings"), Path(folder).expanduser() / "settings"):
        settings = configparser.ConfigParser()
        with suppress(OSError, configparser.Error, UnicodeDecodeError):
            settings.read(file)
            if mode := settings.get("default", "mode", fallback=""):
                return mode
    return "online"

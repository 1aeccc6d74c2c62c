"""Settings and fixtures of all tests: few threads (the machine has few cores), nothing from the network."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB__SERVICE_WAIT", "300")  # seconds for the start of its process: 30 by default

import pytest
import torch

if TYPE_CHECKING:
    from helpers.servers.real_servers import SharedServer

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background jobs; runs would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until the tests are collected: their imports make a million objects, none of them garbage
pytest_plugins = [
    *(
        "helpers.suite.doc_tables",
        "helpers.suite.failures",
        "helpers.suite.fuzz_settings",
        "helpers.suite.outcomes",
    ),
    *("helpers.suite.real_parts", "helpers.suite.time_budget", "helpers.suite.work_groups"),
]


def pytest_collection_finish() -> None:
    """Leave everything that the imports made out of later collections of garbage."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Temporary files of libraries lie among pytest's own, which pytest removes.

    Some libraries remove theirs when a process ends, and xdist's workers end without telling them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.getbasetemp()))
        yield


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model, its problems, a reward and a configuration, for tests of whole runs."""
    from helpers import tiny_run

    directory = tmp_path_factory.mktemp("task")
    tiny_run.make(directory)
    return directory


@pytest.fixture(scope="session")
def finished(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a GVPO run of four steps, with a checkpoint after every step, of which three are kept."""
    from helpers.tiny_run import GVPO, configure, fit

    out = tmp_path_factory.mktemp("finished")
    more = ("checkpoint.every=1", "checkpoint.keep=3", "logging.tensorboard=true")
    fit(configure(task, out, *GVPO, *more, "logging.profile_steps=[2, 2]"))
    return out


@pytest.fixture(scope="session", params=["sglang", "vllm"])
def served(
    request: pytest.FixtureRequest, task: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    """One server of each engine on the tiny model, for all tests that leave it as they found it."""
    from helpers.servers.real_servers import Client, SharedServer, running

    with running(request.param, task, tmp_path_factory.mktemp(request.param)) as supervisor:
        [process] = supervisor.processes
        assert process.pid is not None
        client = Client(request.param, process.url)
        yield SharedServer(request.param, process.url, process.pid, client)
        client.close()


@pytest.fixture(scope="module")
def leave_the_process_group() -> Iterator[None]:
    """Shut the process group down after the module: whole runs leave theirs for the next run to use."""
    yield
    from megatron_gvpo.megatron import parallel

    parallel.shut_down()


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A configuration file without any error, for tests that change something in it."""
    from helpers.inputs.good_config import GOOD

    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    return file


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of helpers/references/gradient_reference.py, for a file that compares with them."""
    from helpers.references import gradient_reference

    path = tmp_path_factory.mktemp("models")
    gradient_reference.save_models(path)
    return path

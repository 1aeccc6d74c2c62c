"""Settings of every test: few threads (the machine has few cores), nothing from the network."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)
pytest_plugins = ["real_parts", "second_runs"]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its problems, a reward and a configuration: what whole runs are tested on."""
    import tiny_run

    directory = tmp_path_factory.mktemp("task")
    tiny_run.make(directory)
    return directory


@pytest.fixture(scope="session")
def finished(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GVPO run of four steps, with a checkpoint after every step, of which three are kept."""
    from tiny_run import GVPO, configure, fit

    out = tmp_path_factory.mktemp("finished")
    more = ("checkpoint.every=1", "checkpoint.keep=3", "logging.tensorboard=true")
    fit(configure(task, out, *GVPO, *more, "logging.profile_steps=[2, 2]"))
    return out


@pytest.fixture(scope="module")
def leave_the_process_group() -> Iterator[None]:
    """Whole runs leave theirs up: the next one takes it."""
    yield
    from megatron_gvpo.megatron import parallel

    parallel.shut_down()


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A file with a configuration in which nothing is wrong, for tests that change something in it."""
    from good_config import GOOD

    file = tmp_path / "good.yaml"
    file.write_text(GOOD)
    return file

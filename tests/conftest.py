"""Settings of every test: few threads (the machine has few cores), nothing from the network."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)
pytest_plugins = ["real_parts"]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, its problems, a reward and a configuration: what whole runs are tested on."""
    import tiny_run

    directory = tmp_path_factory.mktemp("task")
    tiny_run.make(directory)
    return directory

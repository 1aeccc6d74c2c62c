"""Real SGLang and vLLM servers on prompts with images, beside a trainer that trains the vision tower, too.

The prompts have one image, two and none. The log-probs of the sampled tokens are the trainer's, before and
after an update and over every transport: the server saw the same pixels, in the same tokens, with the same
weights.
"""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.distributed import launch
from helpers.pushes import image_server_worker
from helpers.servers.real_servers import ENGINES, served

pytestmark = pytest.mark.proof
TRANSPORTS = ("broadcast", "broadcast", "shared", "disk", "delta", "delta", "sharded", "sharded")


@pytest.mark.parametrize("model", image_server_worker.MODELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_servers_log_probs_are_the_trainers(engine: str, model: str, tmp_path: Path) -> None:
    image_server_worker.make(tmp_path, model)
    with served(image_server_worker.config_of(engine, tmp_path)) as supervisor:
        url = supervisor.processes[0].url
        launch(
            "helpers.pushes.image_server_worker:run", [1], engine, url, str(tmp_path), ",".join(TRANSPORTS)
        )
    steps = json.loads((tmp_path / "found.json").read_text())
    assert [step["transport"] for step in steps] == list(TRANSPORTS)
    assert max(gap for step in steps for gap in step["gaps"]) < 2e-4, steps
    # Each update moved the policy further than a server may be from it.
    for before, after in pairwise([step["first_logp"] for step in steps]):
        assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_with_another_image_processor_is_refused(engine: str, tmp_path: Path) -> None:
    image_server_worker.make(tmp_path, "qwen3_vl")
    other = shutil.copytree(tmp_path / "model", tmp_path / "other")
    image_server_worker.spoil_processor(other)
    with served(image_server_worker.config_of(engine, tmp_path, model_path=str(other))) as supervisor:
        url = supervisor.processes[0].url
        launch("helpers.pushes.image_server_worker:refused", [1], engine, url, str(tmp_path))
    assert "does not take an image" in (tmp_path / "error").read_text()

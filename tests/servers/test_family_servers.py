"""Real SGLang and vLLM servers with the families of docs/reference/models.md that their CPU builds carry.

A trainer pushes weights before and after updates, over several transports. The log-probs of the server are
those of transformers on the export.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.cases.families import SERVED
from helpers.distributed import launch
from helpers.inputs import family_task
from helpers.pushes.pushed import assert_exported
from helpers.servers.real_servers import running

pytestmark = pytest.mark.proof


@pytest.mark.parametrize(("engine", "title", "dtype"), SERVED)
def test_a_family_is_served_with_the_trainers_weights(
    engine: str, title: str, dtype: str, task: Path, tmp_path: Path
) -> None:
    own = family_task.make(task, tmp_path / "task", title, dtype)
    with running(engine, own, tmp_path) as supervisor:
        url = supervisor.processes[0].url
        launch("helpers.pushes.push_worker:run", [1], engine, url, str(own), str(tmp_path), "single")
    assert_exported(tmp_path, dtype)

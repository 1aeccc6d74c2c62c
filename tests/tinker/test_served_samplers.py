"""SGLang and vLLM sample for clients of the Tinker API, from the weights of each sampler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.paths import HELPERS
from helpers.servers.real_servers import engine_python
from helpers.servers.tinker_clients import run_client, serving
from helpers.suite.real_parts import used

CLIENT = str(HELPERS / "programs" / "tinker_served_client.py")
REST = "\noutput_dir: out\nserve: {key: {env: TINKER_TEST_KEY}}\nmax_tokens_per_micro_batch: 128\n"
ADAPTERS = "model: {path: model, dtype: float32, adapter: {rank: 4, alpha: 8}}" + REST
WHOLE = "model: {path: model, dtype: float32}" + REST


def sample(task: Path, folder: Path, engine: str, yaml: str, *overrides: str, ranks: int = 1) -> None:
    """Run the client against a server whose samples come from the engine's server."""
    shutil.copytree(task / "model", folder / "model")
    (folder / "server.yaml").write_text(yaml)
    own = (f"rollout.engine={engine}", f"rollout.servers.python={engine_python(engine)}")
    context = "rollout.servers.context_length=256"
    with serving(folder, *own, context, *overrides, ranks=ranks) as url:
        used(f"{engine} server")
        rank = "4" if yaml == ADAPTERS else "0"
        assert run_client(folder, CLIENT, url, "model", rank, seconds=600).endswith("done\n")


@pytest.mark.parametrize(
    ("engine", "transport"),
    [
        ("sglang", "adapter"),
        ("vllm", "broadcast"),
        pytest.param("sglang", "broadcast", marks=pytest.mark.proof),
        pytest.param("vllm", "adapter", marks=pytest.mark.proof),
    ],
)
def test_a_rollout_server_samples_from_the_adapters_of_each_sampler(
    task: Path, tmp_path: Path, engine: str, transport: str
) -> None:
    sample(task, tmp_path, engine, ADAPTERS, f"rollout.weights.transport={transport}")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("engine", "layout"), [("sglang", "parallel.tp=2"), ("vllm", "parallel.pp=2"), ("vllm", "parallel.cp=2")]
)
def test_a_rollout_server_samples_from_all_weights_of_each_sampler(
    task: Path, tmp_path: Path, engine: str, layout: str
) -> None:
    sample(task, tmp_path, engine, WHOLE, layout, ranks=2)

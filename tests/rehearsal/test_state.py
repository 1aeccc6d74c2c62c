"""A rehearsed rank holds, to the byte, what that rank of a real world on CPUs holds; its products add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import on_null_cuda
from helpers.distributed import launch
from helpers.on_null_cuda import MIXTURE, QWEN, phase

LAYOUTS = {
    "tp2": (QWEN, ["parallel.tp=2", "parallel.sequence_parallel=true"]),
    "pp2": (QWEN, ["parallel.pp=2"]),
    "cp2": (QWEN, ["parallel.cp=2"]),
    "tp2 pp2": (QWEN, ["parallel.tp=2", "parallel.pp=2"]),
    "tp2 muon": (QWEN, ["parallel.tp=2", "optimizer.muon={}"]),
    "ep4": (MIXTURE, ["parallel.ep=4"]),
    "ep2 muon": (MIXTURE, ["parallel.ep=2", "optimizer.muon={}"]),
    "tp2 ep2": (MIXTURE, ["parallel.tp=2", "parallel.ep=2", "parallel.sequence_parallel=true"]),
    "pp2 ep2": (MIXTURE, ["parallel.pp=2", "parallel.ep=2"]),
}
IN_TEST = ("tp2",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_TEST else pytest.mark.proof) for name in LAYOUTS]
)
def test_weights_gradients_and_optimizer_have_the_bytes_of_a_cpu_world(name: str, tmp_path: Path) -> None:
    model, layout = LAYOUTS[name]
    file = on_null_cuda.write_model(tmp_path, model)
    on_null_cuda.fill(tmp_path / "model")
    launch("helpers.workers.state_worker:run", [4], str(file), str(tmp_path), *layout)
    result = on_null_cuda.rehearse(str(file), *layout, "--world", "4", "--ranks", "all-kinds")
    ranks = [one["rank"] for one in result["ranks"]]
    assert ranks[0] == 0 and ranks[-1] == 3
    for one in result["ranks"]:
        rehearsed = {
            part: round(one["parts"][part] * 2**30) for part in ("weights", "gradients", "optimizer")
        }
        assert rehearsed == json.loads((tmp_path / f"{one['rank']}.json").read_text())


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank that holds the whole small model, with colocated servers."""
    file = on_null_cuda.write_model(tmp_path_factory.mktemp("whole"))
    servers = ["rollout.engine=vllm", "rollout.servers.colocated=true", "rollout.weights.transport=shared"]
    return on_null_cuda.rehearse(str(file), *servers, "--world", "1")


def test_the_products_of_a_scoring_pass_are_two_operations_a_weight_and_token(
    small_run: dict[str, Any],
) -> None:
    """The linear layers' for all tokens, the output layer's for the response tokens that it scores."""
    hidden, wide, layers = QWEN["hidden_size"], QWEN["intermediate_size"], QWEN["num_hidden_layers"]
    attention = hidden * hidden * 2 + hidden * 128 * 2
    pack = small_run["ranks"][0]["pack"]
    rows = pack["micro_batches"] * pack["rows_of_a_pack"]
    tokens = pack["micro_batches"] * pack["tokens"] - rows  # nothing follows a row's last token
    responses = rows * pack["response"]
    expected = (
        2 * tokens * layers * (attention + 3 * hidden * wide) + 2 * responses * QWEN["vocab_size"] * hidden
    )
    assert phase(small_run, "scoring")["counts"]["matrix_flops"] == expected


def test_an_updates_backward_takes_twice_its_forward(small_run: dict[str, Any]) -> None:
    scored, updated = (
        phase(small_run, name)["counts"]["matrix_flops"] for name in ("scoring", "first update")
    )
    assert updated == 3 * scored


def test_servers_get_the_memory_back(small_run: dict[str, Any]) -> None:
    turn, update = phase(small_run, "release, restore"), phase(small_run, "second update")
    state = sum(small_run["ranks"][0]["parts"][part] for part in ("weights", "gradients", "optimizer"))
    assert turn["results"]["stays_gib"] < update["reserved"] - 0.9 * state
    assert turn["allocated"] == pytest.approx(update["allocated"], rel=0.02)


def test_an_export_has_all_weights(small_run: dict[str, Any]) -> None:
    results = phase(small_run, "export")["results"]
    assert results["parameters"] == phase(small_run, "build")["results"]["parameters"]

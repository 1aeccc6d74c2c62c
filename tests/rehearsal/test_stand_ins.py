"""The values that a rehearsal makes up for other ranks are theirs in a real world of up to eight ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import on_null_cuda
from helpers.distributed import launch
from helpers.on_null_cuda import MIXTURE, QWEN

from megatron_gvpo.rehearsal.command import all_kinds
from megatron_gvpo.settings.parallel import ParallelConfig

LAYOUTS = {
    "tp2 ep2": (MIXTURE, 4, ["parallel.tp=2", "parallel.ep=2", "parallel.sequence_parallel=true"]),
    "ep4 pp2": (MIXTURE, 8, ["parallel.ep=4", "parallel.pp=2"]),
    "tp2 ep4": (MIXTURE, 8, ["parallel.tp=2", "parallel.ep=4", "parallel.sequence_parallel=true"]),
    "tp2 pp2": (QWEN, 4, ["parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"]),
    "cp2 pp2": (QWEN, 4, ["parallel.cp=2", "parallel.pp=2"]),
}
IN_TEST = ("tp2 ep2", "ep4 pp2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_TEST else pytest.mark.proof) for name in LAYOUTS]
)
def test_they_are_what_the_other_ranks_send(name: str, tmp_path: Path) -> None:
    model, world, layout = LAYOUTS[name]
    file = on_null_cuda.write_model(tmp_path, model)
    on_null_cuda.fill(tmp_path / "model")
    launch(
        "helpers.workers.stand_in_worker:run",
        [world],
        str(file),
        str(tmp_path),
        "model.dtype=float32",
        *layout,
    )
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    assert all(real == made_up for pairs in ranks for real, made_up in pairs.values())
    compared = {what for pairs in ranks for what, (real, _) in pairs.items() if real}
    assert "parts" in compared
    if "ep" in name:
        assert {"input_splits", "output_splits", "experts", "by_rank"} <= compared


def test_one_rank_of_every_kind() -> None:
    assert all_kinds(ParallelConfig(tp=2), 8) == [0, 7]
    assert all_kinds(ParallelConfig(pp=2), 8) == [0, 3, 4, 7]
    assert all_kinds(ParallelConfig(pp=4, stage_layers=(6, 7, 8, 5)), 16) == [0, 3, 8, 11, 12, 15]
    assert all_kinds(ParallelConfig(), 1) == [0]

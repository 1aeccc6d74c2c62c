"""The planner's memory is that of rehearsed ranks: of all committed rows, and of some rehearsed anew.

A row's peak is what PyTorch's allocator held in two updates on the null CUDA, with the real Transformer
Engine and megatron-core (benchmarks/planner_rehearsals.py).
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import on_null_cuda
from helpers.paths import ROOT
from helpers.references.transformer_engine_source import wheel_source

from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.activations import Activations
from megatron_gvpo.planner.architecture import Architecture
from megatron_gvpo.planner.prediction import layout_of
from megatron_gvpo.planner.step_time import recomputed_flops
from megatron_gvpo.planner.traffic import Pack, update_bytes
from megatron_gvpo.planner.workload import Layout, Lengths, Workload
from megatron_gvpo.settings.parallel import ParallelConfig

sys.path.insert(0, str(ROOT / "benchmarks"))
rehearsals = importlib.import_module("planner_rehearsals")

LIMIT = 0.03  # of the peak
EXACT = 0.005  # of weights, gradients and optimizer states: norms are counted, alignment is not
COMMITTED: list[dict[str, Any]] = json.loads(rehearsals.RESULT.read_text())["rows"]
IN_TEST = ("Qwen3-30B-A3B, 4 layers, tp=2, ep=4, sequence_parallel=true, 8192 tokens, rank 0 of 8",)


def test_all_kinds_of_models_are_among_the_rows() -> None:
    assert len(COMMITTED) >= 30
    names = " ".join(row["row"] for row in COMMITTED)
    for kind in (
        "Qwen2.5-7B",
        "A3B",
        "A22B",
        "DeepSeek-V3",
        "vpp=2",
        "cp=2",
        "recompute=full",
        "[mlp]",
        "share_prompts=true",
        "Qwen3-Next",
        "Qwen3.5",
    ):
        assert kind in names


@pytest.mark.parametrize("row", COMMITTED, ids=lambda row: row["row"])
def test_a_committed_row_is_predicted(row: dict[str, Any], tmp_path: Path) -> None:
    _agree(rehearsals.with_prediction(row, tmp_path / "planned"))


@pytest.mark.parametrize("mixture", [False, True])
def test_the_default_of_selective_recomputation_keeps_less(mixture: bool) -> None:
    """Megatron-core's own default, `core_attn`, keeps more with fused attention than no recomputation."""
    model = architecture.load("Qwen/Qwen3-30B-A3B" if mixture else "Qwen/Qwen3-8B")
    saved = {
        modules: Activations(model, Layout(8, recompute_modules=modules), 8192).layer(mixture).saved
        for modules in ((), ParallelConfig().recompute_modules, ("core_attn",))
    }
    nothing, default, core_attention = saved.values()
    assert default < 0.7 * nothing < nothing < core_attention


def _agree(result: dict[str, Any]) -> None:
    rehearsed, planned = result["rehearsed_gib"], result["predicted_gib"]
    assert planned["peak"] == pytest.approx(rehearsed["peak"], rel=LIMIT), result["row"]
    for part in ("weights", "gradients", "optimizer"):
        assert planned[part] == pytest.approx(rehearsed[part], rel=EXACT, abs=0.002), (result["row"], part)


ROWS = {row.name: row for row in rehearsals.ROWS}
# Matrix products are counted where a rank has all layers and its own share of the tokens.
WITH_ALL_LAYERS = [row["row"] for row in COMMITTED if not re.search("pp=|cp=|VL", row["row"])]


def _committed(name: str, folder: Path) -> tuple[dict[str, Any], Architecture, Layout]:
    [committed] = [row for row in COMMITTED if row["row"] == name]
    config = rehearsals.configuration(ROWS[name], folder)
    model = architecture.load(str(Path(config.model.path) / "config.json"))
    return committed, model, layout_of(config, ROWS[name].world)


@pytest.mark.parametrize("name", WITH_ALL_LAYERS)
def test_the_operations_of_the_matrix_products_are_the_planners(name: str, tmp_path: Path) -> None:
    """Attention's own and Triton's kernels are not counted. An update is three passes, and what it recomputes
    of a fourth.
    """
    row, model, layout = _committed(name, tmp_path / "row")
    pack = row["pack"]
    tokens = pack["tokens"] * pack["micro_batches"]
    responses = pack["rows_of_a_pack"] * pack["response"] * pack["micro_batches"]
    layers, head = model.layer_flops(tokens, 0) / layout.tp, model.head_flops(responses) / layout.tp
    counts = {phase: counted["matrix_flops"] for phase, counted in row["counts"].items()}
    assert layers + head == pytest.approx(counts["scoring"], rel=0.005)
    again = layers if layout.recompute else _recomputed(model, tokens, layout) / layout.tp
    assert 3 * (layers + head) + again == pytest.approx(counts["first update"], rel=0.005)


def _recomputed(model: Architecture, tokens: int, layout: Layout) -> float:
    """Operations of recomputed modules, of which `tokens` tokens go through each."""
    work = Workload(1, 1, 1, Lengths(tokens - 1, tokens, tokens))
    return recomputed_flops(model, work, [name for name in layout.recompute_modules if name != "core_attn"])


GROUPS = {
    "tensor model parallel": "tp",
    "data parallel group with cp": "dp",
    "data parallel": "dp",
    "pipeline model parallel": "pp",
    "embedding": "embedding",
}
OPERATIONS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "isend": "send",
    "irecv": "receive",
}
DENSE = [
    name
    for name in ROWS
    if not re.search("A3B|A22B|DeepSeek|Qwen3-Next|Qwen3.5|VL|modules|cp=|vpp=|stage_layers", name)
]


@pytest.mark.parametrize("name", [name for name in DENSE if name in {row["row"] for row in COMMITTED}])
def test_the_bytes_that_ranks_send_are_the_planners(name: str, tmp_path: Path) -> None:
    """By operation and group, to the byte. The norm of the gradients, a number, is left out."""
    row, model, layout = _committed(name, tmp_path / "row")
    pack, parts = row["pack"], layout.tp if layout.sequence_parallel else 1
    tokens = pack["tokens"] - pack["rows_of_a_pack"]  # nothing follows a row's last token
    packs = [Pack(-(-tokens // parts) * parts, pack["rows_of_a_pack"] * pack["response"])] * pack[
        "micro_batches"
    ]
    stage = ROWS[name].rank * layout.pp // layout.gpus
    planned = update_bytes(model, layout, stage, packs, sequence_parallel=layout.sequence_parallel)
    sent: Counter[tuple[str, str]] = Counter()
    for group, operations in row["collectives"].items():
        if group == "intra distributed optimizer instance":
            continue
        for operation, traffic in operations.items():
            sent[OPERATIONS.get(operation, operation), GROUPS[group]] += traffic["bytes"]
    alone = {("all_gather", "dp"), ("reduce_scatter", "dp")} if layout.dp == 1 else set()
    assert {key: size for key, size in sent.items() if key not in alone} == dict(planned)


@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.proof)], ids=["some", "all"])
def test_a_row_rehearsed_anew_is_the_committed_one(
    some: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_null_cuda.environment()
    monkeypatch.setenv("PYTHONPATH", str(wheel_source("fla-core")), prepend=os.pathsep)  # for delta nets
    rows = [row for row in rehearsals.ROWS if row.name in IN_TEST or not some]
    committed = {row["row"]: row for row in COMMITTED}
    assert rows
    for number, result in enumerate(rehearsals.rehearsed(rows, tmp_path)):
        before = committed.get(result["row"], result)["rehearsed_gib"]
        assert result["rehearsed_gib"] == pytest.approx(before, rel=0.005, abs=0.002), result["row"]
        _agree(rehearsals.with_prediction(result, tmp_path / f"planned-{number}"))

"""Features together: a run with several of them does what a plain run does.

Each two values of any two features meet in one of `covering_rows`. A row is a run of two steps in a layout,
with small packs, shared prompts, recomputation and a resume, which must not change what it computes. It is
compared with an uninterrupted run of one rank without these: its metrics, and the weights that it exports.
Single features have tests of their own, against independent references; this file finds the faults that two
of them make together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases.feature_pairs import (
    COMMON,
    FEATURES,
    METRICS,
    OF_METRICS,
    QUICK,
    REFUSED,
    Row,
    covering_rows,
    every_pair,
    name_of,
    overrides,
    pairs_of,
    ranks_of,
)
from helpers.distributed import launch
from helpers.inputs import feature_models
from helpers.suite.selected import selected
from helpers.tiny_run import configure, records, weights
from helpers.workers.pairs_worker import Run, write_work
from safetensors.torch import load_file

from megatron_gvpo.checks.preflight import preflight
from megatron_gvpo.core.errors import ConfigError

ROWS = covering_rows()
LR = 1e-2
# An update by Muon enlarges what fp32 rounds up to 485 times (test_muon.py).
OF_UPDATE = {"adam": 1e-2, "muon": 2e-2}  # parts of the learning rate
BESIDE = ("head/",)  # how the head computed its gradient; depends on the machine
each_row = pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, id=name_of(ROWS[i]), marks=() if i in QUICK else pytest.mark.proof)
        for i in range(len(ROWS))
    ],
)


@pytest.fixture(scope="module")
def tasks(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny task with each model."""
    root = tmp_path_factory.mktemp("pairs")
    return {name: feature_models.make(task, root / name, name) for name in (*FEATURES["model"], "teacher")}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tasks: dict[str, Path], tmp_path_factory: Any) -> Path:
    """The runs of the selected rows, in one launch."""
    directory = tmp_path_factory.mktemp("runs")
    work, ranks = list[Run](), list[int]()
    for number in selected(request, "number"):
        for run in runs_of(ROWS[number], tasks, directory / str(number)):
            work.append(run)
            ranks.append(run.ranks)
    write_work(directory, work)
    launch("helpers.workers.pairs_worker:run", ranks, str(directory), timeout=150 * len(work))
    return directory


def runs_of(row: Row, tasks: dict[str, Path], out: Path) -> list[Run]:
    """The plain run of a row, in OUT-plain, and the run with its features in `out`, perhaps in two halves."""
    task, teacher = str(tasks[row["model"]]), tasks["teacher"] / "model"
    plain, together = overrides(row, teacher, is_plain=True), overrides(row, teacher)
    alone, ranks = Run(task, f"{out}-plain", plain), ranks_of(row)
    if row["resume"] == "none":
        return [alone, Run(task, str(out), together, ranks)]
    second = Run(task, str(out), together, ranks, resumes=True)
    if row["resume"] == "moved":
        second = Run(task, str(out), plain, resumes=True)
    return [alone, Run(task, str(out), together, ranks, stops=True), second]


@each_row
def test_a_run_with_features_together_is_the_plain_run(tasks: Any, runs: Path, number: int) -> None:
    row, out = ROWS[number], runs / str(number)
    alone = Path(f"{out}-plain")
    for error in (Path(f"{alone}.error"), Path(f"{out}.error")):
        assert not error.exists(), error.read_text()
    plain, together = records(alone), records(out)
    assert [line["step"] for line in together] == [line["step"] for line in plain] == [0, 1, 2]
    for one, other in zip(plain, together, strict=True):
        allowed = METRICS.get(number, OF_METRICS)
        assert without(one) == pytest.approx(without(other), rel=allowed, abs=2e-5), f"step {one['step']}"
    expected, exported = weights(alone), weights(out)
    assert expected.keys() == exported.keys()
    for name, weight in expected.items():
        assert (exported[name] - weight).abs().max() < OF_UPDATE[row["optimizer"]] * LR, name
    before = load_file(tasks[row["model"]] / "model" / "model.safetensors")
    assert any(not torch.equal(weight, before[name]) for name, weight in expected.items()), "nothing trained"


def without(line: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in line.items() if not name.startswith(BESIDE)}


def test_each_pair_is_in_a_row() -> None:
    assert {pair for row in ROWS for pair in pairs_of(row)} == every_pair()


@pytest.mark.parametrize("pair", sorted(REFUSED), ids=str)
def test_a_pair_without_a_row_is_refused_before_anything_is_loaded(
    tasks: dict[str, Path], tmp_path: Path, pair: Any
) -> None:
    first = {name: next(iter(values)) for name, values in FEATURES.items()}
    row = first | {"model": "sinks", "method": "dapo"} | dict(pair)
    task = tasks[row["model"]]
    preflight(configure(task, tmp_path, *COMMON), "train", 2)
    with pytest.raises(ConfigError, match=r"parallel\.(ep|cp)=2|rollout\.top_p=0\.8 is not possible"):
        preflight(configure(task, tmp_path, *overrides(row, tasks["teacher"] / "model")), "train", 2)

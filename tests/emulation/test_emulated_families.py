"""Every family on an emulated GPU: with Transformer Engine's layers it equals `transformers`, as on a CPU.

The comparison is that of test_families.py: log-probs, every parameter's gradient, the norm that clips, one
update and the exported weights of a released configuration in tiny sizes, in fp32.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import on_null_cuda
from helpers.cases.families import FAMILIES, Family
from helpers.distributed import launch
from helpers.suite.selected import selected

from megatron_gvpo.verify.layout import ParallelLayout
from megatron_gvpo.verify.run import read_result

pytestmark = [
    pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs"),
    pytest.mark.proof,
]

# The kernels of gated delta nets are flash-linear-attention's, which no interpreter runs here.
_FAMILIES = [f for f in FAMILIES if not f.architecture.startswith(("Qwen3Next", "Qwen3_5"))]
# Context parallelism needs the fused attention of bf16.
_LAYOUTS = ("single", "tp2-sp", "pp2", "ep2-dp2")
each_family = pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, id=f"{family.title}: {layout}")
        for family in _FAMILIES
        for layout in family.layouts
        if str(layout) in _LAYOUTS
    ],
)


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both sides' results: a launch for each family, so that one that fails leaves the others."""
    path = tmp_path_factory.mktemp("emulated_families")
    wanted = selected(request, "family", "layout")
    for family in dict.fromkeys(family for family, _ in wanted):
        layouts = [layout for of, layout in wanted if of == family]
        _compute(family, layouts, path)
    return path


def _compute(family: Family, layouts: list[ParallelLayout], path: Path) -> None:
    folder = path / family.architecture
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.tiny))
    jobs: list[tuple[str, ParallelLayout | None]] = [(family.architecture, None)]
    jobs += [(family.architecture, layout) for layout in layouts]
    torch.save(jobs, path / "jobs.pt")
    sizes = [1 if layout is None else layout.ranks for _, layout in jobs]
    try:
        launch("helpers.workers.family_worker:run", sizes, str(path), timeout=1800, emulated=True)
    except AssertionError as error:
        (folder / "failure").write_text(str(error))


@each_family
def test_a_family_equals_transformers(directory: Path, family: Family, layout: ParallelLayout) -> None:
    folder = directory / family.architecture
    failure = folder / "failure"
    assert (folder / f"{layout}.pt").exists(), failure.read_text()[-3000:]
    assert read_result(layout, folder).problem is None

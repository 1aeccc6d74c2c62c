"""The comparison of test_families.py sees the silent errors that docs/explanation/audit.md names.

A case takes out what keeps an error of the pinned releases away: a mend of this package, or a refusal, which
the ranks do not check. Two cases ("twice") put an error in that the pinned releases do not have. Without it
the same model is equal to transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases.families import FAMILIES
from helpers.distributed import launch

from megatron_gvpo.checks.layout import check_division
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.verify.layout import ParallelLayout
from megatron_gvpo.verify.measures import Limits, compare
from megatron_gvpo.verify.run import read_result

pytestmark = pytest.mark.proof
TP, TP_SP = ParallelLayout(2, tp=2), ParallelLayout(2, tp=2, sequence_parallel=True)
DENSE = {"first_k_dense_replace": 4}  # no experts: with them, tp needs sp for another reason, too


@dataclass(frozen=True)
class Case:
    """A family in `layout`, with a fault of audit_worker.py or without what refuses the layout."""

    title: str
    family: str
    layout: ParallelLayout
    symptoms: tuple[str, ...]  # parts of the problem that is seen
    fault: str = "none"
    right: ParallelLayout | None = None  # the layout to use where `layout` is refused
    refused: str = ""  # part of the refusal
    of: str = ""  # the end of the names of the gradients that are compared
    changes: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def config(self) -> dict[str, Any]:
        [tiny] = [family.tiny for family in FAMILIES if family.title == self.family]
        return tiny | self.changes


CASES = [
    Case("finding 8, sinks", "GPT-OSS", TP_SP, ("gradient norm differs by",), "sinks"),
    Case("biases of experts", "GPT-OSS", TP_SP, ("gradient of", ".experts.", "bias"), "biases of experts"),
    Case(
        "finding 11, gated delta net",
        "Qwen3.5",
        TP,
        ("gradient of", "linear_attn.norm.weight differs"),
        right=TP_SP,
        refused="leaves the other ranks' heads out of the gradient of the norm",
    ),
    Case(
        "PR 6839, rotary key",
        "Kimi K2",
        TP,
        ("gradient of", "kv_a_proj_with_mqa.weight differs"),
        "rotary key",  # CPU runs mend it; nothing does with Transformer Engine, so that tp needs sp
        right=TP_SP,
        refused="the gradient of the rotary key that all heads share",
        of="kv_a_proj_with_mqa.weight",  # the one below is larger
        changes=DENSE,
    ),
    Case(
        "norm of latent queries",
        "Kimi K2",
        TP,
        ("gradient of", "q_a_layernorm.weight differs by 1 "),  # twice as large as it should be
        right=TP_SP,
        refused="with latent attention",
        changes=DENSE,
    ),
    Case("replicas twice", "EXAONE 4.0 (1.2B)", TP, ("gradient norm differs by",), "replicas twice"),
    Case(
        "tied twice",
        "EXAONE 4.0 (1.2B)",
        ParallelLayout(2, pp=2),
        ("gradient norm differs by",),
        "tied twice",
    ),
    Case(
        "epsilon of latent norms",
        "GLM-4.7-Flash",
        ParallelLayout(1),
        ("log-probs differ by",),
        "latent norms",
    ),
    Case("z-loss", "K-EXAONE", ParallelLayout(1), ("gradient of", "gate.weight differs"), "z-loss"),
]


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of every selected case, without its fault and, in `faulty`, with it."""
    path = tmp_path_factory.mktemp("audit")
    items = [item for item in request.session.items if item.path == request.path]
    jobs: list[tuple[Path, ParallelLayout | None, str]] = []
    for case in (item.callspec.params["case"] for item in items):
        folder = path / case.title
        (folder / "faulty").mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(case.config))
        for name in ("model", "wanted.pt"):
            (folder / "faulty" / name).symlink_to(folder / name)
        jobs += [(folder, None, ""), (folder, case.right or case.layout, "none")]
        jobs.append((folder / "faulty", case.layout, case.fault))
    torch.save(jobs, path / "jobs.pt")
    sizes = [1 if layout is None else layout.ranks for _, layout, _ in jobs]
    launch("helpers.workers.audit_worker:run", sizes, str(path), timeout=1800)
    return path


def problem_of(case: Case, folder: Path) -> str | None:
    """As `read_result` says it, of the gradients that the case names."""
    wanted, rounding = torch.load(folder / "wanted.pt", weights_only=False)
    computed = torch.load(folder / f"{case.layout}.pt", weights_only=False)
    computed, wanted = (
        replace(side, gradients={n: g for n, g in side.gradients.items() if n.endswith(case.of)})
        for side in (computed, wanted)
    )
    return compare(computed, wanted).problem(Limits.for_rounding(rounding))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_the_comparison_sees_it(directory: Path, case: Case) -> None:
    folder = directory / case.title
    assert read_result(case.right or case.layout, folder).problem is None
    problem = problem_of(case, folder / "faulty")
    assert problem is not None and all(part in problem for part in case.symptoms), problem
    if case.refused:
        with pytest.raises(ConfigError, match=case.refused):
            check_division(ParallelConfig(**case.layout.settings), case.config)

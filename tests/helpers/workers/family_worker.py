"""Rank function of test_families.py: transformers' side of a family, or this package's in one layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from helpers.distributed import forget_layout, run_number
from helpers.small_constants import late_gathers, small_constants
from megatron_gvpo.verify.layout import ParallelLayout


def run(directory: str) -> None:
    from megatron_gvpo.verify.run import candidate_side, reference_side

    family, layout = torch.load(Path(directory) / "jobs.pt", weights_only=False)[run_number()]
    folder = Path(directory) / family
    if layout is None:
        reference_side(json.loads((folder / "config.json").read_text()), folder, family)
        return
    assert isinstance(layout, ParallelLayout)
    if not layout.small:
        candidate_side(layout, folder)
    else:
        with small_constants(), late_gathers() as late:
            candidate_side(layout, folder)
            forget_layout()
            _score_around_an_export(layout, folder, late)
    forget_layout()


def _score_around_an_export(layout: ParallelLayout, folder: Path, late: set[int]) -> None:
    """Write log-probs before an update, after it, and after an export behind that.

    An export waits for all weights of the update. A score does not, and must read none that have not arrived.
    """
    from megatron_gvpo.megatron.policy import Policy
    from megatron_gvpo.verify.measures import make_rows
    from megatron_gvpo.verify.run import config_of
    from megatron_gvpo.verify.shrink import VOCABULARY

    policy, rows = Policy.of(config_of(folder / "model", layout)), make_rows(VOCABULARY)
    scores = [policy.score(rows)]
    late.clear()
    policy.update(rows, at_step_start=True)
    scores.append(policy.score(rows))
    for _ in policy.weights():
        pass
    scores.append(policy.score(rows))
    if dist.get_rank() == 0:
        torch.save((scores, len(late)), folder / f"{layout}-scores.pt")

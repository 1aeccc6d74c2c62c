"""Rank functions of test_families.py: transformers' side of a family, or this package's in one layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from helpers.distributed import forget_layout, run_number
from helpers.references.bf16_errors import round_weights
from helpers.small_constants import a_bucket_for_each_weight, late_gathers, small_constants
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
            with a_bucket_for_each_weight():
                _score_around_an_export(layout, folder, late)
    forget_layout()


def run_in_bf16(directory: str) -> None:
    """This package's side in bf16, in one layout; the checkpoint has weights of `rounded_reference`."""
    from megatron_gvpo.megatron.policy import Policy
    from megatron_gvpo.verify.measures import make_rows
    from megatron_gvpo.verify.run import compute, config_of
    from megatron_gvpo.verify.shrink import VOCABULARY

    family, layout = torch.load(Path(directory) / "jobs.pt", weights_only=False)[run_number()]
    folder = Path(directory) / family
    config = config_of(folder / "model", layout)
    model = config.model.model_copy(update={"dtype": "bfloat16"})
    policy = Policy.of(config.model_copy(update={"model": model}))
    computed = compute(policy, make_rows(VOCABULARY))
    if dist.get_rank() == 0:
        torch.save(computed, folder / f"{layout}.pt")
    forget_layout()


def rounded_reference(directory: str, family: str) -> None:
    """Write a family's checkpoint with weights that bf16 has, and transformers' side in fp64 and in bf16."""
    from megatron_gvpo.verify import reference
    from megatron_gvpo.verify.measures import make_rows
    from megatron_gvpo.verify.run import by_transformers
    from megatron_gvpo.verify.shrink import VOCABULARY, save_tiny

    folder = Path(directory) / family
    save_tiny(json.loads((folder / "config.json").read_text()), folder / "model", family)
    round_weights(folder)
    model, rows = reference.load(folder / "model"), make_rows(VOCABULARY)
    exact = by_transformers(model, folder / "model", rows)
    torch.save((exact, by_transformers(model.bfloat16(), folder / "model", rows)), folder / "wanted.pt")


def _score_around_an_export(layout: ParallelLayout, folder: Path, late: set[int]) -> None:
    """Write log-probs before an update, after it, and after a later export.

    An export waits for all weights of the update. Scoring does not wait for all, and must not read weights
    that have not arrived.
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

"""Rank function of test_families.py: transformers' side of a family, or this package's in one layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from distributed import forget_layout, run_number

from megatron_gvpo.verify.layout import Layout


def run(directory: str) -> None:
    from megatron_gvpo.verify.sides import candidate_side, reference_side

    family, layout = torch.load(Path(directory) / "jobs.pt", weights_only=False)[run_number()]
    place = Path(directory) / family
    if layout is None:
        reference_side(json.loads((place / "config.json").read_text()), place, family)
    else:
        assert isinstance(layout, Layout)
        candidate_side(layout, place)
        forget_layout()

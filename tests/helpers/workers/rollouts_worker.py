"""Rank function of test_rollout_files.py: a step of a run on two ranks, in several layouts."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from helpers.tiny_run import GVPO, configure, fit

LAYOUTS = {"dp2": "parallel.tp=1", "tp2": "parallel.tp=2", "pp2": "parallel.pp=2"}


def first_step(task: str, out: str) -> None:
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    for layout, override in LAYOUTS.items():
        short = ("train.steps=1", "data.eval=null", "checkpoint.export_hf=false")
        fit(configure(Path(task), Path(out) / layout, *GVPO, override, *short))

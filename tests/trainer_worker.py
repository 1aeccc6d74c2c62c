"""What every rank does for test_resume.py's runs on two ranks."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from tiny_run import configure, fit, reward_options


def interrupted_and_not(task: str, runs: str) -> None:
    """Data- and tensor-parallel: a run, and the same run interrupted in its second step and resumed.

    The signal reaches one rank only.
    """
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    for layout, override in {"dp2": "parallel.tp=1", "tp2": "parallel.tp=2"}.items():
        common = (override, "algorithm=gvpo", "train.mini_batches=2", "train.deterministic=true")
        whole, parts = (Path(runs) / f"{layout}-{name}" for name in ("whole", "parts"))
        fit(configure(Path(task), whole, *common))
        signal = reward_options(Path(task), signal_in=2 if dist.get_rank() == 0 else 0)
        stopped = fit(configure(Path(task), parts, *common, signal))
        assert stopped.step == 2
        fit(configure(Path(task), parts, *common), resume=True)

"""The learning rates of a run in which some updates have nothing to train."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tiny_run import configure, fit, records

HALF = """
def half(groups, sampling):
    return groups[: len(groups) // 4]  # one group is left for two mini-batches
"""


@pytest.mark.usefixtures("leave_the_process_group")
def test_learning_rates_do_not_wait_for_mini_batches_without_groups(task: Path, tmp_path: Path) -> None:
    """A step has two updates, of which one has no group: the rate still falls as it was planned."""
    (tmp_path / "half.py").write_text(HALF)
    method = f"algorithm={{members: [{{name: custom, function: '{tmp_path}/half.py:half'}}]}}"
    short = ("data.eval=null", "checkpoint.export_hf=false", "checkpoint.every=0", "train.mini_batches=2")
    out = tmp_path / "run"
    trainer = fit(configure(task, out, method, *short))
    policy = trainer.components.policy
    assert (policy.optimizer.steps, policy.optimizer.scheduler.num_steps) == (4, 8)
    # 1e-3 after one warm-up update, linearly to 0 at update 9; the one update of step s is number 2s - 1.
    rates = [record["train/lr"] for record in records(out) if "train/lr" in record]
    assert rates == pytest.approx([1e-3 * (9 - number) / 8 for number in (1, 3, 5, 7)])

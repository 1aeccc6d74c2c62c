"""The learning rates of runs in which some updates have nothing to train, or that end in their warm-up."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.tiny_run import configure, fit, records

from megatron_gvpo.settings.config import load_config
from megatron_gvpo.training.components import warmups_beyond

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


@pytest.mark.usefixtures("leave_the_process_group")
def test_a_run_that_ends_in_its_warm_up_is_warned_of(
    task: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run of two steps with the quickstart's warm-up of 10 updates was refused."""
    short = ("train.steps=2", "optimizer.warmup_steps=10", "data.eval=null", "checkpoint.export_hf=false")
    fit(configure(task, tmp_path, "algorithm=gvpo", "optimizer.decay=cosine", *short))
    rates = [record["train/lr"] for record in records(tmp_path) if "train/lr" in record]
    assert rates == pytest.approx([1e-4, 2e-4])
    assert (
        "optimizer.warmup_steps=10: the run ends in its warm-up, after 2 updates (train.steps x "
        "train.mini_batches x train.batch_epochs), at a learning rate of 0.0002 of 0.001"
    ) in caplog.messages


def test_warm_ups_as_long_as_the_run_and_longer_are_told_apart(good: Path) -> None:
    """A critic has a warm-up of its own. The run has 40 updates."""
    words = "algorithm={{recipe: ppo, critic: {{lr: 4.0e-5, warmup_steps: {}}}}}"

    def warnings(warmup: int) -> list[str]:
        config = load_config([good], [words.format(warmup), "optimizer.warmup_steps=40"])
        return warmups_beyond(config.train.updates, config.optimizer, config.algorithm.critic)

    assert warnings(40) == []
    [warning] = warnings(80)
    assert warning.startswith(
        "algorithm.critic.warmup_steps=80: the run ends in its warm-up, after 40 updates"
    )
    assert warning.endswith("at a learning rate of 2e-05 of 4e-05")

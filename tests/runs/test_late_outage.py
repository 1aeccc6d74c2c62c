"""An outage, or a signal, after a step's updates: the step is saved, and its record and evaluation come on
resume.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_run import GVPO, assert_same_run, configure, fit, records, reward_options, weights

from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.groups import Group
from megatron_gvpo.observe.rollouts.reader import read_rollouts
from megatron_gvpo.sampling.embedded import EmbeddedEngine
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.servers import ENGINES
from megatron_gvpo.types import OnWait

pytestmark = pytest.mark.usefixtures("leave_the_process_group")

BEST = "checkpoint.keep_best={metric: eval/pass@2}"
HOW = (*GVPO, "rollout.engine=outage", "checkpoint.every=1", "train.steps=2", "eval.every=1", BEST)


class Outage(EmbeddedEngine):
    """The embedded engine. It fails as if its servers were gone: at a sync, or in an evaluation.

    The run gets SIGTERM while it waits for the responses of another evaluation.
    """

    at_sync = at_evaluation = told_at_evaluation = -1

    def sync(self, version: int) -> None:
        if version == self.at_sync:
            raise RolloutError("no rollout server is left")
        super().sync(version)

    def submit(self, prompts: Any, n: int, sampling: Any, seed: int) -> Any:
        if n == 2 and self.version == self.at_evaluation:  # a step samples 4
            raise RolloutError("no rollout server is left")
        return super().submit(prompts, n, sampling, seed)

    def collect(self, tickets: Any, on_wait: OnWait = None) -> list[Group]:
        if tickets[0].n == 2 and self.version == self.told_at_evaluation:
            os.kill(os.getpid(), signal.SIGTERM)
            if on_wait is not None:
                on_wait()
        return super().collect(tickets, on_wait)


# These keys bind a checkpoint's state to its run, to the files beside it, and to its line in metrics.jsonl.
OWN = ("run", "lists", "checksum", "reported")


def state(out: Path, step: int) -> Any:
    """A checkpoint's state, without what is of one run alone."""
    values = json.loads((out / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())
    return {name: value for name, value in values.items() if name not in OWN}


@pytest.mark.parametrize(("where", "export"), [("at_sync", "true"), ("at_evaluation", "false")])
def test_a_step_whose_engine_fails_after_its_updates_is_reported_on_resume(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, export: str
):
    """It is the last step, so that there is nothing left to train."""
    monkeypatch.setitem(ENGINES, "outage", f"{__name__}:Outage")
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"

    def run(out: Path) -> Config:
        return configure(task, out, *HOW, f"checkpoint.export_hf={export}")

    fit(run(uninterrupted))
    with monkeypatch.context() as failing, pytest.raises(RolloutError, match="no rollout server"):
        failing.setattr(Outage, where, 2)
        fit(run(parts))
    assert [record["step"] for record in records(parts)] == [0, 1]
    assert read_rollouts(parts, "train", {2}).num_rows == 16
    assert state(parts, 2).get("best", {}) == state(uninterrupted, 1).get("best", {}), (
        "not by the step before"
    )
    fit(run(parts), resume=True)
    assert records(parts) == records(uninterrupted)
    assert records(parts)[-1]["eval/pass@1"] is not None
    assert state(parts, 2) == state(uninterrupted, 2)
    assert weights(parts).keys() == weights(uninterrupted).keys()


def test_a_signal_ends_an_evaluation_which_comes_on_resume(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It comes while responses are awaited, in the last evaluation and in the one before the first step."""
    monkeypatch.setitem(ENGINES, "outage", f"{__name__}:Outage")
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    fit(configure(task, uninterrupted, *HOW))
    for version, logged in ((0, []), (2, [0, 1])):
        with monkeypatch.context() as patch:
            patch.setattr(Outage, "told_at_evaluation", version)
            stopped = fit(configure(task, parts, *HOW), resume=version > 0)
        assert stopped.step == version and "unreported" in state(parts, version)
        assert [record["step"] for record in records(parts)] == logged
    fit(configure(task, parts, *HOW), resume=True)
    assert records(parts) == records(uninterrupted)
    assert state(parts, 2) == state(uninterrupted, 2)


def test_rewards_that_end_with_the_job_are_not_evaluated(task: Path, tmp_path: Path):
    """Slurm ends every process of a job: the evaluation of step 2 comes again, without failed rewards."""
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    short = (*GVPO, "train.steps=2", "checkpoint.every=1")
    fit(configure(task, uninterrupted, *short))
    stopped = fit(configure(task, parts, *short, reward_options(task, signal_in=3, killed=True)))
    assert stopped.step == 2 and [record["step"] for record in records(parts)] == [0, 1]
    fit(configure(task, parts, *short), resume=True)
    assert_same_run(uninterrupted, parts)

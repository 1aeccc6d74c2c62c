"""An outage after a step's updates: the step is saved, and its record and evaluation are not lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import GVPO, configure, fit, records, weights

from megatron_gvpo.config.schema import Config
from megatron_gvpo.observe.rollouts.reader import read_rollouts
from megatron_gvpo.rollout.request import RolloutError
from megatron_gvpo.sampling.embedded import EmbeddedEngine
from megatron_gvpo.sampling.engine import ENGINES

pytestmark = pytest.mark.usefixtures("leave_the_process_group")

BEST = "checkpoint.keep_best={metric: eval/pass@2}"
HOW = (*GVPO, "rollout.engine=outage", "checkpoint.every=1", "train.steps=2", "eval.every=1", BEST)


class Outage(EmbeddedEngine):
    """The embedded engine. It fails as if its servers were gone: at a sync, or in an evaluation."""

    at_sync = at_evaluation = -1

    def sync(self, version: int) -> None:
        if version == self.at_sync:
            raise RolloutError("no rollout server is left")
        super().sync(version)

    def submit(self, prompts: Any, n: int, sampling: Any, seed: int) -> Any:
        if n == 2 and self.version == self.at_evaluation:  # a step samples 4
            raise RolloutError("no rollout server is left")
        return super().submit(prompts, n, sampling, seed)


def state(out: Path, step: int) -> Any:
    return json.loads((out / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())


@pytest.mark.parametrize(("where", "export"), [("at_sync", "true"), ("at_evaluation", "false")])
def test_a_step_whose_engine_fails_after_its_updates_is_reported_on_resume(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, export: str
):
    """It is the last step, so that there is nothing left to train."""
    monkeypatch.setitem(ENGINES, "outage", f"{__name__}:Outage")
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def run(out: Path) -> Config:
        return configure(task, out, *HOW, f"checkpoint.export_hf={export}")

    fit(run(whole))
    with monkeypatch.context() as failing, pytest.raises(RolloutError, match="no rollout server"):
        failing.setattr(Outage, where, 2)
        fit(run(parts))
    assert [record["step"] for record in records(parts)] == [0, 1]
    assert read_rollouts(parts, "train", {2}).num_rows == 16
    assert state(parts, 2).get("best", {}) == state(whole, 1).get("best", {}), "not by the step before"
    fit(run(parts), resume=True)
    assert records(parts) == records(whole)
    assert records(parts)[-1]["eval/pass@1"] is not None
    assert state(parts, 2) == state(whole, 2)
    assert weights(parts).keys() == weights(whole).keys()

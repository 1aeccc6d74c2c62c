"""`megatron-gvpo plan --rehearse` rehearses the best layouts of a plan, each beside its prediction."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from helpers import on_null_cuda

from megatron_gvpo.cli import plan as plan_command
from megatron_gvpo.planner.command import run
from megatron_gvpo.rehearsal import command, of_plan

WORDS = "--gpus 2 --gpu h100 --k 4 --prompts 16 --prompt-tokens 64 --response-length 100,p95=200,max=256"


def _options(folder: Path, *more: str) -> argparse.Namespace:
    on_null_cuda.write_model(folder)
    parser = argparse.ArgumentParser()
    plan_command.add_parser(parser.add_subparsers())
    return parser.parse_args(["plan", "--model", str(folder / "model"), *WORDS.split(), *more])


def test_its_layouts_are_configurations_of_a_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the three is checked as a run is; what would be rehearsed is made up here."""
    jobs = []

    def rehearsed(options: argparse.Namespace, folder: Path) -> dict[str, object]:
        config, job = command._checked(options, command._device(options.gpu), folder)
        jobs.append((job.world, config.train.max_tokens_per_micro_batch, options.ranks))
        phase = {"name": "first update", "peak": 1.5}
        rank = {"rank": 0, "phases": [phase], "predicted": {"total": 5.0, "runtime": 3.75}}
        return {"ranks": [rank], "fullest": 0, "fits": len(jobs) > 1, "verdict": "so", "bounds": ["slow"]}

    monkeypatch.setattr(command, "rehearsed", rehearsed)
    options = _options(tmp_path, "--rehearse")
    planned = run(options)
    assert of_plan.show(planned, options) == 1, "the first does not fit"
    best = planned.plan.best[: of_plan.BEST]
    assert jobs == [(one.layout.gpus, one.micro_tokens, "all-kinds") for one in best]


@pytest.mark.proof
def test_it_prints_what_the_best_really_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_null_cuda.environment()
    assert plan_command.run(_options(tmp_path, "--rehearse")) == 0
    shown = capsys.readouterr().out.partition("rehearsed, the first")[2]
    assert len(re.findall(r"peak [\d.]+ GiB \(predicted [\d.]+\); it fits", shown)) == of_plan.BEST

"""The treatment of an earlier run in an output directory: nothing is continued, replaced or lost unasked."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_gvpo.cli import main, parse
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.existing_run import (
    Earlier,
    check_earlier_run,
    earlier_of,
    finished,
    remove_earlier_run,
)
from megatron_gvpo.settings.load import load_config

CHECKPOINT = "checkpoints/step_00000020/state.json"
KILLED_EARLY = ("checkpoints/step_00000005.partial/state.json", "metrics.jsonl", "tensorboard/events")
FINISHED = (CHECKPOINT, "metrics.jsonl", "summary.json", "hf/config.json")
GONE = "holds an earlier run whose checkpoints are gone"
NOTHING = "there is no checkpoint in .* to continue from: .*--resume=auto"
EARLIER = "holds an earlier run: continue it with --resume"


def check(good: Path, out: Path, earlier: Earlier, *files: str, every: int = 0) -> None:
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    before = sorted(out.rglob("*"))
    try:
        check_earlier_run(load_config([good], [f"output_dir={out}", f"checkpoint.every={every}"]), earlier)
    finally:
        assert sorted(out.rglob("*")) == before


@pytest.mark.parametrize(
    ("earlier", "there", "refusal"),
    [
        ("refuse", (), None),
        ("refuse", ("notes.txt", "slurm/job.sbatch", "report.html"), None),
        ("refuse", ("metrics.jsonl",), EARLIER),
        ("refuse", FINISHED, EARLIER),
        ("resume", (), NOTHING),
        ("resume", KILLED_EARLY, NOTHING),
        ("resume", (CHECKPOINT,), None),
        ("resume", ("checkpoints/step_00000020.replaced/state.json",), None),
        ("resume", FINISHED, None),
        ("resume", FINISHED[1:], GONE),
        ("resume", ("checkpoints/.keep", *FINISHED[1:]), GONE),
        ("auto", (), None),
        ("auto", ("report.html",), None),
        ("auto", KILLED_EARLY, None),
        ("auto", FINISHED, None),
        ("auto", ("metrics.jsonl",), GONE),
        ("auto", ("hf/config.json",), GONE),
        ("auto", ("checkpoints/.keep", "metrics.jsonl", "hf/config.json"), GONE),
        ("overwrite", FINISHED[1:], None),
    ],
)
def test_a_run_starts_only_where_nothing_is_lost(good, tmp_path, earlier, there, refusal):
    out = tmp_path / "out"
    out.mkdir()
    if refusal is None:
        check(good, out, earlier, *there)
    else:
        with pytest.raises(ConfigError, match=refusal):
            check(good, out, earlier, *there)


def test_an_earlier_run_is_removed_with_its_report_and_nothing_else(tmp_path):
    for name in ("metrics.jsonl", "rollouts/step_000001.parquet", "report.html", "notes.txt", "task/data"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    remove_earlier_run(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "task"}


def test_a_run_that_was_beyond_its_first_checkpoint_is_not_started_anew(good, tmp_path):
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    for steps, lost in ((5, False), (12, True)):
        (out / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(steps + 1)))
        check(good, out, "auto")  # without periodic checkpoints there may never have been one
        if lost:
            with pytest.raises(ConfigError, match=GONE):
                check(good, out, "auto", every=10)
        else:
            check(good, out, "auto", every=10)


def test_a_finished_run_says_so_and_how_to_go_on(good, tmp_path):
    def said(*overrides: str) -> str | None:
        return finished(load_config([good], [f"output_dir={tmp_path}", *overrides]))

    (tmp_path / CHECKPOINT).parent.mkdir(parents=True)
    (tmp_path / CHECKPOINT).touch()
    assert said() is None, "the export is missing"
    assert "its newest checkpoint is of step 20, and train.steps=20. To train on" in (
        said("checkpoint.export_hf=false") or ""
    )
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "export.json").write_text('{"step": 10}')
    assert said() is None, "the export is of fewer steps"
    (tmp_path / "hf" / "export.json").write_text('{"step": 20}')
    assert "such as train.steps=40" in (said() or "")
    assert "step 20, and train.steps=10." in (said("train.steps=10") or "")
    assert said("train.steps=30") is None


def test_the_options_say_the_same_wherever_they_stand():
    for arguments, expected in {
        ("--resume", "train.steps=3"): "resume",
        ("--resume=auto", "train.steps=3"): "auto",
        ("train.steps=3", "--resume=auto"): "auto",
        ("--overwrite",): "overwrite",
        (): "refuse",
    }.items():
        options = parse(["train", "run.yaml", *arguments])
        assert earlier_of(options.resume, options.overwrite) == expected
        assert options.config == ["run.yaml", *(word for word in arguments if "=3" in word)]


def test_only_auto_may_follow_resume(capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "run.yaml", "--resume=newest"])
    assert end.value.code == 2


def test_a_dry_run_of_a_job_does_not_mind_an_earlier_run(task, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").touch()
    given = ["slurm", str(task / "run.yaml"), f"output_dir={tmp_path}", "--nodes", "1", "--no-gpus"]
    assert main(given) == 2
    assert EARLIER in capsys.readouterr().err
    assert main([*given, "--dry-run"]) == 0
    assert "HOW=--resume=auto" in capsys.readouterr().out
    assert main([*given, "--resume=auto", "--dry-run"]) == 0
    assert "else export HOW=--resume=auto; fi" in capsys.readouterr().out


def test_a_file_of_the_user_s_own_is_not_replaced(task, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("train: {steps: 4}\n")
    for how in ((), ("--overwrite",)):
        assert main(["train", str(task / "run.yaml"), f"output_dir={tmp_path}", *how]) == 2
        assert f"{tmp_path}/config.yaml, and another file has this name" in capsys.readouterr().err
    assert (tmp_path / "config.yaml").read_text() == "train: {steps: 4}\n"


def test_damaged_metrics_are_named_with_their_line_before_anything_is_loaded(good, tmp_path):
    metrics, out = tmp_path / "out" / "metrics.jsonl", tmp_path / "out"
    check(good, out, "resume", CHECKPOINT, "metrics.jsonl")
    lines = ['{"step": 0}\n', '{"step": 1, "rew', "[1]\n", '{"step": true}\n', "[" * 10**5 + "\n"]
    lines.append('{"step": ' + "1" * 5000 + "}\n")
    metrics.write_text(lines[0] + lines[1])
    check(good, out, "resume")
    for line in lines[2:]:
        metrics.write_text(lines[0] + line + lines[0])
        with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2: .*mend the line, or move the file"):
            check(good, out, "auto")

"""The treatment of an earlier run in an output directory: nothing is continued, replaced or lost unasked."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.tiny_run import SHORT, configure, fit

from megatron_gvpo.cli import main, parse
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.named_file import PAGE
from megatron_gvpo.runs.existing_run import (
    Earlier,
    check_earlier_run,
    earlier_of,
    finished_message,
    metrics_problems,
    remove_earlier_run,
)
from megatron_gvpo.runs.record import write_record
from megatron_gvpo.runs.written import HEADER, keep_foreign
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.training.callbacks import _refused

CHECKPOINT = "checkpoints/step_00000020/state.json"
EVENTS = "tensorboard/events.out.tfevents.1795508682.host.9062.0"
KILLED_EARLY = ("checkpoints/step_00000005.partial/state.json", "metrics.jsonl", EVENTS, "run.json")
FINISHED = (CHECKPOINT, "metrics.jsonl", "summary.json", "hf/config.json", "hf/export.json", "run.json")
CONTENTS = {"run.json": '{"files": {}, "starts": []}', "export.json": '{"step": 20}', "config.yaml": HEADER}
GONE = "holds an earlier run whose checkpoints are gone"
NOTHING = "there is no checkpoint in .* to continue from: .*--resume=auto"
EARLIER = "holds an earlier run: continue it with --resume"


def make(out: Path, *files: str) -> None:
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(CONTENTS.get(Path(name).name, ""))


def check(good: Path, out: Path, earlier: Earlier, *files: str, every: int = 0) -> None:
    make(out, *files)
    before = sorted(out.rglob("*"))
    try:
        check_earlier_run(load_config([good], [f"output_dir={out}", f"checkpoint.every={every}"]), earlier)
    finally:
        assert sorted(out.rglob("*")) == before


@pytest.mark.parametrize(
    ("earlier", "files", "refusal"),
    [
        ("refuse", (), None),
        ("refuse", ("notes.txt", "slurm/job.sbatch", "report.html"), None),
        ("refuse", ("metrics.jsonl", "run.json"), EARLIER),
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
        ("auto", ("metrics.jsonl", "run.json"), GONE),
        ("auto", FINISHED[3:], GONE),
        ("auto", ("checkpoints/.keep", *FINISHED[1:]), r"\(checkpoints/.keep\): nothing was changed"),
        ("overwrite", FINISHED[1:], None),
    ],
)
def test_a_run_starts_only_where_nothing_is_lost(good, tmp_path, earlier, files, refusal):
    out = tmp_path / "out"
    out.mkdir()
    if refusal is None:
        check(good, out, earlier, *files)
    else:
        with pytest.raises(ConfigError, match=refusal):
            check(good, out, earlier, *files)


def test_a_run_does_not_start_in_what_another_run_writes(good, tmp_path):
    """Fails on the old code, which started there; the other run could then not be replaced any more."""
    make(tmp_path, *FINISHED)
    with pytest.raises(
        ConfigError, match=rf"the run in {tmp_path} writes to {tmp_path / 'checkpoints'}: give"
    ):
        check(good, tmp_path / "sweep" / ".." / "checkpoints" / "b", "auto")
    check(good, tmp_path / "sweep" / "b", "refuse")


def test_an_earlier_run_is_removed_with_its_report_and_nothing_else(tmp_path):
    make(
        tmp_path,
        "metrics.jsonl",
        "rollouts/step_000001.parquet",
        "run.json",
        "config.yaml",
        "notes.txt",
        "data/x",
    )
    (tmp_path / "report.html").write_text(PAGE)
    remove_earlier_run(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "data"}


def test_a_page_of_the_user_s_own_stays_when_the_run_beside_it_is_removed(tmp_path):
    make(tmp_path, "metrics.jsonl", "run.json")
    (tmp_path / "report.html").write_text("<!doctype html>\n<title>My thesis</title>\n")
    remove_earlier_run(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


RUN = ("run.json", "config.yaml")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (("checkpoints/other.pt", "hf/mine.bin", "exports/mine.txt"), "checkpoints/other.pt"),
        (("hf/config.json", "hf/model.safetensors"), "hf/config.json"),
        (("tensorboard/events.out.tfevents.1.host.2.0",), "tensorboard/events.out"),
        (("checkpoints/step_00000010/state.json", "metrics.jsonl"), "checkpoints/step_00000010/state.json"),
        (("config.yaml", "checkpoints/step_00000010/state.json"), "checkpoints/step_00000010/state.json"),
        ((*RUN, "checkpoints/other.pt"), "checkpoints/other.pt"),
        ((*RUN, CHECKPOINT, "checkpoints/step_00000020/mine.bin"), "checkpoints/step_00000020/mine.bin"),
        ((*RUN, "checkpoints/step_10/state.json"), "checkpoints/step_10/state.json"),
        ((*RUN, "exports/mine.txt"), "exports/mine.txt"),
        ((*RUN, "exports/mine/config.json", "exports/mine/export.json"), "exports/mine/config.json"),
        ((*RUN, "hf/config.json", "hf/model.safetensors"), "hf/config.json"),
        ((*RUN, "hf/config.json", "hf/export.json", "hf/model.gguf"), "hf/model.gguf"),
        ((*RUN, "hf_best.partial/mine.bin"), "hf_best.partial/mine.bin"),
        ((*RUN, "tensorboard/other/events.out.tfevents.1.host.2.0"), "tensorboard/other/events"),
        ((*RUN, "rollouts/mine.parquet"), "rollouts/mine.parquet"),
        ((*RUN, "profile"), "profile"),
        ((*RUN, "metrics.jsonl/mine.txt"), "metrics.jsonl"),
    ],
)
def test_what_no_run_has_recorded_is_named_and_stays(good, tmp_path, files, named):
    out = tmp_path / "out"
    continues = any(name.endswith("/state.json") for name in files)  # "auto" resumes from a checkpoint
    for earlier in ("refuse", "overwrite") if continues else ("refuse", "overwrite", "auto"):
        with pytest.raises(ConfigError, match=re.escape(named)) as refused:
            check(good, out, earlier, *files)
        assert "--overwrite" not in str(refused.value) and "another output_dir" in str(refused.value)
    make(out, *files)
    before = sorted(out.rglob("*"))
    with pytest.raises(ConfigError, match=re.escape(named)):
        remove_earlier_run(str(out))
    assert sorted(out.rglob("*")) == before


def test_a_run_removes_only_what_its_settings_write(good, tmp_path):
    """The record lists the names that the run writes to: all others are the user's, whatever is in them."""
    config = load_config([good], [f"output_dir={tmp_path}", "logging.tensorboard=false"])
    write_record(config, 0, 1)
    make(tmp_path, EVENTS)
    with pytest.raises(ConfigError, match="tensorboard/events"):
        remove_earlier_run(str(tmp_path))
    make(tmp_path, CHECKPOINT)
    with pytest.raises(ConfigError, match=r"would also write to .*tensorboard/events"):
        check(good, tmp_path, "resume")  # with TensorBoard
    (tmp_path / EVENTS).unlink()
    check(good, tmp_path, "resume")
    remove_earlier_run(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"good.yaml", "tensorboard"}


def test_the_files_of_an_exported_model_are_those_that_it_lists(tmp_path):
    make(tmp_path, *RUN, "hf/config.json", "hf/special.tiktoken", "hf/mine.bin")
    listed = {"step": 4, "files": ["config.json", "special.tiktoken"]}
    (tmp_path / "hf/export.json").write_text(json.dumps(listed))
    with pytest.raises(ConfigError, match=r"\(hf/mine\.bin\)"):
        remove_earlier_run(str(tmp_path))
    (tmp_path / "hf/mine.bin").unlink()
    remove_earlier_run(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_newer_export_keeps_the_files_that_the_user_put_beside_the_model(tmp_path):
    make(tmp_path, "hf/config.json", "hf/mine/notes.txt", "new/config.json")
    (tmp_path / "hf/export.json").write_text(json.dumps({"step": 4, "files": ["config.json"]}))
    (tmp_path / "hf/link").symlink_to("/nowhere")
    keep_foreign(tmp_path / "hf", tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").rglob("*")} == {
        "config.json",
        "mine",
        "notes.txt",
        "link",
    }
    assert {path.name for path in (tmp_path / "hf").iterdir()} >= {"config.json", "export.json"}


def test_a_removal_that_was_killed_can_be_repeated(finished, tmp_path, monkeypatch):
    """After every file: the rest is still known as the run's, and has no complete checkpoint."""
    out, unlink, remaining_unlinks = tmp_path / "out", Path.unlink, [0]
    shutil.copytree(finished, out)

    def killed(path: Path) -> None:
        if not remaining_unlinks[0]:
            raise KeyboardInterrupt
        remaining_unlinks[0] -= 1
        unlink(path)

    monkeypatch.setattr(Path, "unlink", killed)
    while out.exists() and any(out.iterdir()):
        remaining_unlinks[0] = 1
        with suppress(KeyboardInterrupt):
            remove_earlier_run(str(out))
        for checkpoint in (out / "checkpoints").glob("step_*"):
            has_state, has_tensors = (bool(list(checkpoint.glob(p))) for p in ("state.json", "*.distcp"))
            assert has_tensors or not has_state


def test_links_of_the_user_s_stay(tmp_path):
    make(tmp_path, *RUN, "elsewhere/x")
    for name in ("checkpoints", "rollouts/step_000001.parquet"):
        link = tmp_path / "out" / name
        make(tmp_path / "out", *RUN)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ConfigError, match=name):
            remove_earlier_run(str(tmp_path / "out"))
        link.unlink()


def test_a_finished_run_is_removed_as_a_whole(finished, tmp_path):
    """Every file that a real run writes is known as its own."""
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    make(out, "notes.txt")
    remove_earlier_run(str(out))
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


def test_a_run_with_a_reference_policy_is_removed_as_a_whole(task, tmp_path):
    """Its checkpoints have the weights of the reference, too."""
    out = tmp_path / "out"
    short = ("train.steps=2", "optimizer.warmup_steps=0", "checkpoint.every=2", *SHORT)
    fit(configure(task, out, "algorithm=grpo", *short))
    assert (out / "checkpoints" / "step_00000002" / "reference").is_dir()
    remove_earlier_run(str(out))
    assert list(out.iterdir()) == []


def test_overwriting_beside_other_work_ends_with_one_line_and_changes_nothing(
    task, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "checkpoints/other.pt", "exports/mine.txt", "hf/mine.bin", "tensorboard/mine")
    before = sorted(tmp_path.rglob("*"))
    for how in ((), ("--overwrite",), ("--resume=auto",)):
        assert main(["train", str(task / "run.yaml"), "output_dir=.", *how]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "checkpoints/other.pt" in line and "nothing was changed" in line and "--overwrite" not in line
        assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_was_beyond_its_first_checkpoint_is_not_started_anew(good, tmp_path):
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    make(out, "run.json")
    for steps, lost in ((5, False), (12, True)):
        (out / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(steps + 1)))
        check(good, out, "auto")  # without periodic checkpoints there may never have been one
        if lost:
            with pytest.raises(ConfigError, match=GONE):
                check(good, out, "auto", every=10)
        else:
            check(good, out, "auto", every=10)


def test_a_run_has_lost_checkpoints_only_where_its_own_settings_wrote_some(good, tmp_path):
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    (out / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(13)))
    write_record(load_config([good], [f"output_dir={out}"]), 0, 1)
    check(good, out, "auto", every=5)  # `checkpoint.every` was set after a crash without a checkpoint
    write_record(load_config([good], [f"output_dir={out}", "checkpoint.every=10"]), 0, 1)
    with pytest.raises(ConfigError, match=GONE):
        check(good, out, "auto", every=50)


def test_a_finished_run_says_so_and_how_to_go_on(good, tmp_path):
    def message(*overrides: str) -> str | None:
        return finished_message(load_config([good], [f"output_dir={tmp_path}", *overrides]))

    (tmp_path / CHECKPOINT).parent.mkdir(parents=True)
    (tmp_path / CHECKPOINT).touch()
    assert message() is None, "the export is missing"
    assert "its newest checkpoint is of step 20, and train.steps=20. To train on" in (
        message("checkpoint.export_hf=false") or ""
    )
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "export.json").write_text('{"step": 10}')
    assert message() is None, "the export is of fewer steps"
    (tmp_path / "hf" / "export.json").write_text('{"step": 20}')
    assert "such as train.steps=40" in (message() or "")
    (tmp_path / "metrics.jsonl").touch()
    for summary in ('{"steps": 10}', '{"ste'):
        (tmp_path / "summary.json").write_text(summary)
        assert message() is None, "the summary is of fewer steps, or cut off"
    (tmp_path / "summary.json").write_text('{"steps": 20}')
    assert "step 20, and train.steps=10." in (message("train.steps=10") or "")
    assert message("train.steps=30") is None


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
    make(tmp_path, "metrics.jsonl", "run.json")
    arguments = ["slurm", str(task / "run.yaml"), f"output_dir={tmp_path}", "--nodes", "1", "--no-gpus"]
    assert main(arguments) == 2
    assert EARLIER in capsys.readouterr().err
    assert main([*arguments, "--dry-run"]) == 0
    assert "HOW=--resume=auto" in capsys.readouterr().out
    assert main([*arguments, "--resume=auto", "--dry-run"]) == 0
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


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ('{"step": 20, "reward/mean": 0.25, "time/step": 3.0, "device/x": 1}', None),
        ('{"step": 19, "reward/mean": 0.5}', None),  # steps without a record are a warning
        ('{"step": 20, "reward/mean": 0.26, "time/step": 3.0}', "reward/mean is 0.26 in one and 0.25"),
        ('{"step": 20, "reward/mean": 0.25}', "time/step is None in one and 3.0"),
        ('{"step": 20}\n{"step": 20, "reward/mean": 0.25, "time/step": 3.0}', None),  # the last counts
    ],
)
def test_metrics_of_another_run_are_refused(good, tmp_path, record, problem):
    out = tmp_path / "out"
    make(out, CHECKPOINT)
    metrics = {"reward/mean": 0.25, "time/step": 3.0, "train/kl": math.nan}
    (out / CHECKPOINT).write_text(json.dumps({"step": 20, "reported": metrics}))
    (out / "metrics.jsonl").write_text(record + "\n")
    if problem is None:
        check(good, out, "resume")
    else:
        with pytest.raises(ConfigError, match=rf"record of step 20 is not .*{problem}.*the run's own back"):
            check(good, out, "resume")


def test_a_checkpoint_with_the_name_of_another_step_is_refused_with_both_names(task, tmp_path, capsys):
    state = tmp_path / "checkpoints" / "step_00000900" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text('{"step": 4}')
    for how in ("--resume", "--resume=auto"):
        assert main(["train", str(task / "run.yaml"), f"output_dir={tmp_path}", how]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "step_00000900 is not the checkpoint of the step in its name" in line
        assert "is of step 4; rename it to step_00000004" in line
    assert state.read_text() == '{"step": 4}'


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([0, 1, 2, 3, 4, 5], []),
        ([], ["no record of steps 0-4:"]),
        ([0, 4], ["no record of steps 1-3:"]),
        ([0, 1, 1, 3, 4, 0, 9, 9], ["no record of step 2:", "several records of steps 0-1:"]),
    ],
)
def test_steps_without_a_record_or_with_several_are_named(tmp_path, steps, words):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    problems = metrics_problems(tmp_path / "metrics.jsonl", 4)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_a_directory_that_is_gone_is_not_said_to_hold_checkpoints(tmp_path):
    trainer = SimpleNamespace(config=SimpleNamespace(output_dir=str(tmp_path)))
    full = OSError(errno.ENOSPC, "No space left on device")
    make(tmp_path, "checkpoints/step_00000002.partial/state.json")  # a save has made the directory again
    for phrase in ("the record of the run is gone", "with --resume, or start"):
        assert phrase in _refused(trainer, full) and "untouched" not in _refused(trainer, full)
    make(tmp_path, "run.json")
    assert _refused(trainer, full).endswith("make room and start the run again with --overwrite")
    make(tmp_path, "checkpoints/step_00000002/state.json")
    assert "complete checkpoints there are untouched: make room" in _refused(trainer, full)

"""Checkpoints whose files are of another step or run, though each file is whole and has its checksum."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_run import GVPO, SHORT, configure, fit

from megatron_gvpo.cli import main
from megatron_gvpo.core.errors import CheckpointError, DamagedCheckpointError, DataError
from megatron_gvpo.megatron.checkpoint.directory import RECORD, read_record
from megatron_gvpo.observe import step_records

NEWEST, OLDER = "checkpoints/step_00000002", "checkpoints/step_00000001"
TENSORS = ("__0_0.distcp", ".metadata", "checksums.json")
RUN = (*SHORT, *GVPO, "train.steps=2", "checkpoint.every=1")


@pytest.fixture(scope="module")
def runs(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two runs that differ in the seed alone."""
    directory = tmp_path_factory.mktemp("mixed")
    fit(configure(task, directory / "own", *RUN))
    fit(configure(task, directory / "other", *RUN, "train.seed=7"))
    return directory


@pytest.fixture
def own(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "own", tmp_path / "own"))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (f"other/{NEWEST}", TENSORS),
        (f"other/{NEWEST}", ("checksums.json",)),
        (f"other/{NEWEST}", (RECORD,)),
        (f"own/{OLDER}", TENSORS),
        (f"own/{OLDER}", ("checksums.json",)),
    ],
    ids=str,
)
def test_files_of_another_checkpoint_are_damage(
    runs: Path, own: Path, task: Path, tmp_path: Path, source: str, names: tuple[str, ...], caplog: Any
) -> None:
    for name in names:
        shutil.copy(runs / source / name, own / NEWEST / name)
    with pytest.raises(DamagedCheckpointError, match=r"is not the file with which state.json was saved"):
        read_record(own / NEWEST)
    out = tmp_path / "hf"
    command = ["export", str(task / "run.yaml"), *SHORT[:1], "algorithm=gvpo", f"output_dir={own}"]
    assert main([*command, "--out", str(out)]) == 0
    assert "step_00000001 is used; step_00000002 is newer, and damaged" in caplog.text
    assert json.loads((out / "export.json").read_text())["step"] == 1


def test_a_checkpoint_of_another_run_is_refused(runs: Path, own: Path) -> None:
    shutil.rmtree(own / NEWEST)
    shutil.copytree(runs / "other" / NEWEST, own / NEWEST)
    with pytest.raises(
        CheckpointError, match=r"is a checkpoint of another run \(id \w{16}; .*run.json has \w{16}\)"
    ):
        read_record(own / NEWEST)
    (own / "run.json").unlink()  # nothing says whose directory it is
    assert read_record(own / NEWEST)["step"] == 2


def test_a_run_keeps_its_id(task: Path, own: Path) -> None:
    """A run that is resumed, or was moved, reads its own checkpoints."""
    moved = own.rename(own.with_name("moved"))
    fit(configure(task, moved, *RUN, "train.steps=3"), resume=True)
    assert {read_record(path)["run"] for path in (moved / "checkpoints").glob("step_*")} == {
        json.loads((moved / "run.json").read_text())["id"]
    }


def test_a_run_without_a_record_takes_the_id_of_its_checkpoint(task: Path, own: Path, tmp_path: Path) -> None:
    """A copied checkpoint that was continued had another id than its run, which then could not read it."""
    (branch := tmp_path / "branch" / "checkpoints").mkdir(parents=True)
    shutil.copytree(own / NEWEST, tmp_path / "branch" / NEWEST)
    fit(configure(task, branch.parent, *RUN, "train.steps=3"), resume=True)
    (own / "run.json").unlink()
    (own / "config.yaml").unlink()
    fit(configure(task, own, *RUN, "train.steps=3"), resume=True)
    for directory in (branch.parent, own):
        assert read_record(directory / NEWEST)["step"] == 2
        assert read_record(directory / NEWEST.replace("2", "3"))["step"] == 3


@pytest.mark.parametrize("name", ["checksums.json", ".metadata", "metadata.json", "__0_0.distcp"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(task: Path, own: Path, name: str, caplog: Any) -> None:
    """The checkpoint before it is used."""
    (own / NEWEST / name).unlink()
    os.mkfifo(own / NEWEST / name)
    fit(configure(task, own, *RUN), resume=True)
    assert f"{name} is not a file, but a pipe" in caplog.text
    assert (own / NEWEST).with_suffix(".damaged").is_dir()


@pytest.mark.parametrize(
    "spoil", [Path.unlink, lambda file: (file.unlink(), os.mkfifo(file))], ids=["missing", "pipe"]
)
def test_a_newer_checkpoint_without_its_record_is_named(
    task: Path, own: Path, spoil: Any, caplog: Any
) -> None:
    """It was passed over without a word, and its name given to the next checkpoint."""
    spoil(own / NEWEST / RECORD)
    fit(configure(task, own, *RUN), resume=True)
    assert "step_00000002 is not a complete checkpoint: it has no file state.json" in caplog.text
    assert (own / NEWEST).with_suffix(".damaged").is_dir(), "no other checkpoint replaces it"
    assert read_record(own / NEWEST)["step"] == 2


def test_a_record_with_the_name_of_another_step_is_not_read(own: Path) -> None:
    """Its step was replayed, and a difference of that step was named."""
    record = own / step_records.DIRECTORY / "step_000002.safetensors"
    shutil.copy(record.with_name("step_000001.safetensors"), record)
    with pytest.raises(DataError, match=r"step_000002\.safetensors: this is the record of step 1, copied"):
        step_records.read(own, 2)

"""The files that a user names for a command to write: what the command has not written is not replaced."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from helpers.inputs.made_run import make_run

from megatron_gvpo.cli import main

PLAN = ("plan", "--model", "Qwen/Qwen2.5-7B", "--gpus", "8", "--gpu", "h100", "--prompts", "64", "--k", "8")
PLAN += ("--response-length", "1000,max=4096", "--write")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """The commands that write a file, without its name."""
    run = make_run(tmp_path_factory.mktemp("runs") / "run", steps=1)
    return {"report": ("report", str(run), "--out"), "plan": PLAN}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("command", ["report", "plan"])
def test_files_that_the_command_has_not_written_stay(command, commands, tmp_path, capsys):
    files = {
        "metrics.jsonl": '{"step": 0}\n',
        "model.safetensors": "weights",
        "empty": "",
        "page.html": "<p>",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
        line = refused(capsys, *commands[command], str(tmp_path / name))
        assert f"{name}: this exists and is not a p" in line
        assert (tmp_path / name).read_text() == content
    assert {path.name for path in tmp_path.iterdir()} == {*files}


@pytest.mark.parametrize("command", ["report", "plan"])
def test_what_is_not_a_file_stays(command, commands, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "device").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    before = {path.name: path.lstat().st_mode for path in tmp_path.iterdir()}
    for name in before:
        assert "this exists and is not a p" in refused(capsys, *commands[command], str(tmp_path / name))
    reading, writing = os.pipe()
    assert "is not a p" in refused(capsys, *commands[command], f"/dev/fd/{writing}")
    os.close(reading), os.close(writing)
    assert {path.name: path.lstat().st_mode for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("command", ["report", "plan"])
def test_impossible_names_are_refused_in_one_line(command, commands, tmp_path, capsys):
    (tmp_path / "file").touch()
    for name, problem in {
        "none/x": "there is no directory",
        "file/x": "there is no directory",
        "x" * 5000: "too long",
        "x" * 256: "too long",
    }.items():
        assert problem in refused(capsys, *commands[command], str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("command", ["report", "plan"])
def test_a_file_of_the_command_is_replaced(command, commands, tmp_path, capsys):
    file, link = tmp_path / ("x" * 255), tmp_path / "link"  # as long as a name may be
    link.symlink_to(file.name)
    assert main([*commands[command], str(file)]) == 0
    first = file.read_bytes()
    file.write_bytes(first + b"\n<!-- old -->\n")
    assert main([*commands[command], str(link)]) == 0
    assert link.is_symlink() and b"<!-- old -->" not in file.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {file.name, "link"}


def test_a_page_beside_a_run_that_report_has_not_written_stays(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=1)
    (run / "report.html").write_text("<!doctype html>\n<title>My thesis</title>\n")
    assert "not a page that `report` wrote" in refused(capsys, "report", str(run))
    assert "My thesis" in (run / "report.html").read_text()
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0


def test_a_job_script_of_the_user_s_own_stays(task: Path, tmp_path: Path, capsys):
    arguments = ["slurm", str(task / "run.yaml"), f"output_dir={tmp_path}", "--nodes", "1", "--no-gpus"]
    script = tmp_path / "slurm" / "job.sbatch"
    script.parent.mkdir()
    script.write_text("#!/bin/bash\nsrun mine\n")
    assert "not a script that `slurm` wrote" in refused(capsys, *arguments)
    assert script.read_text() == "#!/bin/bash\nsrun mine\n"
    script.unlink()
    assert main(arguments) == 0 == main(arguments)


def test_a_converter_takes_a_new_file_only(tmp_path):
    textarena = pytest.importorskip("megatron_gvpo.conversations.adapters.textarena")
    (tmp_path / "games.jsonl").write_text("mine")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr("sys.argv", ["textarena", "Mastermind-v0", str(tmp_path / "games.jsonl")])
        textarena.main()
    assert end.value.code == 2 and (tmp_path / "games.jsonl").read_text() == "mine"

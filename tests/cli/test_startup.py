"""Commands load what they need and no more, and say what takes long. benchmarks/startup.py has the times."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch",
    "transformers",
    "megatron.core",
    "pyarrow",
    "math_verify",
    "matplotlib",
    "aiohttp",
    "rich",
)
PLAN = "plan --model Qwen/Qwen2.5-7B --gpus 8 --gpu h800 --k 5 --prompts 64 --response-length 850 --json"


def run(program: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], text=True, timeout=300, **options)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--help", 0),
        ("train --help", 0),
        ("recipes", 0),
        ("recipes --json", 0),
        ("recipes show dapo", 0),
        ("recipes dapo", 0),
        (PLAN, 0),
        ("train none.yaml", 2),
        ("runs tests", 0),
    ],
)
def test_a_command_that_needs_no_torch_loads_none(arguments: str, code: int) -> None:
    program = (
        f"import sys; from megatron_gvpo.cli import main\n"
        f"try: code = main({arguments.split()!r})\n"
        f"except SystemExit as end: code = end.code\n"
        f"print(code, *(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"
    )
    done = run(program, capture_output=True)
    assert done.stderr.splitlines()[-1] == str(code)


def test_a_variable_that_a_library_does_not_understand(task: Path, tmp_path: Path) -> None:
    """Fails on the former command line, which showed torch's traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "megatron_gvpo", "convert", str(task / "model"), str(tmp_path / "out")],
        env=os.environ | {"TORCH_DISTRIBUTED_DEBUG": "odd"},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: importing torch failed: ValueError: The value of TORCH_DISTRIBUTED")
    assert "unset the environment variable" in done.stderr and done.stderr.count("\n") == 1


def test_a_wrong_configuration_is_refused_before_torch_is_loaded(task: Path, tmp_path: Path) -> None:
    colocated = "rollout={n: 4, max_tokens: 8, engine: sglang, servers: {colocated: true}}"  # by broadcast
    for wrong in ("train.stepz=1", "parallel.tp=3", "data.eval.path=/dev/null/x", colocated):
        arguments = ["train", str(task / "run.yaml"), f"output_dir={tmp_path}/run", wrong, "--nproc=3"]
        program = (
            "import sys; import megatron_gvpo.core.launch as launch; from megatron_gvpo.cli import main\n"
            "launch.launch = lambda *_: 0\n"
            f"print(main({arguments!r}), 'torch' in sys.modules)"
        )
        done = run(program, capture_output=True)
        assert done.stdout.split() == ["2", "False"], done.stderr


SLOW = "import time; from megatron_gvpo.cli.terminal import loading\nwith loading('a model'): time.sleep({})"


@pytest.mark.parametrize(("seconds", "rank", "notice"), [(3, "0", True), (0, "0", False), (3, "1", False)])
def test_a_terminal_is_told_what_takes_long(seconds: int, rank: str, notice: bool) -> None:
    master, terminal = pty.openpty()
    done = run(
        SLOW.format(seconds),
        stderr=terminal,
        stdout=subprocess.PIPE,
        env={**os.environ, "RANK": rank},
    )
    os.write(terminal, b"end\n")
    shown = ""
    while "end\r\n" not in shown:  # a terminal gives a line at a time, or a part of it
        shown += os.read(master, 1000).decode()
    os.close(terminal)
    os.close(master)
    assert shown == ("loading a model ...\r\n" if notice else "") + "end\r\n" and not done.stdout


def test_a_pipe_stays_silent() -> None:
    done = run(SLOW.format(2), capture_output=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_what_a_parent_has_closed_gets_no_file_of_the_runs(closed: tuple[int, ...], tmp_path: Path) -> None:
    """Fails on the old code: files got the descriptors, and what was printed went into them."""
    program = (
        "import os, sys\nfrom megatron_gvpo.cli.terminal import open_standard_streams, say\n"
        "open_standard_streams()\n"
        f"file = os.open({str(tmp_path / 'file')!r}, os.O_WRONLY | os.O_CREAT)\n"
        "print('printed'); print('printed', file=sys.stderr); sys.stdin.read(); os.system('echo printed')\n"
        "sys.exit(0 if file > 2 else 1)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, preexec_fn=lambda: [os.close(descriptor) for descriptor in closed])
    assert done.returncode == 0 and (tmp_path / "file").read_bytes() == b""


@pytest.mark.parametrize(
    ("output", "code", "error"), [("| true", 0, ""), ("> /dev/full", 1, "error: the output")]
)
def test_an_output_that_ends_or_is_full(output: str, code: int, error: str) -> None:
    """Fails on the old code: a traceback for the list of runs, and exit code 120 for a full disk."""
    script = f"set -o pipefail; {sys.executable} -m megatron_gvpo runs tests {output}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == code and done.stderr.startswith(error) and done.stderr.count("\n") == code


def test_options_of_python_under_which_libraries_fail_are_named() -> None:
    for words, problem in (
        (["-OO"], "removes docstrings"),
        (["-W", "error"], "libraries warn when they are imp"),
    ):
        command = [sys.executable, *words, "-m", "megatron_gvpo", "recipes"]
        done = subprocess.run(command, text=True, timeout=300, capture_output=True)
        assert done.returncode == 2 and done.stderr.startswith("error: PYTHON") and problem in done.stderr


def test_files_beside_the_user_do_not_hide_modules(tmp_path: Path) -> None:
    """Fails on the old code, which imported a user's random.py in place of Python's own."""
    for name in ("random", "types", "json", "yaml", "datasets", "utils"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch").mkdir()
    command = [sys.executable, "-m", "megatron_gvpo", "keys", "lr"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, timeout=300, capture_output=True)
    assert done.returncode == 0 and "optimizer.lr" in done.stdout, done.stderr

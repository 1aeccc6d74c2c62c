"""tools/touched_proofs.py finds the proofs of a change and keeps to its time, `make proof` goes on where
it was stopped, and tests wait for engines that are being built, in small repositories.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

TOOL = Path("tools") / "touched_proofs.py"
PROOF = (
    "import time, pytest\n\n@pytest.mark.proof\n@pytest.mark.parametrize('n', range(2))\ndef test_proof(n):\n"
)
SUITE = ("outcomes", "time_budget", "work_groups")
SETTINGS = "[pytest]\npythonpath = tests\naddopts = -q\nmarkers = proof\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with the tool, rooms with a proof each, and a first commit."""
    for room in ("weights", "servers", "data"):
        (tmp_path / "tests" / room).mkdir(parents=True)
        (tmp_path / "tests" / room / f"test_{room}.py").write_text(f"{PROOF}    pass\n")
    (tmp_path / "tests" / "cli").mkdir()
    (tmp_path / "tests" / "cli" / "test_cli.py").write_text("def test_no_proof():\n    raise ValueError\n")
    names = [f"helpers.suite.{name}" for name in ("outcomes", "time_budget", "work_groups")]
    plugins = f"pytest_plugins = {names}\n"
    (tmp_path / "tests" / "conftest.py").write_text(plugins)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    for file in (TOOL, *(Path("tests/helpers/suite") / f"{name}.py" for name in SUITE)):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path, "README.md")
    return tmp_path


def git(place: Path, *arguments: str) -> str:
    who = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    done = subprocess.run(["git", *who, *arguments], cwd=place, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(place: Path, *changed: str) -> str:
    for name in changed:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{name}, once more\n")
    git(place, "add", "--all")
    git(place, "commit", "--quiet", "--message", "a change")
    return git(place, "rev-parse", "HEAD")


def run(place: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, place / TOOL, *arguments]
    few = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    done = subprocess.run(command, env=few, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


def pytest_in(place: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", *arguments]
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    few = {**os.environ, **plugins, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=place, env=few, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


def proved(place: Path, commit: str, **seconds: float) -> None:
    """Write the results of a run of all proofs at this commit."""
    file = place / "benchmarks" / "results" / "proof.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    times = {f"tests/{room}/test_{room}.py::test_proof[1]": s for room, s in seconds.items()}
    failed = ["tests/servers/test_servers.py::test_proof[1]"] if seconds else []
    file.write_text(json.dumps({"commit": commit, "seconds": times, "failed": failed}))


def test_rooms_of_the_last_changes_come_first(repository: Path):
    start = git(repository, "rev-parse", "HEAD")
    commit(repository, "megatron_gvpo/data/sources.py", "docs/page.md")
    commit(repository, "megatron_gvpo/weights/disk.py")
    code, said = run(repository, "--list")
    assert code == 0 and "rooms with proofs to run: weights servers\n" in said, "of the last commit alone"
    proved(repository, start)
    code, said = run(repository, "--list")
    assert code == 0 and "rooms with proofs to run: weights servers data\n" in said, "since the proofs ran"
    git(repository, "checkout", "--quiet", "-b", "mine")
    commit(repository, "docs/page.md")
    code, said = run(repository, "--list")
    assert code == 0 and "rooms with proofs to run: none\n" in said, "since the branch left main"


def test_every_room_of_the_package_says_whose_proofs_it_touches():
    spec = importlib.util.spec_from_file_location("touched_proofs", ROOT / TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    rooms = {path.parent.name for path in (ROOT / "megatron_gvpo").glob("*/__init__.py")}
    assert rooms == {name.split("/")[1] for name in tool.ROOMS if name.startswith("megatron_gvpo/")} - {
        "versions.txt"
    }
    assert tool.rooms_of("megatron_gvpo/emulation/mode.py") == ["emulation"]
    assert tool.rooms_of("megatron_gvpo/servers/pool.py") == ["servers", "weights"]


def test_a_clone_without_history_runs_every_room(repository: Path, tmp_path: Path):
    proved(repository, "0123456789" * 4)
    for arguments in ([], ["--since", "0123456"]):
        code, said = run(repository, "--list", *arguments)
        assert code == 0 and "all files\nrooms with proofs to run: cli data servers weights\n" in said
    shutil.rmtree(repository / ".git")
    code, said = run(repository, "--list")
    assert code == 0 and "rooms with proofs to run: cli data servers weights\n" in said


def test_proofs_that_take_longer_than_there_is_time_are_named_and_fail_nothing(repository: Path):
    proved(repository, git(repository, "rev-parse", "HEAD"), weights=10000.0, servers=1.0)
    commit(repository, "megatron_gvpo/weights/disk.py", "megatron_gvpo/cli/main.py")
    code, said = run(repository, "--seconds", "800")
    assert code == 0, said
    ran, left_out = said.split("did not run, for want of time: 2")
    assert "did not run, because they failed before: 1" in left_out
    assert "PASSED tests/servers/test_servers.py::test_proof[0]" in ran and "test_no_proof" not in said
    names = [f"tests/weights/test_weights.py::test_proof[{n}]" for n in range(2)]
    assert all(name in left_out for name in names), "its longest test may be what its fixtures need"


def test_a_group_whose_engine_is_being_built_comes_after_the_others(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lock = tmp_path / "cache" / "megatron_gvpo" / "engines" / "vllm-1.lock"
    lock.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rooms = ["data", "servers", "weights"]
    options = ("-n", "1", "--dist", "loadscope", "--no-loadscope-reorder", "-m", "proof", "-vv")
    with lock.open("w") as file:
        for is_building, order in ((False, rooms), (True, ["data", "weights", "servers"])):
            fcntl.flock(file, fcntl.LOCK_EX if is_building else fcntl.LOCK_UN)
            code, output = pytest_in(repository, *options)
            passed = [line.split("/")[1] for line in output.splitlines() if "PASSED" in line]
            assert code == 0 and list(dict.fromkeys(passed)) == order, output


@pytest.mark.proof
def test_the_exit_status_is_that_of_the_proofs_that_ran(repository: Path):
    proved(repository, git(repository, "rev-parse", "HEAD"))
    commit(repository, "megatron_gvpo/servers/pool.py")
    code, said = run(repository, "--seconds", "-5")
    assert code == 0 and "did not run, for want of time: 4" in said
    (repository / "tests" / "servers" / "test_servers.py").write_text(f"{PROOF}    assert n == 0\n")
    assert run(repository)[0] == 1


@pytest.mark.proof
def test_a_room_without_proofs_fails_nothing(repository: Path):
    proved(repository, git(repository, "rev-parse", "HEAD"))
    commit(repository, "megatron_gvpo/cli/main.py")
    assert run(repository)[0] == 0


@pytest.mark.proof
def test_what_does_not_end_is_cut_off_and_named(repository: Path):
    budget = repository / "tests" / "helpers" / "suite" / "time_budget.py"
    short = (
        budget.read_text().replace("GRACE = 300.0", "GRACE = 10.0").replace("UNKNOWN = 60.0", "UNKNOWN = 1.0")
    )
    budget.write_text(short)
    proved(repository, git(repository, "rev-parse", "HEAD"), weights=0.0)
    (repository / "tests" / "weights" / "test_weights.py").write_text(f"{PROOF}    time.sleep(100 * n)\n")
    commit(repository)
    code, said = run(repository, "--seconds", "20")
    assert code == 0 and "cut off after 30 s, without a result: 1" in said, said
    assert said.rstrip().endswith("tests/weights/test_weights.py::test_proof[1]")


def test_a_run_that_was_stopped_goes_on_with_what_has_not_passed_at_the_same_commit(repository: Path):
    (repository / ".gitignore").write_text("runs/\n")
    fails_at_first = (
        "from pathlib import Path\n\ndef test_servers():\n    assert Path('runs/mended').exists()\n"
    )
    (repository / "tests" / "servers" / "test_servers.py").write_text(fails_at_first)
    (repository / "tests" / "cli" / "test_cli.py").unlink()
    commit(repository)
    (repository / "runs").mkdir()
    options = ("--journal=runs/proof.jsonl", "--write-times=runs/proof.json")
    code, said = pytest_in(repository, *options)
    assert code == 1 and "1 failed, 4 passed" in said
    with (repository / "runs" / "proof.jsonl").open("a") as journal:
        journal.write('\n{"commit": "cut o')  # by a loss of power
    (repository / "runs" / "mended").touch()
    code, said = pytest_in(repository, *options)
    assert code == 0 and "5 tests have an outcome" in said and "1 passed" in said, said
    found = json.loads((repository / "runs" / "proof.json").read_text())
    assert found["outcomes"] == {"passed": 5} and found["failed"] == []
    assert found["commit"] == git(repository, "rev-parse", "HEAD")

    (repository / "tests" / "servers" / "test_servers.py").write_text("def test_servers():\n    pass\n")
    code, said = pytest_in(repository, *options)
    assert code == 0 and "5 passed" in said, "what is not committed has no name"
    commit(repository)
    code, said = pytest_in(repository, *options)
    assert code == 0 and "5 passed" in said, "another commit"

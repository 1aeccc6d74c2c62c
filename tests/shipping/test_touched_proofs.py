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
from helpers.suite import time_budget

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


def git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    done = subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(root: Path, *changed: str) -> str:
    for name in changed:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}, once more\n")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "a change")
    return git(root, "rev-parse", "HEAD")


def run(root: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, root / TOOL, *arguments]
    few = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    done = subprocess.run(command, env=few, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


def pytest_in(root: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", *arguments]
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    few = {**os.environ, **plugins, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=root, env=few, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


def proved(root: Path, commit: str, **seconds: float) -> None:
    """Write the results of a run of all proofs at this commit."""
    file = root / "benchmarks" / "results" / "proof.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    times = {f"tests/{room}/test_{room}.py::test_proof[1]": s for room, s in seconds.items()}
    failed = ["tests/servers/test_servers.py::test_proof[1]"] if seconds else []
    file.write_text(json.dumps({"commit": commit, "seconds": times, "failed": failed}))


def test_rooms_of_the_last_changes_come_first(repository: Path):
    start = git(repository, "rev-parse", "HEAD")
    commit(repository, "megatron_gvpo/data/sources.py", "docs/page.md")
    commit(repository, "megatron_gvpo/weights/disk.py")
    code, output = run(repository, "--list")
    assert code == 0 and "rooms with proofs to run: weights servers\n" in output, "of the last commit alone"
    proved(repository, start)
    code, output = run(repository, "--list")
    assert code == 0 and "rooms with proofs to run: weights servers data\n" in output, "since the proofs ran"
    git(repository, "checkout", "--quiet", "-b", "mine")
    commit(repository, "docs/page.md")
    code, output = run(repository, "--list")
    assert code == 0 and "rooms with proofs to run: none\n" in output, "since the branch left main"


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


def test_users_of_a_helper_import_it_or_start_it(repository: Path):
    """Words that only contain a helper's name, and comments, do not make a room its user."""
    tests = repository / "tests"
    (tests / "helpers" / "suite" / "__init__.py").touch()
    (tests / "helpers" / "rows.py").write_text("ROWS = 3\n")
    (tests / "helpers" / "batches.py").write_text("from helpers.rows import ROWS\n")
    (tests / "helpers" / "rows_worker.py").write_text("def run():\n    pass\n")
    (tests / "weights" / "test_weights.py").write_text("from helpers import batches\n")
    (tests / "servers" / "test_servers.py").write_text(
        "def test():\n    'helpers.rows of text'; throws = 1\n"
    )
    (tests / "data" / "test_data.py").write_text("WORKER = 'helpers.rows_worker:run'  # helpers.rows\n")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "helpers")
    for helper, rooms in (
        ("rows.py", "weights"),
        ("batches.py", "weights"),
        ("rows_worker.py", "data"),
        ("suite/outcomes.py", "cli data servers weights"),
    ):
        with (tests / "helpers" / helper).open("a") as file:
            file.write("# changed\n")
        git(repository, "commit", "--all", "--quiet", "--message", "a change")
        code, output = run(repository, "--list", "--since", "HEAD^")
        assert code == 0 and f"rooms with proofs to run: {rooms}\n" in output, (helper, output)


def test_a_clone_without_history_runs_every_room(repository: Path, tmp_path: Path):
    proved(repository, "0123456789" * 4)
    for arguments in ([], ["--since", "0123456"]):
        code, output = run(repository, "--list", *arguments)
        assert code == 0 and "all files\nrooms with proofs to run: cli data servers weights\n" in output
    shutil.rmtree(repository / ".git")
    code, output = run(repository, "--list")
    assert code == 0 and "rooms with proofs to run: cli data servers weights\n" in output


def test_proofs_that_take_longer_than_there_is_time_are_named_and_fail_nothing(repository: Path):
    proved(repository, git(repository, "rev-parse", "HEAD"), weights=10000.0, servers=1.0)
    commit(repository, "megatron_gvpo/weights/disk.py", "megatron_gvpo/cli/main.py")
    code, output = run(repository, "--seconds", "800")
    assert code == 0, output
    ran, left_out = output.split("did not run, for want of time: 2")
    assert "did not run, because they failed before: 1" in left_out
    assert "PASSED tests/servers/test_servers.py::test_proof[0]" in ran and "test_no_proof" not in output
    assert "tests/weights/test_weights.py: 2\n" in left_out, "its longest test may be what its fixtures need"


def test_a_test_without_a_time_is_short_where_others_of_its_file_have_one(monkeypatch: pytest.MonkeyPatch):
    """It counted as 60 s, though times of less than half a second are not written."""
    times = {"tests/made/test_known.py::test_long": 20.0, "tests/made/test_known.py::test_other": 3.0}
    monkeypatch.setattr(time_budget, "known_times", lambda: times)
    for name, is_first, seconds in (
        ("test_known.py::test_quick", False, 1.0),
        ("test_known.py::test_other", False, 3.0),
        ("test_known.py::test_quick", True, 20.0),
        ("test_new.py::test_new", False, 60.0),
        ("test_new.py::test_new", True, 300.0),
    ):
        assert time_budget.expected_seconds(f"tests/made/{name}", is_first) == seconds, (name, is_first)


@pytest.mark.proof
def test_what_failed_is_read_at_the_end_of_what_was_cut_off(repository: Path):
    """A grace below zero cuts the slow proof off soon, though there was time for it to begin."""
    (repository / "tests" / "servers" / "test_servers.py").write_text(f"{PROOF}    time.sleep(3600 * n)\n")
    (repository / "tests" / "weights" / "test_weights.py").write_text(
        f"{PROOF}    assert n, 'a wrong weight'\n"
    )
    budget = repository / "tests" / "helpers" / "suite" / "time_budget.py"
    budget.write_text(budget.read_text().replace("GRACE = 300.0", "GRACE = -770.0"))
    proved(repository, git(repository, "rev-parse", "HEAD"))
    commit(repository, "megatron_gvpo/weights/disk.py", "megatron_gvpo/servers/pool.py")
    code, output = run(repository, "--seconds", "800")
    assert code == 1, output
    left_out, failures = output.split("cut off after 30 s, without a result: ")[1].split("= FAILURES =")
    assert "tests/servers/test_servers.py: 1\n" in left_out and "wrong weight" not in left_out
    assert "FAILED tests/weights/test_weights.py::test_proof[0]" in failures and "a wrong weight" in failures
    assert output.rstrip().splitlines()[-1].startswith("FAILED "), output[-500:]


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


def test_the_exit_status_is_that_of_the_proofs_that_ran(repository: Path):
    proved(repository, git(repository, "rev-parse", "HEAD"))
    commit(repository, "megatron_gvpo/servers/pool.py")
    code, output = run(repository, "--seconds", "-5")
    assert code == 0 and "did not run, for want of time: 4" in output
    (repository / "tests" / "servers" / "test_servers.py").write_text(f"{PROOF}    assert n == 0\n")
    assert run(repository)[0] == 1


def test_a_room_without_proofs_fails_nothing(repository: Path):
    proved(repository, git(repository, "rev-parse", "HEAD"))
    commit(repository, "megatron_gvpo/cli/main.py")
    assert run(repository)[0] == 0


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
    code, output = pytest_in(repository, *options)
    assert code == 1 and "1 failed, 4 passed" in output
    with (repository / "runs" / "proof.jsonl").open("a") as journal:
        journal.write('\n{"commit": "cut o')  # by a loss of power
    (repository / "runs" / "mended").touch()
    code, output = pytest_in(repository, *options)
    assert code == 0 and "5 tests have an outcome" in output and "1 passed" in output, output
    proof = json.loads((repository / "runs" / "proof.json").read_text())
    assert proof["outcomes"] == {"passed": 5} and proof["failed"] == []
    assert proof["commit"] == git(repository, "rev-parse", "HEAD")

    (repository / "tests" / "servers" / "test_servers.py").write_text("def test_servers():\n    pass\n")
    code, output = pytest_in(repository, *options)
    assert code == 0 and "5 passed" in output, "what is not committed has no name"
    commit(repository)
    code, output = pytest_in(repository, *options)
    assert code == 0 and "5 passed" in output, "another commit"

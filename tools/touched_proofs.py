#!/usr/bin/env python
"""Run the long proofs (tests marked `proof`) of the rooms that a change touches, within a time limit.

usage: tools/touched_proofs.py [--since COMMIT] [--seconds N] [--list]

The change is everything since COMMIT: by default since the branch left origin/main or main, or, on main
itself, since the commit on which `make proof` ran last (benchmarks/results/proof.json), or else the commit
before. Where git has no such history, all rooms count as touched. Those that were changed last come first.
The output names the proofs that ran and those for which no time was left
(tests/helpers/suite/time_budget.py).
Exit status: 1 if a proof failed, 0 if none did, also where none ran.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PROOF = ROOT / "benchmarks" / "results" / "proof.json"
RUNS = ("runs", "checkpoint")
# Rooms of tests for a path, by the longest prefix that is listed here. For a path in a room of the package,
# the room of tests with the same name comes first. Pages and results touch no room.
ROOMS: dict[str, tuple[str, ...]] = {
    "megatron_gvpo": (*RUNS, "servers"),  # types, groups and turns
    "megatron_gvpo/algorithms": ("megatron", "runs"),
    "megatron_gvpo/checks": ("settings", "cluster"),
    "megatron_gvpo/cli": (),
    "megatron_gvpo/cluster": (),
    "megatron_gvpo/core": ("cli", "cluster", *RUNS),
    "megatron_gvpo/data": ("checkpoint",),
    "megatron_gvpo/conversations": ("servers",),
    "megatron_gvpo/emulation": (),
    "megatron_gvpo/evals": ("servers",),
    "megatron_gvpo/huggingface": ("settings", "megatron"),
    "megatron_gvpo/inspection": (),
    "megatron_gvpo/kernels": ("megatron",),
    "megatron_gvpo/megatron": ("checkpoint", "cpu", "tinker"),
    "megatron_gvpo/observe": (),
    "megatron_gvpo/planner": ("cluster", "rehearsal"),
    "megatron_gvpo/rehearsal": (),
    "megatron_gvpo/replay": (),
    "megatron_gvpo/rewards": ("runs",),
    "megatron_gvpo/runs": RUNS,
    "megatron_gvpo/sampling": ("servers", *RUNS),
    "megatron_gvpo/servers": ("weights",),
    "megatron_gvpo/settings": ("cluster",),
    "megatron_gvpo/tinker": (),
    "megatron_gvpo/training": (*RUNS, "servers"),
    "megatron_gvpo/verify": ("megatron",),
    "megatron_gvpo/versions.txt": ("shipping", "servers", "weights"),
    "megatron_gvpo/weights": ("servers",),
    "megatron_gvpo/workers": ("rewards", "conversations"),
    "slurm": ("cluster",),
    "benchmarks": (*RUNS, "shipping"),
    "benchmarks/results": (),
    "docker": ("shipping",),
    "constraints.txt": ("shipping",),
    "pyproject.toml": ("shipping",),
    "setup.py": ("shipping",),
    "locks": ("shipping",),
    "examples": ("runs",),
    "tools/engines": ("servers", "weights"),
}


def git(*arguments: str) -> str | None:
    """The output of a git command, or None where it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def start_of_change() -> str | None:
    """The commit before the change, or None where git does not know one."""
    head = git("rev-parse", "HEAD")
    for branch in ("origin/main", "main"):
        base = git("merge-base", "HEAD", branch)
        if base and base != head:
            return base
    proved = json.loads(PROOF.read_text()).get("commit") if PROOF.exists() else None
    if proved and git("merge-base", "--is-ancestor", proved, "HEAD") is not None:
        return proved
    return git("rev-parse", "--verify", "HEAD^")


def changed_paths(since: str) -> list[str] | None:
    """The paths that differ since a commit, those changed last first; None where git cannot say."""
    latest, older = git("diff", "--name-only", "HEAD"), git("log", "--format=", "--name-only", f"{since}..")
    if latest is None or older is None:
        return None
    return list(dict.fromkeys([*latest.splitlines(), *filter(None, older.splitlines())]))


def all_rooms() -> set[str]:
    return {path.parent.name for path in TESTS.glob("*/test_*.py")}


def rooms_of(path: str) -> list[str]:
    """The rooms of tests that a changed file touches, the file's own room first."""
    parts = Path(path).parts
    if parts[0] == "tests":
        return [parts[1]] if len(parts) > 2 and parts[1] != "helpers" else users_of(Path(*parts[1:]))
    prefixes = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
    rooms = next((ROOMS[prefix] for prefix in prefixes if prefix in ROOMS), ())
    own = parts[1:2] if parts[0] == "megatron_gvpo" and len(parts) > 2 else ()
    return list(dict.fromkeys([*own, *rooms]))


def users_of(changed: Path) -> list[str]:
    """The rooms whose tests import a file of tests/helpers or start it as a program, or whose helpers do.

    Every room uses conftest.py, and so what it imports. `changed` is relative to tests/.
    """
    users = [changed]
    for used in users:
        own = names_of(used)
        users += [file for file, names in named_files().items() if names & own and file not in users]
    if Path("conftest.py") in users:
        return sorted(all_rooms())
    return sorted({file.parts[0] for file in users if len(file.parts) > 1 and file.parts[0] != "helpers"})


def names_of(file: Path) -> set[str]:
    """The names by which other files import or start this file: its module's, and the file's own."""
    module = file.parent if file.name == "__init__.py" else file.with_suffix("")
    return {".".join(module.parts), file.name} - {"__init__.py"}


@cache
def named_files() -> dict[Path, set[str]]:
    """The names of modules and of files in every Python file of tests/, by its path there."""
    return {file.relative_to(TESTS): names_in(ast.parse(file.read_text())) for file in TESTS.rglob("*.py")}


def names_in(tree: ast.AST) -> set[str]:
    """The modules that a file imports, with the packages around them, and those that its strings name."""
    modules, files = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            # A worker is named "helpers.workers.trainer_worker:run", and a program "check_task.py".
            modules |= set(re.findall(r"helpers(?:\.\w+)+", node.value))
            files |= set(re.findall(r"\w+\.\w+$", node.value))
    packages = {name.rsplit(".", n)[0] for name in modules for n in range(name.count(".") + 1)}
    return packages | files


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the long proofs of the rooms that a change touches.")
    parser.add_argument("--since", help="the commit before the change")
    parser.add_argument("--seconds", type=float, default=1800.0, help="the time limit")
    parser.add_argument("--list", action="store_true", help="print the rooms, and run nothing")
    args = parser.parse_args()
    since = args.since or start_of_change()
    changed = None if since is None else changed_paths(since)
    existing = all_rooms()
    touched = sorted(existing) if changed is None else [room for path in changed for room in rooms_of(path)]
    rooms = [room for room in dict.fromkeys(touched) if room in existing]
    print(f"changed since {since or 'the beginning'}: {'all' if changed is None else len(changed)} files")
    print("rooms with proofs to run:", " ".join(rooms) or "none", flush=True)
    if args.list or not rooms:
        return 0
    workers = ["-n", "2", "--dist", "loadscope", "--no-loadscope-reorder", "--max-worker-restart", "0"]
    options = ["-m", "proof", "-vv", "--seconds", str(max(args.seconds, 0.0))]
    command = [sys.executable, "-m", "pytest", *workers, *options, *(f"tests/{room}" for room in rooms)]
    proofs = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        code = proofs.wait()
    finally:
        with suppress(ProcessLookupError):  # pytest's workers, if pytest was stopped early
            os.killpg(proofs.pid, signal.SIGKILL)
    return 0 if code == 5 else code  # 5: these rooms have no proofs


if __name__ == "__main__":
    sys.exit(main())

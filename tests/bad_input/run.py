#!/usr/bin/env python
"""Gives the command line bad inputs, and counts how it takes them.

usage: tests/bad_input/run.py [--room ROOM ...] [--name PART ...] [--share SHARE --seed SEED]
    [--limit SECONDS] [--out FILE.json]

Every input runs in a process of its own, forked from one that has imported the libraries, in a fresh
directory. Outcomes: `good` (refused in one line that names the key, file or line; or rightly accepted),
`vague` (refused without that name), `traceback`, `silent` (accepted, though it should not be), `wrongly
refused`, `hang` (longer than the limit), `ran code` (code in the input was executed), `lost` (a file of the
user's or of an earlier run is gone or changed).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests"),
    str(ROOT / "examples" / "quickstart"),
]

LIMIT = 150.0  # seconds of one input, on an idle machine
LONGEST_LINE = 2100  # characters of an error that still counts as one line


def main() -> int:
    parser = argparse.ArgumentParser(description="Give the command line bad inputs.")
    parser.add_argument("--room", action="append", help="only these classes of inputs")
    parser.add_argument("--name", action="append", help="only inputs whose name contains this")
    parser.add_argument("--share", type=float, default=1.0, help="draw this share of each class (1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (0)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds until an input counts as a hang")
    parser.add_argument("--out", type=Path, help="write the outcomes as JSON")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from bad_input.cases import CASES

    chosen = [c for c in CASES if not options.room or c.room in options.room]
    chosen = [c for c in chosen if not options.name or any(part in c.name for part in options.name)]
    draw = random.Random(options.seed)
    chosen = [
        case
        for room in dict.fromkeys(case.room for case in chosen)
        for case in _drawn([c for c in chosen if c.room == room], options.share, draw)
    ]
    outcomes: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(prefix="bad-input-") as directory:
        home = Path(directory)
        _import_libraries()
        _make_material(home, any(c.resumed for c in chosen))
        for case in chosen:
            begin = time.perf_counter()
            outcome, shown = _try(case, home, options.limit)
            outcomes.setdefault(case.room, {})[case.name] = outcome
            seconds = time.perf_counter() - begin
            print(f"{outcome:16s} {case.room:12s} {case.name}  ({seconds:.1f} s)  {shown[:230]}", flush=True)
    counts = {room: dict(Counter(by_name.values())) for room, by_name in outcomes.items()}
    total = dict(Counter(o for by_name in outcomes.values() for o in by_name.values()))
    print(json.dumps({"total": total, **counts}, indent=1))
    if options.out:
        options.out.write_text(json.dumps({"total": total, "counts": counts, "outcomes": outcomes}, indent=1))
    return 0 if set(total) <= {"good"} else 1


def _drawn(cases: list[Any], share: float, draw: random.Random) -> list[Any]:
    drawn_numbers = set(draw.sample(range(len(cases)), math.ceil(share * len(cases))))
    return [case for number, case in enumerate(cases) if number in drawn_numbers]


def _import_libraries() -> None:
    """Import in the parent what every command would: children then begin in milliseconds."""
    from helpers import tiny_run  # noqa: F401

    import megatron_gvpo.cli.train  # noqa: F401


def _make_material(home: Path, resumed: bool) -> None:
    """Write home/task, and home/stopped: the same with a run that stopped after step 4 of 6."""
    from bad_input.case import Case

    _forked(_make_task, home / "task.log", home)
    if not resumed:
        return
    shutil.copytree(home / "task", home / "stopped")
    file = home / "stopped" / "run.yaml"
    file.write_text(
        file.read_text()
        .replace("steps: 4", "steps: 12")
        .replace("eval: {path", "eval: null\n#")
        .replace("logging:", "checkpoint: {every: 2, keep: 5, export_hf: false}\nlogging:")
    )
    second = home / "stopped" / "run" / "checkpoints"
    _, log = _forked(
        _command,
        home / "stopped.log",
        home / "stopped",
        Case("", "", ("train", "run.yaml", "output_dir=run")),
        stop=lambda: second.is_dir() and len(list(second.iterdir())) >= 2,
    )
    assert len(list(second.iterdir())) >= 2, log


def _make_task(home: Path) -> None:
    from helpers import tiny_run

    tiny_run.make(home / "task")
    config = (home / "task" / "run.yaml").read_text().replace(f"{home}/task/", "")
    (home / "task" / "run.yaml").write_text(config)


def _try(case: Any, home: Path, limit: float) -> tuple[str, str]:
    """Run one case; returns its outcome and the line that a user sees last."""
    here = home / "case"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(home / ("stopped" if case.resumed else "task"), here, symlinks=True)
    case.spoil(here)
    log = home / "case.log"
    code, text = _forked(_command, log, here, case, limit=limit)
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    is_explained = any(word in text for word in case.says) if case.says else bool(text.strip())
    if case.forbidden and (here / case.forbidden).exists():
        return "ran code", last
    if (outcome := case.after(here)) == "lost" or (outcome and code == 0):
        return outcome, last
    if code is None:
        return "hang", last
    if "Traceback (most recent call last)" in text or code < 0:
        return "traceback", f"{code}: {last}"
    if code == 0:
        if case.expected == "refused":
            return "silent", last
        return ("good" if is_explained or not case.says else "silent"), last
    if case.expected == "runs":
        return "wrongly refused", last
    short = len(last) <= LONGEST_LINE
    return ("good" if is_explained and short and code in (1, 2) else "vague"), f"{code}: {last}"


def _command(here: Path, case: Any) -> None:
    os.chdir(here)
    os.environ["PYTHONPATH"] = str(ROOT)
    for name, value in case.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    case.before()
    program = [sys.executable, "-m", "megatron_gvpo"]
    if case.shell:
        os.environ["PROGRAM"] = " ".join(program)
        os.execvp("bash", ["bash", "-c", case.shell])
    if case.fresh:
        os.execv(program[0], [*program, *case.arguments])
    sys.argv = ["megatron-gvpo", *case.arguments]
    runpy.run_module("megatron_gvpo", run_name="__main__")


def _forked(
    function: Callable[..., None],
    log: Path,
    *arguments: Any,
    stop: Callable[[], bool] = lambda: False,
    limit: float = 4 * LIMIT,
) -> tuple[int | None, str]:
    """Call a function in a child with its output in `log`; returns its exit code (None: too late) and output.

    The child gets SIGTERM once `stop()` is true.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in a Python process of its own
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 0
        try:
            function(*arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    deadline, stopped = time.monotonic() + limit, False
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline:
            subprocess.run(["pkill", "-KILL", "-s", str(child)], check=False)
            os.waitpid(child, 0)
            return None, log.read_text(errors="replace")
        if not stopped and stop():
            stopped = True
            os.kill(child, signal.SIGTERM)
        time.sleep(0.02)
    subprocess.run(["pkill", "-KILL", "-s", str(child)], check=False)
    code = os.waitstatus_to_exitcode(status) if not os.WIFSIGNALED(status) else -os.WTERMSIG(status)
    return code, log.read_text(errors="replace")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # the threads are idle
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())

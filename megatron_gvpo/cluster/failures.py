"""Finds the first failure of a job's ranks in their logs: `python -m megatron_gvpo.cluster.failures LOGS`.

A rank that raises an exception records it in a file (`megatron_gvpo.cli.rank`). A rank that is killed, or
ends before it can record anything, leaves no such file, but its torchrun reports it in the node's log. The
exit code is 1 if a rank failed, and 0 if a signal told every rank that ended early to end (_TOLD).
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

LINES = 15  # lines shown from the end of a log
_TOLD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # signals that tell a rank to end: not failures
_PAGE = re.compile(  # torchrun's description of a failed rank
    r"time +: (?P<time>\S+)\n +host +: (?P<host>\S+)\n"
    r" +rank +: (?P<rank>\d+) \(local_rank: \d+\)\n +exitcode +: (?P<code>-?\d+)"
)
_TORCHRUN = "] failed (exitcode: "  # part of the first line that torchrun logs about a failed rank


@dataclass(frozen=True)
class RankFailure:
    rank: int
    time: float  # seconds since the epoch
    node: str
    problem: str


def failures(logs: Path) -> list[RankFailure]:
    """Return all failures, earliest first, without the ranks that a signal told to end (_TOLD)."""
    by_rank = {failure.rank: failure for failure in _unrecorded(logs)}
    for file in logs.glob("rank_*.failed.json"):
        rank = int(file.name[5:10])
        try:
            record = json.loads(file.read_text())
        except ValueError:  # the file is incomplete: the disk was full, or the rank was killed
            node, problem = _node_of(logs, rank), "it could not write down why"
            record = {"time": file.stat().st_mtime, "node": node, "problem": problem}
        by_rank[rank] = RankFailure(rank, record["time"], record["node"], record["problem"])
    return sorted(by_rank.values(), key=lambda failure: failure.time)


def _unrecorded(logs: Path) -> Iterator[RankFailure]:
    """Yield the failures that torchrun reports in the nodes' logs, whether or not the rank recorded one."""
    for log in logs.glob("node_*.log"):
        text = log.read_text(errors="replace")
        for page in _PAGE.finditer(text):
            rank, code = int(page["rank"]), int(page["code"])
            # A signal gives -N. `train` exits with 128 + N if the signal comes before training begins.
            if {-code, code - 128} & {*_TOLD}:
                continue
            node, problem = _node_of(logs, rank), f"exit code {code}"
            if code < 0:
                why = ": often because memory ran out, see `dmesg`" if -code == signal.SIGKILL else ""
                problem = f"killed by {signal.Signals(-code).name}{why}"
            elif not (logs / f"rank_{rank:05}.log").exists():
                output = text[: text.find(_TORCHRUN)].rpartition("\n")[0]
                node = page["host"]
                problem = f"{problem}, before it began its log; {log} says\n{_last(output)}"
            # torchrun notices a dead rank late. Other ranks may have failed by then for the lost connection.
            moment = datetime.fromisoformat(page["time"].replace("_", "T")).timestamp() - 1.0
            yield RankFailure(rank, moment, node, problem)


def _node_of(logs: Path, rank: int) -> str:
    """Return the node's name from the first line of the rank's log."""
    log = logs / f"rank_{rank:05}.log"
    match = re.search(r"rank \d+ on (\S+),", log.read_text(errors="replace")) if log.exists() else None
    return match[1] if match else "an unknown node"


def describe(logs: Path) -> str | None:
    """Describe a job's first failure for the user; None if no rank failed."""
    failed = failures(logs)
    if not failed:
        nodes = sorted(logs.glob("node_*.log"))
        if any(logs.glob("rank_*.log")) or not nodes:
            return None
        return f"no rank was started; {nodes[0]} ends with\n{_tail(nodes[0])}"
    first, *others = failed
    log = logs / f"rank_{first.rank:05}.log"
    text = (
        f"first failure: rank {first.rank} on {first.node} at "
        f"{datetime.fromtimestamp(first.time):%H:%M:%S}: {first.problem}"
    )
    if "Traceback" not in first.problem and log.exists():
        text += f"\n{log} ends with\n{_tail(log)}"
    if others:
        text += f"\nranks that failed after it: {', '.join(str(other.rank) for other in others[:8])}"
        text += f" and {len(others) - 8} more" if len(others) > 8 else ""
    return f"{text}\nthe logs of all ranks: {logs}"


def _tail(log: Path) -> str:
    return _last(log.read_text(errors="replace"))


def _last(text: str) -> str:
    return "\n".join(f"    {line[:300]}" for line in text.splitlines()[-LINES:])


def main() -> int:
    text = describe(Path(sys.argv[1]))
    if text is None:
        return 0
    print(f"\n{text}", flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main())

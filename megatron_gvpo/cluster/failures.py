"""The first failure of a job's ranks, from their logs: `python -m megatron_gvpo.cluster.failures LOGS`.

A rank that raised has recorded it (`megatron_gvpo.cluster.rank`). One that was killed, or ended before it
came so far, could not; its torchrun has noticed, and says so in the node's log. Exits with 1 where a rank
failed, with 0 where all that ended early had been told to.
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

LINES = 15  # of a log
_TOLD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_PAGE = re.compile(  # how torchrun describes a failed rank
    r"time +: (?P<time>\S+)\n +host +: (?P<host>\S+)\n"
    r" +rank +: (?P<rank>\d+) \(local_rank: \d+\)\n +exitcode +: (?P<code>-?\d+)"
)
_TORCHRUN = "] failed (exitcode: "  # in the first line that it says of any


@dataclass(frozen=True)
class Failure:
    rank: int
    time: float  # seconds since the epoch
    node: str
    problem: str


def failures(logs: Path) -> list[Failure]:
    """All failures, the first first; not those of ranks that ended because they were told to."""
    found = {failure.rank: failure for failure in _unrecorded(logs)}
    for file in logs.glob("rank_*.failed.json"):
        rank = int(file.name[5:10])
        try:
            record = json.loads(file.read_text())
        except ValueError:  # the disk was full, or the rank was killed
            node, problem = _node_of(logs, rank), "it could not write down why"
            record = {"time": file.stat().st_mtime, "node": node, "problem": problem}
        found[rank] = Failure(rank, record["time"], record["node"], record["problem"])
    return sorted(found.values(), key=lambda failure: failure.time)


def _unrecorded(logs: Path) -> Iterator[Failure]:
    """Ranks that a signal ended, or that ended by themselves, whatever they have recorded."""
    for log in logs.glob("node_*.log"):
        text = log.read_text(errors="replace")
        for page in _PAGE.finditer(text):
            rank, code = int(page["rank"]), int(page["code"])
            if {-code, code - 128} & {*_TOLD}:  # by the signal itself, or as `train` ends before it trains
                continue
            node, problem = _node_of(logs, rank), f"exit code {code}"
            if code < 0:
                why = ": often for want of memory, see `dmesg`" if -code == signal.SIGKILL else ""
                problem = f"killed by {signal.Signals(-code).name}{why}"
            elif not (logs / f"rank_{rank:05}.log").exists():
                said = text[: text.find(_TORCHRUN)].rpartition("\n")[0]
                node, problem = page["host"], f"{problem}, before its log began; {log} says\n{_last(said)}"
            # torchrun sees it a moment later, when others have lost the connection to it.
            moment = datetime.fromisoformat(page["time"].replace("_", "T")).timestamp() - 1.0
            yield Failure(rank, moment, node, problem)


def _node_of(logs: Path, rank: int) -> str:
    """From the first line of the rank's log."""
    log = logs / f"rank_{rank:05}.log"
    found = re.search(r"rank \d+ on (\S+),", log.read_text(errors="replace")) if log.exists() else None
    return found[1] if found else "an unknown node"


def describe(logs: Path) -> str | None:
    """What a user must know of a job that failed; None where no rank did."""
    found = failures(logs)
    if not found:
        nodes = sorted(logs.glob("node_*.log"))
        if any(logs.glob("rank_*.log")) or not nodes:
            return None
        return f"no rank was started; {nodes[0]} ends with\n{_tail(nodes[0])}"
    first, *others = found
    log = logs / f"rank_{first.rank:05}.log"
    text = (
        f"first failure: rank {first.rank} on {first.node} at "
        f"{datetime.fromtimestamp(first.time):%H:%M:%S}: {first.problem}"
    )
    if "Traceback" not in first.problem and log.exists():
        text += f"\n{log} ends with\n{_tail(log)}"
    if others:
        text += f"\nafter it failed rank {', '.join(str(other.rank) for other in others[:8])}"
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

"""Prints a table of chaos results: the number of passed schedules, and the number of faults of each kind.

python benchmarks/chaos_summary.py benchmarks/results/chaos_*.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from lib.chaos.schedules import EMBEDDED, SERVERS


def main() -> None:
    struck: dict[str, Counter[str]] = {}
    schedules: dict[str, Counter[str]] = {}
    for file in sys.argv[1:]:
        for line in Path(file).read_text().splitlines():
            result = json.loads(line)
            engine = result["engine"]
            schedules.setdefault(engine, Counter())["passed" if result["passed"] else "failed"] += 1
            count = struck.setdefault(engine, Counter())
            for kind in (*EMBEDDED, *SERVERS):
                count[kind] += sum(f": {kind} " in line for line in result.get("struck", ()))
            count["starts"] += result.get("starts", 0)
    engines = list(struck)
    print(f"| | {' | '.join(engines)} |\n|---|{'---|' * len(engines)}")
    for outcome in ("passed", "failed"):
        print(f"| schedules {outcome} | {' | '.join(str(schedules[e][outcome]) for e in engines)} |")
    for kind in ("starts", *EMBEDDED, *SERVERS):
        print(f"| {kind} | {' | '.join(str(struck[e][kind]) for e in engines)} |")


if __name__ == "__main__":
    main()

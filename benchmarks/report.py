"""Measures the seconds until a real Chromium has opened a report of 10,080 responses, and shows its samples.

The run is made, not trained: 16 steps of 60 prompts with 8 responses each and 5 evaluations, with texts of 50
to 200 words and numbers for every token. The file is opened three times in one browser, each time after an
empty page:

- `curves_s`: from the start of the navigation until the curves are shown;
- `samples_s`: from the choice of the samples until the responses of a group are shown with coloured tokens;
- `busy_s`: the part of both in which the page's main thread was busy; other programs disturb it less.

Debian's Chromium is installed where it is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

STEPS, PROMPTS, K, WORDS = 16, 60, 8, 100
RESPONSES = (STEPS + 5) * PROMPTS * K
OPENINGS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/report.json")
    parser.add_argument("--file", type=Path, help="open this report instead of making one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = measure(args.file.resolve() if args.file else made(Path(directory)), Path(directory))
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def made(directory: Path) -> Path:
    """Make the run and its report; returns the report's path."""
    from helpers.inputs.made_run import make_run

    from megatron_gvpo.observe.report import Reporter, page_text

    run = make_run(directory / "run", steps=STEPS, prompts=PROMPTS, k=K, words=WORDS)
    (directory / "report.html").write_text(page_text(Reporter([run], RESPONSES).report()))
    return directory / "report.html"


def measure(file: Path, directory: Path) -> dict[str, Any]:
    from helpers.machine.chromium import browser

    openings = []
    with browser(directory) as page:
        page.call("Performance.enable")
        for _ in range(OPENINGS):
            load = os.getloadavg()[0]
            page.open(f"file://{file}")
            curves = page.look("Number(document.documentElement.dataset.open)") / 1000
            start = time.perf_counter()
            page.look("view('samples')")
            page.wait("document.querySelectorAll('.card').length", "the responses of a group")
            samples = time.perf_counter() - start
            metrics = page.call("Performance.getMetrics")["metrics"]
            [busy] = [metric["value"] for metric in metrics if metric["name"] == "TaskDuration"]
            openings.append({"curves_s": curves, "samples_s": samples, "busy_s": busy, "load_before": load})
        version = page.call("Browser.getVersion")["product"]
        responses = page.look("state.index.runs[0].samples.rows.file.length")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "browser": version,
        "megabytes": round(file.stat().st_size / 1e6, 1),
        "responses": responses,
        "openings": openings,
    }


if __name__ == "__main__":
    main()

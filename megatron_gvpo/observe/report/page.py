"""Writes the page: its template, styles and scripts in one file, with the runs' data.

All data are compressed and in base64, so that no character of a response is ever parsed as HTML. The page's
Content-Security-Policy lets it run these scripts and nothing else, and connect to nothing.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from megatron_gvpo.core.metric_names import SECTIONS, entry
from megatron_gvpo.core.plain_values import finite_number
from megatron_gvpo.observe.alerts import alerts_of
from megatron_gvpo.observe.report.run import Run, columns, read_run, short_names
from megatron_gvpo.observe.report.samples import Packer, pass_intervals
from megatron_gvpo.observe.report.token_texts import TokenTexts

ASSETS = resources.files("megatron_gvpo.observe.report") / "assets"
STYLES = ("uplot/uPlot.min.css", "style.css")
SCRIPTS = (
    "uplot/uPlot.iife.min.js",
    "data.js",
    "curves.js",
    "tokens.js",
    "samples.js",
    "config.js",
    "main.js",
)


@dataclass(frozen=True, slots=True)
class Report:
    """A page's data. `index`: JSON values that the page reads first; `blocks`: gzip of JSON by name."""

    index: dict[str, Any]
    blocks: dict[str, bytes]


class Reporter:
    """Collects the data of a page, repeatedly while runs continue.

    `responses`: about how many the page has at most, an equal share of each run. Raises ConfigError for a run
    that is given twice.
    """

    def __init__(self, directories: Sequence[Path], responses: int) -> None:
        self._names = short_names(directories)
        self._directories, self._share = directories, responses // len(directories)
        self._packers = [Packer(directory) for directory in directories]

    def report(self) -> Report:
        """Read the runs. Raises ConfigError for a directory without a run, and for damaged files."""
        runs = [read_run(directory) for directory in self._directories]
        packed = [self._of_run(number, run) for number, run in enumerate(runs)]
        logged = sorted({name for values, _ in packed for name in values["metrics"]})
        index = {
            "made": datetime.now().astimezone().isoformat(timespec="seconds"),
            "runs": [values for values, _ in packed],
            "words": {name: [e.unit, e.meaning] for name in logged if (e := entry(name)) is not None},
            "questions": {title: list(wanted) for title, wanted in QUESTIONS.items()},
            "sections": {title: [metric.name for metric in metrics] for title, metrics in SECTIONS.items()},
            "section_of": {name: _section(name) for name in logged},
        }
        return Report(index, {name: block for _, blocks in packed for name, block in blocks.items()})

    def _of_run(self, number: int, run: Run) -> tuple[dict[str, Any], dict[str, bytes]]:
        table = columns(run.records)
        began_in = run.starts[0].get("directory") if run.starts else None
        pieces = TokenTexts.of_run(run.directory, run.config.get("model.path"), began_in)
        stated = finite_number(run.config.get("eval.right_at"))
        right_at = 1.0 if stated is None else stated
        samples = self._packers[number].pack(pieces, self._share, f"{number}/", right_at)
        intervals = {}
        for metric, column in table["metrics"].items():
            if match := re.fullmatch(r"eval/pass@(\d+)", metric):
                values = {s: v for s, v in zip(table["step"], column, strict=True) if v is not None}
                intervals[metric] = pass_intervals(samples.correct, values, int(match[1]))
        values = {
            **{"name": self._names[number], "directory": str(run.directory)},
            **{"config": run.config, "starts": run.starts, **table, "intervals": intervals},
            "mismatch": run.mismatch,
            "alerts": [alert._asdict() for alert in alerts_of(run.records)],
            **{"responses": len(samples.overview["rows"]["row"]), "has_tokens": pieces is not None},
        }
        return values, {f"{number}/samples": compressed(samples.overview), **samples.blocks}


def page_text(report: Report) -> str:
    """The page with all its data, as HTML that needs nothing else."""
    return html({"index": compressed(report.index), **report.blocks})


def html(blocks: Mapping[str, bytes], connect: bool = False) -> str:
    """The page with these blocks in it. With `connect` it may request other blocks from its server."""
    style = "\n".join(_asset(name) for name in STYLES)
    script = "\n".join(_asset(name) for name in SCRIPTS)
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
    policy += f"connect-src {"'self'" if connect else "'none'"}; base-uri 'none'; form-action 'none'"
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_asset("page.html")).render(
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        blocks={name: base64.b64encode(block).decode() for name, block in blocks.items()},
    )


def compressed(values: Mapping[str, Any]) -> bytes:
    return gzip.compress(json.dumps(values, separators=(",", ":")).encode(), mtime=0)


def _section(name: str) -> str:
    metric = entry(name)
    return next((title for title, metrics in SECTIONS.items() if metric in metrics), "Other metrics")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# The charts that the page shows at once, under questions; every other metric follows by its section.

# A name that ends with * stands for all metrics that begin so, each with a chart of its own.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "Is it learning?": (
        *("reward/mean", "eval/pass@*", "reward/groups_with_signal"),
        *("response/length", "response/truncated", "train/loss"),
    ),
    "Is it stable?": (
        *("response/entropy", "train/entropy", "train/kl", "train/kl_ref"),
        *("mismatch/kl", "mismatch/abs_max", "train/grad_norm"),
    ),
    "What do the conversations do?": ("env/*",),
    "How fast is it?": ("time/step", "throughput/tokens_per_s", "response/staleness_max"),
}

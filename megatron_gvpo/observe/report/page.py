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

from megatron_gvpo.observe.metric_names import SECTIONS, entry
from megatron_gvpo.observe.report.layout import QUESTIONS
from megatron_gvpo.observe.report.pieces import Pieces
from megatron_gvpo.observe.report.run import Run, columns, short_names
from megatron_gvpo.observe.report.samples import pack, pass_intervals, saved

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
RESPONSES = 10_000  # responses of all runs in a report, by default


@dataclass(frozen=True, slots=True)
class Report:
    """A page's data. `index`: JSON values that the page reads first; `blocks`: gzip of JSON by name."""

    index: dict[str, Any]
    blocks: dict[str, bytes]


def report_of(runs: Sequence[Run], responses: int = RESPONSES) -> Report:
    """Collect the data of a page with at most about `responses` responses, an equal share of each run.

    Raises ConfigError for a run that is given twice.
    """
    names = short_names([run.directory for run in runs])
    packed = [
        _run(run, name, i, responses // len(runs))
        for i, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    logged = {name for found, _ in packed for name in found["metrics"]}
    index = {
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "runs": [found for found, _ in packed],
        "words": {name: [e.unit, e.meaning] for name in sorted(logged) if (e := entry(name)) is not None},
        "questions": {title: list(wanted) for title, wanted in QUESTIONS.items()},
        "sections": {title: [metric.name for metric in metrics] for title, metrics in SECTIONS.items()},
        "section_of": {name: _section(name) for name in sorted(logged)},
    }
    return Report(index, {name: block for _, blocks in packed for name, block in blocks.items()})


def write_page(report: Report, file: Path) -> None:
    """Write the page with all its data, as a whole or not at all."""
    blocks = {"index": compressed(report.index), **report.blocks}
    aside = file.with_name(file.name + ".tmp")
    aside.write_text(html(blocks), encoding="utf-8")
    aside.replace(file)


def html(blocks: Mapping[str, bytes], connect: bool = False) -> str:
    """The page with these blocks in it. With `connect` it may ask the server that it came from for others."""
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


def _run(run: Run, name: str, number: int, responses: int) -> tuple[dict[str, Any], dict[str, bytes]]:
    found = columns(run.records)
    began_in = run.starts[0].get("directory") if run.starts else None
    pieces = Pieces.of_run(run.directory, run.config.get("model.path"), began_in)
    samples = pack(saved(run.directory), pieces, responses, prefix=f"{number}/")
    intervals = {}
    for metric, column in found["metrics"].items():
        if match := re.fullmatch(r"eval/pass@(\d+)", metric):
            values = {s: v for s, v in zip(found["step"], column, strict=True) if v is not None}
            intervals[metric] = pass_intervals(samples.correct, values, int(match[1]))
    values = {
        "name": name,
        "directory": str(run.directory),
        "config": run.config,
        "starts": run.starts,
        **found,
        "intervals": intervals,
        "samples": samples.index,
        "has_tokens": pieces is not None,
    }
    return values, samples.blocks


def _section(name: str) -> str:
    found = entry(name)
    return next((title for title, metrics in SECTIONS.items() if found in metrics), "Other metrics")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

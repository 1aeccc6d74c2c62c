"""Draws the results of scaling.py: efficiency over ranks, and the seconds of a step by phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.scaling.point import PHASES, Point
from megatron_gvpo.observe.summary import STYLE

COLOURS = ("#2563c9", "#7aa7e8", "#8b5cf6", "#d3541b", "#f0a35e", "#2e9e6b", "#9aa5b1", "#d9dee4")


def plot(points: list[dict[str, Any]], png: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    modes = list(dict.fromkeys(p["mode"] for p in points))
    with rc_context(STYLE):
        figure = Figure(figsize=(9, 3.2 * len(modes)), layout="constrained")
        panels = figure.subplots(len(modes), 2, squeeze=False)
        for (left, right), mode in zip(panels, modes, strict=True):
            of_mode = [p for p in points if p["mode"] == mode]
            names = [Point(*(p[key] for key in Point._fields)).name.removeprefix(f"{mode}-") for p in of_mode]
            _efficiency(left, of_mode, f"{mode.title()} scaling, efficiency")
            _phases(right, of_mode, names, "Seconds a step")
        bars = panels[0][1].get_legend_handles_labels()
        figure.legend(*bars, loc="outside lower center", fontsize=7, ncols=len(PHASES), frameon=False)
        figure.savefig(png, dpi=160)


def _efficiency(axis: Any, points: list[dict[str, Any]], title: str) -> None:
    for layout in dict.fromkeys(p["layout"] for p in points):
        line = [(p["ranks"], p["efficiency"]) for p in points if p["layout"] == layout]
        label = layout.replace("parallel.", "").replace("sequence_parallel=true", "sp") or "data parallel"
        axis.plot(*zip(*line, strict=True), marker="o", markersize=3.5, label=label)
    axis.set_title(title)
    axis.set_xlabel("ranks")
    axis.set_xticks(sorted({p["ranks"] for p in points}))
    axis.set_ylim(0, 1.05 * max(1.0, *(p["efficiency"] for p in points)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.legend(fontsize=6, frameon=False)


def _phases(axis: Any, points: list[dict[str, Any]], names: list[str], title: str) -> None:
    starts = [0.0] * len(points)
    for phase, colour in zip(PHASES, COLOURS, strict=True):
        widths = [max(0.0, p["seconds"].get(phase, 0.0)) for p in points]
        axis.barh(names, widths, left=starts, color=colour, label=phase)
        starts = [a + b for a, b in zip(starts, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_title(title)
    axis.tick_params(axis="y", labelsize=6)

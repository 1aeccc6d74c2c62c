"""Summaries after a run: the curves of reward and pass@1 as a picture, time and memory as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.json_files import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = tuple[list[int], list[float]]  # steps, values

INK, GREY, LINE, BLUE, ORANGE = "#1f2933", "#616e7c", "#cbd2d9", "#2563c9", "#d3541b"
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LINE,
    "axes.labelcolor": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eceff2",
    "text.color": INK,
    "xtick.color": LINE,
    "xtick.labelcolor": GREY,
    "ytick.color": LINE,
    "ytick.labelcolor": GREY,
}


CURVES = ("reward/mean", "train/loss", "eval/pass@1")


def has_curves(records: Sequence[Mapping[str, Any]]) -> bool:
    """True if these records of metrics.jsonl have a finite value that `plot_curve` draws."""
    return any(record.get(name) is not None for record in records for name in CURVES)


def plot_curve(metrics_jsonl: Path | str, png: Path | str, title: str | None = None) -> None:
    """Draw the mean reward (in a run without rewards: the loss) and pass@1 over the steps, side by side.

    Raises ValueError if the file has none of them.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    records = read_metrics(metrics_jsonl)
    if not has_curves(records):
        raise ValueError(f"{metrics_jsonl}: no reward/mean, train/loss or eval/pass@1 in it to plot")
    reward, loss, passed = (_series(records, name) for name in CURVES)
    training = reward or loss

    with rc_context(STYLE):
        panels = bool(training) + bool(passed)
        figure = Figure(figsize=(3.7 * panels, 2.7), layout="constrained")
        axes = list(figure.subplots(1, panels, squeeze=False)[0])
        if training:
            _draw_training(axes[0], training, "Reward, training mean" if reward else "Loss, training")
        if passed:
            _draw_passed(axes[-1], passed)
        for axis in axes:
            axis.set_xlabel("step")
            axis.xaxis.get_major_locator().set_params(integer=True)
        if title is not None:
            figure.suptitle(title, fontsize=11, fontweight="bold")
        figure.savefig(png, dpi=200)


def time_report(totals: Mapping[str, float], wall: float) -> str:
    """Return a table of the phases' seconds and percent of `wall` seconds, longest first, "other" last."""
    rows = sorted(totals.items(), key=lambda item: -item[1])
    rows += [("other", max(0.0, wall - sum(totals.values()))), ("total", wall)]
    width = max(len(name) for name, _ in rows)
    total = wall or 1.0
    return "\n".join(f"{name:<{width}}  {sec:>9.1f} s  {sec / total:>6.1%}" for name, sec in rows)


def memory_report(metrics: Mapping[str, float]) -> str:
    """Return a table of the metrics memory/*_gib of a run's first step; empty without such metrics."""
    sizes = {n: v for n, v in metrics.items() if n.startswith("memory/") and n.endswith("_gib")}
    rows = [(n.removeprefix("memory/").removesuffix("_gib"), size) for n, size in sizes.items()]
    if not rows:
        return ""
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {1024 * size:>11,.1f} MiB" for name, size in rows]
    return "\n".join(["memory of the first update, on the fullest rank:", *lines])


def smooth(values: Sequence[float], width: float) -> list[float]:
    """Smooth with a Gaussian of `width` points (standard deviation), renormalised at the ends."""
    import numpy as np

    reach = min(math.ceil(3 * width), len(values) - 1)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    full = slice(reach, reach + len(values))
    return list(np.convolve(values, kernel)[full] / np.convolve(np.ones(len(values)), kernel)[full])


def _series(records: Sequence[Mapping[str, Any]], name: str) -> Series | None:
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    return ([step for step, _ in points], [value for _, value in points]) if points else None


def _draw_training(axis: Axes, series: Series, heading: str) -> None:
    steps, values = series
    axis.plot(steps, values, color=BLUE, alpha=0.25, linewidth=0.9)
    axis.plot(steps, smooth(values, max(1.0, len(values) / 40)), color=BLUE, linewidth=1.8)
    axis.set_title(heading)


def _draw_passed(axis: Axes, series: Series) -> None:
    steps, values = series
    axis.plot(steps, values, color=ORANGE, linewidth=1.8, marker="o", markersize=3.5, clip_on=False)
    below, above = (4, -12), (0, 7)
    first, last = (below, above) if values[-1] >= values[0] else (above, below)
    for at, offset, side in ((0, first, "left"), (-1, last, "right")):
        axis.annotate(
            f"{values[at]:.0%}",
            (steps[at], values[at]),
            xytext=offset,
            textcoords="offset points",
            ha=side,
            color=ORANGE,
            fontweight="bold",
        )
    axis.set_ylim(0, min(1.0, 1.25 * max(values) or 1.0))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.set_title("pass@1, held-out problems")

"""Every metric that a run can log, with its unit and meaning: metrics.txt, from which the reference is made.

`<...>` in a name stands for any text between two slashes, such as a reward component's name. A test compares
the table with the names that the code writes and with those of a real run.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib import resources
from typing import NamedTuple


class Metric(NamedTuple):
    name: str
    unit: str
    meaning: str


OF_EVERY_LOSS = "Training, means over the step's updates"  # the trainer adds these to the metrics of a loss


def _sections() -> dict[str, tuple[Metric, ...]]:
    """The table in metrics.txt, by the titles of its sections."""
    sections: dict[str, tuple[Metric, ...]] = {}
    title = ""
    for line in resources.files(__package__).joinpath("metrics.txt").read_text("utf-8").splitlines():
        if line.startswith("# "):
            title = line.removeprefix("# ")
            sections[title] = ()
        elif line:
            sections[title] += (Metric(*line.split(" | ", 2)),)
    return sections


SECTIONS = _sections()


LONGEST = 64  # characters of a user's name for a metric


def check_key(name: str, taken: Collection[str]) -> None:
    """Raises ValueError for a name in a configuration that no metric can have, or that is `taken`."""
    if re.fullmatch(r"[^\W\d][\w.-]*", name) is None or len(name) > LONGEST:
        raise ValueError(
            f"the name {_shown(name)}: expected a letter or _, then letters, digits, _, - and ., at most "
            f"{LONGEST} together"
        )
    check_name(name, taken)


def check_name(name: str, taken: Collection[str]) -> None:
    """Raises ValueError for a user's name of a metric that hides another metric, or fits no table."""
    if not name.isprintable() or not 0 < len(name) <= LONGEST:
        raise ValueError(f"the name {_shown(name)}: expected 1 to {LONGEST} characters that can be printed")
    if name in taken:
        others = ", ".join(sorted({*taken} - {name}))
        raise ValueError(
            f"the name {name!r} is that of another metric, as are {others}: choose one of your own"
        )


def own_names(pattern: str, section: str | None = None) -> frozenset[str]:
    """The words that stand in the package's own metrics where `pattern` ends with `<...>`.

    For `reward/<component>`, `mean` is one of them, because there is a metric `reward/mean`.

    `section`: the section of the table that is searched; default: all.
    """
    beginning = pattern.partition("<")[0]
    sections = SECTIONS.values() if section is None else [SECTIONS[section]]
    names = (metric.name.removeprefix(beginning) for metrics in sections for metric in metrics)
    return frozenset(name for name in names if re.fullmatch(r"\w+", name))


def _shown(name: str) -> str:
    return repr(name if len(name) <= LONGEST else f"{name[:LONGEST]}...")


def entry(name: str) -> Metric | None:
    """The entry of a metric: the entry with exactly this name, else the first whose pattern fits the name."""
    entries = [metric for metrics in SECTIONS.values() for metric in metrics]
    exact = [metric for metric in entries if metric.name == name]
    fitting = [metric for metric in entries if re.fullmatch(_pattern(metric.name), name)]
    return next(iter(exact + fitting), None)


def _pattern(name: str) -> str:
    parts = re.split(r"<[^>]+>", name.replace("device/", "device/<node>"))
    parts = [re.escape(part) for part in parts]
    if name.startswith("device/"):
        return parts[0] + r"(?:node\d+/)?" + r"\d+".join(parts[1:])
    return "[^/]+".join(parts)

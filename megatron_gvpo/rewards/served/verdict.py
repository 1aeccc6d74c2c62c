"""Scores one response of a component on servers, or says why it has none."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """The score of a response by one component; None if none can be had, which `said` explains."""

    score: float | None
    said: str = ""  # a judge's explanation


class Misfit(RuntimeError):  # noqa: N818
    """A server, a model or a response with which the run cannot go on; the message names it."""

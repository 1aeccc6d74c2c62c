"""The lines that `megatron-gvpo verify` prints."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_gvpo.verify.measures import Difference
from megatron_gvpo.verify.sides import Result

_COLUMNS = ("log-probs", "gradients", "norm", "update", "export")


def title() -> str:
    """The line that names the columns."""
    return f"{'layout':<24}" + "".join(f"{name:<12}" for name in _COLUMNS).rstrip()


def row(result: Result) -> str:
    """A layout's line: its differences, and what is wrong."""
    if result.difference is None:
        return f"{result.layout!s:<24}{'refused' if result.refused else 'FAILS'}: {result.failure}"
    found: Difference = result.difference
    line = _line(
        str(result.layout),
        [found.logp, found.gradient, found.norm, found.update],
        "equal" if found.exported is None else "DIFFERS",
    )
    return line if result.problem is None else f"{line}\n  FAILS: {result.problem}"


def verdict(architecture: str, results: Sequence[Result]) -> tuple[str, bool]:
    """The last line, and True if the architecture is equal in every layout that it can have."""
    equal = [result for result in results if result.problem is None]
    wrong = [str(result.layout) for result in results if result.problem is not None and not result.refused]
    if wrong or not equal:
        where = ", ".join(wrong) or "every layout, which Megatron refuses"
        return f"{architecture}: NOT equal to transformers in {where}", False
    refused = len(results) - len(equal)
    beside = f"; {refused} refused" if refused else ""
    limits, layouts = equal[0].limits, "1 layout" if len(equal) == 1 else f"{len(equal)} layouts"
    return (
        f"{architecture}: equal to transformers in {layouts}{beside} (limits: log-probs "
        f"{limits.logp:.0e}, gradients {limits.gradient:.0e}, norm {limits.norm:.0e}, update "
        f"{limits.update:.0e})",
        True,
    )


def _line(name: str, values: Sequence[float], export: str) -> str:
    return f"{name:<24}" + "".join(f"{value:<12.1e}" for value in values) + export

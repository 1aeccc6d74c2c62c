"""Findings of a replay: which number of which step differs from the run's, and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Literal

import torch
from torch import Tensor

from megatron_gvpo.observe.step_records import Sums

# The components of a step in the order in which they are computed.
COMPONENTS = (
    *("rollouts", "template", "rewards", "shapers", "rows", "advantages", "mask"),
    *("start weights", "references", "log-probs", "loss weights", "loss", "gradients"),
    *("learning rate", "gradient norm", "weights"),
)


@dataclass(frozen=True)
class Finding:
    """The outcome of one component; one that `differs` names where, as far as it can."""

    component: str
    step: int
    outcome: Literal["equal", "differs", "not checked"]
    text: str = ""
    response: int | None = None  # its position among all responses of the step
    token: int | None = None
    tensor: str | None = None


class NotPossibleError(Exception):
    """A component cannot be computed again here; the message is the reason."""


@dataclass(frozen=True)
class Tolerances:
    """The largest differences that rounding explains on another machine or in another layout.

    Those of what is computed from recorded numbers alone do not depend on the model's dtype.
    """

    logp: float  # nats
    gradient: float  # of the tensor's norm
    change: float  # of a tensor's weights in an update, as a part of a usual change
    advantage: float = 1e-4  # of the largest advantage
    weight: float = 1e-4  # of the largest weight of a token
    loss: float = 1e-3  # of the loss's terms

    @staticmethod
    def of(dtype: str) -> Tolerances:
        return Tolerances(2e-4, 2e-3, 0.1) if dtype == "float32" else Tolerances(0.25, 0.1, 1.0)


def first_difference(recorded: Tensor, again: Tensor, limit: float) -> int | None:
    """The first index at which two columns differ by more than `limit`; NaN equals NaN."""
    if recorded.shape != again.shape:
        return 0
    differs = ~torch.isclose(recorded.double(), again.double(), rtol=0.0, atol=limit, equal_nan=True)
    return int(differs.nonzero()[0, 0]) if differs.any() else None


def scale_of(*columns: Tensor) -> float:
    """The largest finite magnitude in the columns; 1 if all are 0."""
    largest = [float(c[c.isfinite()].abs().max()) for c in columns if c.isfinite().any()]
    return max(largest, default=0.0) or 1.0


def compare_gradients(recorded: Sums, again: Sums, limit: float) -> tuple[str, str] | None:
    """The tensor whose gradient differs most, and how; None if all are within `limit` of their norms.

    A tensor's gradient may cancel to rounding errors, so that its norm is compared with the largest, too.
    """
    if recorded.keys() != again.keys():
        name = min(recorded.keys() ^ again.keys())
        return name, f"only {'the run' if name in recorded else 'the replay'} trains it"
    floor = 1e-4 * max((values[1] for values in [*recorded.values(), *again.values()]), default=0.0)
    worst = (0.0, "")
    for name, (total, norm, elements) in recorded.items():
        size = max(norm, again[name][1], floor)
        if size:
            spread = size * max(elements, 1.0) ** 0.5
            difference = max(abs(norm - again[name][1]) / size, abs(total - again[name][0]) / spread)
            worst = max(worst, (inf if isnan(difference) else difference, name))
    difference, name = worst
    if difference <= limit:
        return None
    return name, f"norm {recorded[name][1]:.6g} in the run, {again[name][1]:.6g} replayed"


def compare_weights(
    recorded: tuple[Sums, Sums], again: tuple[Sums, Sums], lr: float, limit: float
) -> tuple[str, str] | None:
    """The tensor whose update differs most, and how; None if all are within `limit`.

    Each pair holds the sums before and after the update. Adam changes each of n weights w by about +-lr, so
    that their sum changes by about lr sqrt(n), and the sum of their squares by 2 lr |w|. Differences are
    parts of these. Rounding flips the sign of few changes, where a gradient is rounding error itself.
    """
    worst = (0.0, "", 0.0, 0.0)
    for name in recorded[0]:
        _, size, elements = recorded[0][name]
        totals = [after[name][0] - before[name][0] for before, after in (recorded, again)]
        squares = [after[name][1] ** 2 - before[name][1] ** 2 for before, after in (recorded, again)]
        change = lr * max(elements, 1.0) ** 0.5
        floor = 1e-6 * max(size, 1e-30)  # fp32 rounds a weight by up to 6e-8 of its value
        difference = max(
            abs(totals[0] - totals[1]) / (change + floor),
            abs(squares[0] - squares[1]) / (2 * size * lr + change**2 + floor * size),
        )
        worst = max(worst, (inf if isnan(difference) else difference, name, totals[0], totals[1]))
    difference, name, run, replayed = worst
    if difference <= limit:
        return None
    return name, f"the sum of its elements changed by {run:.4g} in the run, by {replayed:.4g} replayed"


def same_sums(recorded: Sums, again: Sums, limit: float) -> tuple[str, str] | None:
    """The tensor whose weights differ most, and how; None if sums and norms agree to `limit` of the norm."""
    worst = (0.0, "")
    for name in recorded.keys() & again.keys():
        (total, norm, elements), (other, other_norm, _) = recorded[name], again[name]
        size = max(norm, other_norm) or 1.0
        difference = max(
            abs(norm - other_norm) / size, abs(total - other) / (size * max(elements, 1.0) ** 0.5)
        )
        worst = max(worst, (inf if isnan(difference) else difference, name))
    difference, name = worst
    if difference <= limit:
        return None
    return name, f"norm {recorded[name][1]:.9g} in the run, {again[name][1]:.9g} replayed"


def where(position: int, members: Mapping[int, tuple[int, int]] | Sequence[tuple[int, int]]) -> str:
    """A response as texts name it; `members` has its group and its number there, by position."""
    group, member = members[position]
    return f"response {position} (group {group}, member {member})"

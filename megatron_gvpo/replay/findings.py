"""Findings of a replay: which number of which step differs from the run's, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_gvpo.observe.step_records import Sums
from megatron_gvpo.types import TrainBatch

# The components of a step in the order in which they are computed.
COMPONENTS = (
    *("rollouts", "template", "rewards", "shapers", "rows", "advantages", "mask"),
    *("start weights", "references", "log-probs", "loss weights", "loss", "gradients"),
    *("learning rate", "gradient norm", "weights"),
)


@dataclass(frozen=True)
class Finding:
    """The outcome of comparing one component. If it differs, the finding names where, as far as is known."""

    component: str
    step: int
    outcome: Literal["equal", "differs", "not checked"]
    text: str = ""
    response: int | None = None  # its position among all responses of the step
    token: int | None = None
    tensor: str | None = None


class NotPossibleError(Exception):
    """Raised if a component cannot be computed again on this machine; the message is the reason."""


def checked(step: int, checks: Iterable[tuple[str, Callable[[], Finding | None]]]) -> Iterator[Finding]:
    """Run the check of each component and yield its outcome; a check returns None if nothing differs."""
    for component, check in checks:
        try:
            yield check() or Finding(component, step, "equal")
        except NotPossibleError as reason:
            yield Finding(component, step, "not checked", str(reason))


class TensorDifference(NamedTuple):
    """The tensor that differs most, and a text about the difference."""

    tensor: str
    text: str


@dataclass(frozen=True)
class Tolerances:
    """The largest differences that rounding explains on another machine or in another layout.

    The limits with defaults are for numbers that are computed from recorded numbers alone, so they do not
    depend on the model's dtype.
    """

    logp: float  # in nats
    gradient: float  # relative to the tensor's norm
    change: float  # change of a tensor's weights in an update, relative to a usual change
    advantage: float = 1e-4  # relative to the largest advantage
    weight: float = 1e-4  # relative to the largest weight of a token
    loss: float = 1e-3  # relative to the loss's terms

    @staticmethod
    def of(dtype: str) -> Tolerances:
        return Tolerances(2e-4, 2e-3, 0.1) if dtype == "float32" else Tolerances(0.25, 0.1, 1.0)


def first_difference(recorded: Tensor, again: Tensor, limit: float) -> int | None:
    """Return the first index at which two columns differ by more than `limit`, or None; NaN equals NaN."""
    if recorded.shape != again.shape:
        return 0
    differs = ~torch.isclose(recorded.double(), again.double(), rtol=0.0, atol=limit, equal_nan=True)
    return int(differs.nonzero()[0, 0]) if differs.any() else None


def scale_of(*columns: Tensor) -> float:
    """Return the largest finite absolute value in the columns, or 1 if all are 0."""
    largest = [float(c[c.isfinite()].abs().max()) for c in columns if c.isfinite().any()]
    return max(largest, default=0.0) or 1.0


def compare_gradients(recorded: Sums, again: Sums, limit: float) -> TensorDifference | None:
    """Return the tensor whose gradients differ most; None if all differ by at most `limit` of their norms.

    A tensor's gradient may cancel to rounding errors only. So a norm below 1e-4 of the largest tensor's norm
    counts as 1e-4 of it.
    """
    if recorded.keys() != again.keys():
        name = min(recorded.keys() ^ again.keys())
        return TensorDifference(name, f"only {'the run' if name in recorded else 'the replay'} trains it")
    floor = 1e-4 * max((values[1] for values in [*recorded.values(), *again.values()]), default=0.0)
    differences = {}
    for name, (total, norm, elements) in recorded.items():
        size = max(norm, again[name][1], floor)
        if size:
            spread = size * max(elements, 1.0) ** 0.5
            differences[name] = max(abs(norm - again[name][1]) / size, abs(total - again[name][0]) / spread)
    return _worst(
        differences, limit, lambda n: f"norm {recorded[n][1]:.6g} in the run, {again[n][1]:.6g} replayed"
    )


def compare_weights(
    recorded: tuple[Sums, Sums], again: tuple[Sums, Sums], lr: float, limit: float
) -> TensorDifference | None:
    """Return the tensor whose update differs most; None if all differ by at most `limit`.

    Each pair has the sums before and after the update. Adam changes each of n weights w by about +-lr, so
    their sum changes by about lr sqrt(n), and the sum of their squares by 2 lr |w|. The differences are
    divided by these usual changes. Rounding flips the sign of a few changes, where the gradient is itself a
    rounding error.
    """

    def changes(name: str) -> list[float]:
        return [after[name][0] - before[name][0] for before, after in (recorded, again)]

    differences = {}
    for name, (_, size, elements) in recorded[0].items():
        run, replayed = changes(name)
        squares = [after[name][1] ** 2 - before[name][1] ** 2 for before, after in (recorded, again)]
        change = lr * max(elements, 1.0) ** 0.5
        floor = 1e-6 * max(size, 1e-30)  # fp32 rounds a weight by up to 6e-8 of its value
        differences[name] = max(
            abs(run - replayed) / (change + floor),
            abs(squares[0] - squares[1]) / (2 * size * lr + change**2 + floor * size),
        )
    text = "the sum of its elements changed by {:.4g} in the run, by {:.4g} replayed"
    return _worst(differences, limit, lambda name: text.format(*changes(name)))


def same_sums(recorded: Sums, again: Sums, limit: float) -> TensorDifference | None:
    """Return the tensor whose weights differ most; None if sums and norms agree to `limit` of the norm."""
    differences = {}
    for name in recorded.keys() & again.keys():
        (total, norm, elements), (other, other_norm, _) = recorded[name], again[name]
        size = max(norm, other_norm) or 1.0
        differences[name] = max(
            abs(norm - other_norm) / size, abs(total - other) / (size * max(elements, 1.0) ** 0.5)
        )
    return _worst(
        differences, limit, lambda n: f"norm {recorded[n][1]:.9g} in the run, {again[n][1]:.9g} replayed"
    )


def _worst(
    differences: Mapping[str, float], limit: float, text: Callable[[str], str]
) -> TensorDifference | None:
    """Return the tensor with the largest difference, described by `text`; None if all are within `limit`."""
    sizes = [(inf if isnan(difference) else difference, name) for name, difference in differences.items()]
    size, name = max(sizes, default=(0.0, ""))
    return None if size <= limit else TensorDifference(name, text(name))


def where(position: int, members: Mapping[int, tuple[int, int]] | Sequence[tuple[int, int]]) -> str:
    """Return the name of a response for messages; `members` has its group and its number in the group."""
    group, member = members[position]
    return f"response {position} (group {group}, member {member})"


def first_other[Value](one: Sequence[Value], other: Sequence[Value]) -> int | None:
    """Return the first index at which two sequences differ; None if one is the beginning of the other."""
    return next((t for t, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)


def positions_of(rows: TrainBatch) -> list[int]:
    """Return the position of each row among all responses of the step."""
    assert rows.place_n is not None, "the trainer numbers the rows of a step"
    positions: list[int] = rows.place_n.tolist()
    return positions


def located(rows: TrainBatch, column: str, index: int) -> tuple[int, int | None]:
    """Return the response and the token that an index into a column belongs to."""
    if column.endswith("_n"):
        return positions_of(rows)[index], None
    row = int(rows.seq_r[index])
    return positions_of(rows)[row], index - rows.offsets[row]

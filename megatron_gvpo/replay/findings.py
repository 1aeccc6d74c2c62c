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


def checked(step: int, checks: Iterable[tuple[str, Callable[[], Finding | None]]]) -> Iterator[Finding]:
    """The outcomes of components, each with its check, which returns None where it finds no difference."""
    for component, check in checks:
        try:
            yield check() or Finding(component, step, "equal")
        except NotPossibleError as reason:
            yield Finding(component, step, "not checked", str(reason))


class TensorDifference(NamedTuple):
    """The tensor that differs most, and how."""

    tensor: str
    text: str


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


def compare_gradients(recorded: Sums, again: Sums, limit: float) -> TensorDifference | None:
    """The difference of the gradients; None if all are within `limit` of their norms.

    A tensor's gradient may cancel to rounding errors, so that its norm is compared with the largest, too.
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
    """The difference of the updates; None if all are within `limit`.

    Each pair holds the sums before and after the update. Adam changes each of n weights w by about +-lr, so
    that their sum changes by about lr sqrt(n), and the sum of their squares by 2 lr |w|. Differences are
    parts of these. Rounding flips the sign of few changes, where a gradient is rounding error itself.
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
    """The difference of the weights; None if sums and norms agree to `limit` of the norm."""
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
    """The largest of the tensors' differences in `text`'s words; None if all are within `limit`."""
    sizes = [(inf if isnan(difference) else difference, name) for name, difference in differences.items()]
    size, name = max(sizes, default=(0.0, ""))
    return None if size <= limit else TensorDifference(name, text(name))


def where(position: int, members: Mapping[int, tuple[int, int]] | Sequence[tuple[int, int]]) -> str:
    """A response as texts name it; `members` has its group and its number there, by position."""
    group, member = members[position]
    return f"response {position} (group {group}, member {member})"


def first_other[Value](one: Sequence[Value], other: Sequence[Value]) -> int | None:
    """The index of the first value that is not equal in both; None if the shorter one begins the longer."""
    return next((t for t, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)


def positions_of(rows: TrainBatch) -> list[int]:
    """The rows' positions among all responses of the step."""
    assert rows.place_n is not None, "the trainer numbers the rows of a step"
    positions: list[int] = rows.place_n.tolist()
    return positions


def located(rows: TrainBatch, column: str, index: int) -> tuple[int, int | None]:
    """The position of the response, and its token, of an index of a column."""
    if column.endswith("_n"):
        return positions_of(rows)[index], None
    row = int(rows.seq_r[index])
    return positions_of(rows)[row], index - rows.offsets[row]

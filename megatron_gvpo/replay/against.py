"""Finds the first step, and the first number in it, at which two recorded runs differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.observe.step_records import StepRecord, UpdateRecord, read, recorded_steps
from megatron_gvpo.replay.findings import (
    Finding,
    TensorDifference,
    Tolerances,
    compare_gradients,
    compare_weights,
    first_difference,
    first_other,
    located,
    positions_of,
    same_sums,
    scale_of,
)
from megatron_gvpo.types import TrainBatch


class Differs(Protocol):
    """A function that makes the finding of a difference, which may name a response and a token."""

    def __call__(
        self, component: str, text: str, position: int | None = None, token: int | None = None
    ) -> Finding: ...


class Parting(NamedTuple):
    """The steps that both runs recorded, and the first difference, or None if the runs agree."""

    steps: list[int]
    finding: Finding | None


def first_parting(one: Path, other: Path, limits: Tolerances) -> Parting:
    """Compare the records of two runs step by step. Raises DataError where no step is recorded in both."""
    steps = sorted({*recorded_steps(one)} & {*recorded_steps(other)})
    if not steps:
        raise DataError(f"{one} and {other} have no recorded step in common (logging.steps)")
    for step in steps:
        for finding in _compare(read(one, step), read(other, step), limits):
            return Parting(steps, finding)
    return Parting(steps, None)


def _compare(one: StepRecord, other: StepRecord, limits: Tolerances) -> Iterator[Finding]:
    """Yield the differences of two records of a step, in the order in which a step computes the numbers."""

    def differs(component: str, text: str, position: int | None = None, token: int | None = None) -> Finding:
        at = "" if position is None else f"response {position}"
        at += "" if token is None else f", token {token}"
        return Finding(component, one.step, "differs", f"{at}: {text}" if at else text, position, token)

    dtype_limit = 1e-5 if limits.logp < 0.01 else 1e-3
    yield from _of_tensor("start weights", one.step, same_sums(one.weights, other.weights, dtype_limit))
    for rows, others in zip(one.mini_batches, other.mini_batches, strict=False):
        yield from _compare_tokens(rows, others, differs)
    sizes = [sum(map(len, record.mini_batches)) for record in (one, other)]
    if sizes[0] != sizes[1]:
        yield differs("rollouts", f"{sizes[0]} responses in one run, {sizes[1]} in the other")
        return
    for rows, others in zip(one.mini_batches, other.mini_batches, strict=True):
        for component, name, limit in (
            ("rollouts", "engine_logp_r", limits.logp),
            ("rows", "reward_n", 1e-5),
            ("rows", "truncated_n", 0.5),
            ("rows", "trained_n", 0.5),
            ("advantages", "advantage_n", limits.advantage),
            ("advantages", "advantage_r", limits.advantage),
        ):
            yield from _compare_column(component, name, rows, others, limit, differs)
    for update, second in zip(one.updates, other.updates, strict=False):
        yield from _compare_updates(update, second, one, limits, differs)
    if len(one.updates) != len(other.updates):
        yield differs("mask", f"{len(one.updates)} updates in one run, {len(other.updates)} in the other")


def _compare_tokens(rows: TrainBatch, others: TrainBatch, differs: Differs) -> Iterator[Finding]:
    for i, position in enumerate(positions_of(rows)[: len(others)]):
        for name in ("prompt_ids", "response_ids"):
            pair = list(getattr(rows, name)[i]), list(getattr(others, name)[i])
            if pair[0] != pair[1]:
                yield differs("rollouts", f"the runs have other {name}", position, first_other(*pair))


def _compare_column(
    component: str, name: str, rows: TrainBatch, others: TrainBatch, limit: float, differs: Differs
) -> Iterator[Finding]:
    pair: list[Tensor | None] = [getattr(rows, name), getattr(others, name)]
    if pair[0] is None or pair[1] is None:
        if pair[0] is not pair[1]:
            yield differs(component, f"{name} is in one run alone")
        return
    values = [column.double() for column in pair if column is not None]
    index = first_difference(values[0], values[1], limit * max(1.0, scale_of(*values)))
    if index is not None:
        text = f"{name}: {values[0][index]:.6g} in one run, {values[1][index]:.6g} in the other"
        yield differs(component, text, *located(rows, name, index))


def _compare_updates(
    one: UpdateRecord, other: UpdateRecord, record: StepRecord, limits: Tolerances, differs: Differs
) -> Iterator[Finding]:
    if one.place_n.tolist() != other.place_n.tolist():
        unequal = sorted(set(one.place_n.tolist()) ^ set(other.place_n.tolist()))
        yield differs("mask", "trained in one run alone", unequal[0] if unequal else None)
        return
    for component, name, limit in (
        ("references", "old_logp_r", limits.logp),
        ("references", "ref_logp_r", limits.logp),
        ("log-probs", "logp_r", limits.logp),
        ("loss weights", "weight_r", limits.gradient),
    ):
        columns: list[Tensor] = [
            column for column in (getattr(one, name), getattr(other, name)) if column is not None
        ]
        if len(columns) == 1:
            yield differs(component, f"{name} is in one run alone")
        scale = scale_of(*columns) if name == "weight_r" else 1.0
        index = first_difference(columns[0], columns[1], limit * scale) if len(columns) == 2 else None
        if index is not None:
            position, token = _token(one, record, index)
            text = f"{name}: {columns[0][index]:.6g} in one run, {columns[1][index]:.6g} in the other"
            yield differs(component, text, position, token)
    loss = one.metrics["loss"], other.metrics["loss"]
    if abs(loss[0] - loss[1]) > max(limits.loss, limits.logp) * max(1.0, abs(loss[0])):
        yield differs("loss", f"{loss[0]:.6g} in one run, {loss[1]:.6g} in the other")
    difference = compare_gradients(one.gradients, other.gradients, limits.gradient)
    yield from _of_tensor("gradients", record.step, difference)
    if abs(one.lr - other.lr) > 1e-6 * max(one.lr, other.lr):
        yield differs("learning rate", f"{one.lr:.6g} in one run, {other.lr:.6g} in the other")
    before = record.weights
    difference = compare_weights((before, one.weights), (before, other.weights), one.lr, limits.change)
    yield from _of_tensor("weights", record.step, difference)


def _of_tensor(component: str, step: int, difference: TensorDifference | None) -> Iterator[Finding]:
    if difference is not None:
        text = f"{difference.tensor}: {difference.text}"
        yield Finding(component, step, "differs", text, tensor=difference.tensor)


def _token(update: UpdateRecord, record: StepRecord, index: int) -> tuple[int | None, int | None]:
    """Return the response and the token that an index into an update's columns belongs to."""
    lengths = {
        position: int(length)
        for rows in record.mini_batches
        for position, length in zip(positions_of(rows), rows.length_n.tolist(), strict=True)
    }
    for position in update.place_n.tolist():
        if index < lengths[position]:
            return position, index
        index -= lengths[position]
    return None, None

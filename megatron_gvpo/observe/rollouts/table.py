"""Builds the table of a step's responses, or of an evaluation's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from megatron_gvpo.core.redaction import hide_credentials, hide_in
from megatron_gvpo.data.image_files import shown
from megatron_gvpo.groups import Group, Prompt, Rollout, utf8
from megatron_gvpo.observe.rollouts import conversation
from megatron_gvpo.observe.rollouts.schema import Kind, schema

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_gvpo.types import TrainBatch


@dataclass(frozen=True)
class TrainedRows:
    """The rows of an optimizer update, with the trainer's numbers of their tokens, fp32 [r] on the CPU."""

    rows: TrainBatch
    logp_r: Tensor | None
    weight_r: Tensor | None  # dL/dlogp


@dataclass(frozen=True)
class Responses:
    """All responses of a training step, or of the evaluation after it.

    `trained` has the updates of a training step's first pass; their `rows.place_n` are places in the list of
    all responses.
    """

    kind: Kind
    step: int
    groups: Sequence[Group]
    trained: Sequence[TrainedRows] = ()
    spoken: Sequence[list[str] | None] = ()  # the texts of each response's turns; empty until `with_texts`

    def with_texts(self, decode: Callable[..., str]) -> Responses:
        """These responses, with texts for those without, such as demonstrations, and all turns' texts."""

        def with_text(rollout: Rollout) -> Rollout:
            if rollout.text:
                return rollout
            return replace(rollout, text=decode(rollout.token_ids, skip_special_tokens=True))

        groups = [
            replace(group, rollouts=[with_text(rollout) for rollout in group.rollouts])
            if any(not rollout.text for rollout in group.rollouts)
            else group
            for group in self.groups
        ]
        spoken = [conversation.spoken(rollout, decode) for group in groups for rollout in group.rollouts]
        return replace(self, groups=groups, spoken=spoken)


class _Member(NamedTuple):
    """A response, its group, and its place in the step."""

    row: int  # among all responses of the step
    group: int
    member: int
    prompt: Prompt
    rollout: Rollout


_MESSAGES = ("reward_errors", "explanations")  # columns of texts that are not in the data
_DIALOGUE = ("prompt", "response", "turns", "messages")  # columns of the texts that the token ids stand for


def table(responses: Responses, components: Sequence[str], groups: int | None = None) -> pa.Table:
    """The table with the columns of `schema(components)`, of all groups or of `groups`, evenly spread.

    No text in the table has a secret. If a row's dialogue had one, the row has no token ids.
    """
    members = list(_members(responses.groups, groups))
    rollouts = [member.rollout for member in members]
    trained = _trained(responses.trained)
    numbers_of_rows = [trained.get(member.row, _Numbers()) for member in members]
    columns: dict[str, list[Any]] = {
        "step": [responses.step] * len(members),
        "kind": [responses.kind] * len(members),
        "group": [member.group for member in members],
        "member": [member.member for member in members],
        "prompt_id": [utf8(member.prompt.id) for member in members],
        "prompt": [utf8(member.prompt.text) for member in members],
        "prompt_ids": [member.prompt.token_ids for member in members],
        "response": [utf8(rollout.text) for rollout in rollouts],
        "response_ids": [rollout.token_ids for rollout in rollouts],
        "reward": [rollout.reward for rollout in rollouts],
        "rewards": [_fields(rollout.rewards, components) for rollout in rollouts],
        "reward_errors": [_fields(_utf8_values(rollout.reward_errors), components) for rollout in rollouts],
        "explanations": [_fields(_utf8_values(rollout.explanations), components) for rollout in rollouts],
        "advantage": [_mean(numbers.advantages) for numbers in numbers_of_rows],
        "advantages": [_unless_equal(numbers.advantages) for numbers in numbers_of_rows],
        "weight": [_mean(numbers.weights) for numbers in numbers_of_rows],
        "weights": [_unless_equal(numbers.weights) for numbers in numbers_of_rows],
        "source": [rollout.source for rollout in rollouts],
        "version_first": [_version(rollout, 0) for rollout in rollouts],
        "version_last": [_version(rollout, -1) for rollout in rollouts],
        "rollout_logprobs": [rollout.logprobs or None for rollout in rollouts],
        "trainer_logprobs": [numbers.logprobs for numbers in numbers_of_rows],
        "finish_reason": [rollout.finish_reason for rollout in rollouts],
        "images": [[shown(image.source) for image in member.prompt.images] for member in members],
        "prompt_tokens": [len(member.prompt.token_ids) for member in members],
        "response_tokens": [len(rollout.token_ids) for rollout in rollouts],
        "seconds": [rollout.seconds for rollout in rollouts],
        "server": [rollout.server for rollout in rollouts],
        "turns": [
            conversation.turns(member.rollout, responses.spoken[member.row] if responses.spoken else None)
            for member in members
        ],
        "messages": [conversation.messages(rollout) for rollout in rollouts],
    }
    types = schema(components)
    return pa.Table.from_pydict(_without_secrets(columns, types), schema=types)


def _without_secrets(columns: dict[str, list[Any]], types: pa.Schema) -> dict[str, list[Any]]:
    hidden = {
        name: hide_in(values) if _has_text(types.field(name).type) else values
        for name, values in columns.items()
    }
    for name in _MESSAGES:
        hidden[name] = [
            row and {component: text and hide_credentials(text) for component, text in row.items()}
            for row in hidden[name]
        ]
    for row in range(len(columns["step"])):
        if any(hidden[name][row] != columns[name][row] for name in _DIALOGUE):
            hidden["prompt_ids"][row] = hidden["response_ids"][row] = None
            for turn in hidden["turns"][row] or ():
                turn["given_ids"] = None
    return hidden


def _has_text(type_: pa.DataType) -> bool:
    """True for texts, and lists and structs of them."""
    if pa.types.is_nested(type_):
        return any(_has_text(type_.field(i).type) for i in range(type_.num_fields))
    return bool(pa.types.is_string(type_))


class _Numbers(NamedTuple):
    """The trainer's numbers of one response, a value for each token; None if it has none."""

    logprobs: np.ndarray | None = None
    advantages: np.ndarray | None = None
    weights: np.ndarray | None = None


def _trained(updates: Sequence[TrainedRows]) -> dict[int, _Numbers]:
    """The numbers of the rows of all updates, by the response's place in the step."""
    numbers: dict[int, _Numbers] = {}
    for update in updates:
        rows = update.rows
        assert rows.place_n is not None, "the trainer numbers the rows of a step"
        has_advantages = rows.advantage_n is not None or rows.advantage_r is not None
        columns = (update.logp_r, rows.token_advantages() if has_advantages else None, update.weight_r)
        arrays = [None if column is None else column.numpy() for column in columns]
        for i, index in enumerate(rows.place_n.tolist()):
            begin, end = rows.offsets[i : i + 2]
            numbers[index] = _Numbers(*(None if array is None else array[begin:end] for array in arrays))
    return numbers


def _members(groups: Sequence[Group], limit: int | None) -> Iterator[_Member]:
    """The responses of at most `limit` groups, which are evenly spread over all."""
    count = len(groups) if limit is None else min(limit, len(groups))
    chosen = {i * len(groups) // count for i in range(count)}
    row = 0
    for g, group in enumerate(groups):
        for member, rollout in enumerate(group.rollouts):
            if g in chosen:
                yield _Member(row, g, member, group.prompt, rollout)
            row += 1


def _fields(values: dict[str, Any], components: Sequence[str]) -> dict[str, Any] | None:
    return {name: values.get(name) for name in components} if components else None


def _utf8_values(texts: dict[str, str]) -> dict[str, str]:
    return {name: utf8(text) for name, text in texts.items()}


def _mean(values: np.ndarray | None) -> float | None:
    if values is None or not len(values):
        return None
    return float(values[0]) if _are_equal(values) else float(values.mean(dtype=np.float64))


def _unless_equal(values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None or not len(values) or _are_equal(values) else values


def _are_equal(values: np.ndarray) -> bool:
    return bool((values == values[0]).all())


def _version(rollout: Rollout, end: int) -> int | None:
    """The weight version of the first (0) or last (-1) token; None if this run's engine sampled none."""
    version = rollout.spans[end][0] if rollout.spans else rollout.weight_version
    return None if version < 0 else version

"""The data of the pipeline: prompts -> groups of rollouts -> training batch -> loss inputs.

Shape suffixes used everywhere: n sequences, r response tokens (all sequences', concatenated in row
order), t packed tokens (prompts too), h hidden, v vocabulary shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.groups import Group as Group
from megatron_gvpo.groups import Image
from megatron_gvpo.groups import Prompt as Prompt
from megatron_gvpo.groups import Rollout as Rollout
from megatron_gvpo.groups import Routing as Routing
from megatron_gvpo.groups import Scored as Scored
from megatron_gvpo.supports import Support
from megatron_gvpo.turns import Segment, Turn, ends_of, segments

if TYPE_CHECKING:
    from torch import Tensor

# Columns that depend on lengths and groups alone.
_DERIVED = ("length_n", "offsets", "seq_r", "groups")


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor.to(device)`; a copy to a GPU goes from pinned memory, so that the host does not wait for it."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass
class TrainBatch:
    """A training batch: n sequences (rows) with per-sequence [n] and per-response-token [r] columns.

    Token columns are flat: row i owns positions `offsets[i]:offsets[i+1]`. All float columns are
    fp32. Columns that a method does not need stay None.
    """

    prompt_ids: list[Sequence[int]]
    response_ids: list[Sequence[int]]
    group_n: Tensor  # int64: rows of one prompt share a number
    reward_n: Tensor
    truncated_n: Tensor  # bool: the response hit the token limit
    advantage_n: Tensor | None = None
    advantage_r: Tensor | None = None  # set if tokens of one response have different advantages
    prior_n: Tensor | None = None  # the expected reward of the prompt; NaN where it is not known
    trained_n: Tensor | None = None  # bool; rows that are not trained count in group statistics only
    demonstration_n: Tensor | None = None  # bool: a given solution, not sampled from any policy
    component_n: dict[str, Tensor] = field(default_factory=dict)  # the reward's components, fp32
    old_logp_r: Tensor | None = None  # the policy at step start, by the trainer
    ref_logp_r: Tensor | None = None  # the method's reference policy, by the trainer or the engine
    engine_logp_r: Tensor | None = None  # the policy that sampled, by the engine; NaN where no engine did
    version_r: Tensor | None = None  # int64: the weight version that sampled the token
    value_r: Tensor | None = None  # the critic's value before the token and before the step's updates
    return_r: Tensor | None = None  # the critic's targets
    place_n: Tensor | None = None  # int64: the row's number among all responses of the step
    group_tokens_n: Tensor | None = None  # int64: response tokens of the row's whole group in the update
    item_r: Tensor | None = None  # int64: number of the item of its response that the token belongs to
    # The part of `reward_n` that rewards a turn, at the turn's last token; else 0.
    turn_reward_r: Tensor | None = None
    weight_r: Tensor | None = None  # dL/dlogp, if known before the forward
    # int64: the tokens whose log-probs are computed, if these are not the response's own.
    label_r: Tensor | None = None
    # The teacher's last hidden states of a micro-batch's tokens on this rank, [tokens, h] in its own dtype.
    teacher_rh: Tensor | None = None
    routing: list[Routing | None] | None = None  # the experts through which each row's tokens are sent
    # the supports of each row's tokens; None: the whole vocabulary
    support: list[Support | None] | None = None
    turns: list[Sequence[Turn]] | None = None  # a row without turns is a single response
    images: list[tuple[Image, ...]] | None = None  # images of the prompts, in the order of their tokens
    # The numbers of sequences, and of response tokens in them, that `trained` has left out.
    left_out: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.response_ids)

    def segments(self, row: int) -> list[Segment]:
        """The sequences of tokens that hold the row's own tokens, each after its context."""
        return segments(self.prompt_ids[row], self.response_ids[row], self.turns[row] if self.turns else ())

    @cached_property
    def tokens(self) -> list[int]:
        """Tokens of every row's sequences, prompt and environment's tokens included; n numbers."""
        return [sum(len(segment.ids) for segment in self.segments(i)) for i in range(len(self))]

    @cached_property
    def length_n(self) -> Tensor:
        """Response lengths in tokens, int64 [n]."""
        lengths = [len(ids) for ids in self.response_ids]
        return torch.tensor(lengths, dtype=torch.int64, device=self.group_n.device)

    @cached_property
    def offsets(self) -> list[int]:
        """Row boundaries in the flat token columns, n + 1 numbers."""
        return [0, *torch.cumsum(self.length_n, 0).tolist()]

    @cached_property
    def seq_r(self) -> Tensor:
        """Row index of every response token, int64 [r]."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.group_n.device), self.length_n)

    @cached_property
    def turn_r(self) -> Tensor:
        """The turn of its conversation that every response token belongs to, from 0; int64 [r]."""
        column: list[int] = []
        for i, ids in enumerate(self.response_ids):
            turns = (self.turns[i] if self.turns else ()) or (Turn(0),)
            for number, (turn, end) in enumerate(zip(turns, ends_of(turns, len(ids)), strict=True)):
                column += [number] * (end - turn.begin)
        return on_device(torch.tensor(column, dtype=torch.int64), self.group_n.device)

    @cached_property
    def groups(self) -> tuple[Tensor, Tensor]:
        """(dense group index [n], group sizes [g]) of the batch."""
        _, index_n, size_g = torch.unique(self.group_n, return_inverse=True, return_counts=True)
        return index_n, size_g

    @property
    def rows_of_groups(self) -> list[list[int]]:
        """The rows of every group, in their order.

        One index is copied to the host. A mask for each group would have a size that only the GPU knows, and
        the host would wait for each of them.
        """
        index_n, size_g = self.groups
        rows: list[list[int]] = [[] for _ in range(len(size_g))]
        for row, g in enumerate(index_n.tolist()):
            rows[g].append(row)
        return rows

    def with_group_tokens(self) -> TrainBatch:
        """The same rows, which are whole groups, with `group_tokens_n`."""
        index_n, size_g = self.groups
        tokens_g = torch.zeros_like(size_g).index_add(0, index_n, self.length_n)
        return self.with_columns(group_tokens_n=tokens_g[index_n])

    def group_mean(self, value_n: Tensor) -> Tensor:
        """Mean of a per-sequence value over its group, broadcast back to [n]."""
        index_n, size_g = self.groups
        sum_g = value_n.new_zeros(len(size_g)).index_add(0, index_n, value_n)
        return (sum_g / size_g)[index_n]

    def sequence_sum(self, value_r: Tensor) -> Tensor:
        """Segment sum of a per-token value over each sequence, [r] -> [n]."""
        return value_r.new_zeros(len(self)).index_add(0, self.seq_r, value_r)

    def sequence_mean(self, value_r: Tensor) -> Tensor:
        """Mean of a per-token value over each sequence, [r] -> [n]."""
        return self.sequence_sum(value_r) / self.length_n.clamp(min=1)

    def token_advantages(self) -> Tensor:
        """The advantage of every response token, [r]: its own, or its response's."""
        if self.advantage_r is not None:
            return self.advantage_r
        assert self.advantage_n is not None, "this loss needs advantages (Loss.signal)"
        return self.advantage_n[self.seq_r]

    def trained(self) -> TrainBatch:
        """The rows that have a gradient; `left_out` counts the rows and tokens of the others."""
        if self.trained_n is None or bool(self.trained_n.all()):
            return self
        rows = self.select(self.trained_n.nonzero().flatten().tolist())
        return replace(rows, left_out=(len(self) - len(rows), self.offsets[-1] - rows.offsets[-1]))

    def sampled_by(self, version: int) -> Tensor:
        """True for tokens that the weights of `version` sampled, or that have no known version; bool [r]."""
        if self.version_r is None:
            return torch.ones_like(self.seq_r, dtype=torch.bool)
        return self.version_r == version

    def select(self, index: Sequence[int]) -> TrainBatch:
        """The rows at `index`, in that order, with all their columns."""
        row = torch.as_tensor(list(index), dtype=torch.int64)
        spans = [torch.arange(self.offsets[i], self.offsets[i + 1]) for i in index]
        token = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

        def pick(name: str) -> Any:
            column = getattr(self, name)
            if column is None:
                return None
            if isinstance(column, list):
                return [column[i] for i in index]
            if isinstance(column, dict):
                return {key: value[row] for key, value in column.items()}
            return column[token] if name.endswith("_r") else column[row]

        columns = {f.name: pick(f.name) for f in fields(self) if f.name != "left_out"}
        return TrainBatch(**columns, left_out=self.left_out)

    def to(self, device: torch.device) -> TrainBatch:
        """The same batch with its tensor columns on `device`; token ids stay on the host."""
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            name: on_device(value, device) if isinstance(value, torch.Tensor) else value
            for name, value in columns.items()
        }
        moved["component_n"] = {key: on_device(value, device) for key, value in self.component_n.items()}
        rows = TrainBatch(**moved)
        # Group sizes are computed on the CPU; on a GPU the host would wait for them.
        if self.group_n.device != device:
            derived: dict[str, Any] = {
                "offsets": self.offsets,
                "groups": tuple(on_device(t, device) for t in self.groups),
            }
            derived |= {name: on_device(getattr(self, name), device) for name in ("length_n", "seq_r")}
            rows.__dict__.update(derived)
        return rows

    def with_columns(self, **columns: Tensor | None) -> TrainBatch:
        changes: dict[str, Any] = dict(columns)
        rows = replace(self, **changes)
        if "group_n" not in columns:
            rows.__dict__.update({name: self.__dict__[name] for name in _DERIVED if name in self.__dict__})
        return rows

    @staticmethod
    def from_groups(groups: Sequence[Group], first: int = 0, turn_weight: float = 0.0) -> TrainBatch:
        """The batch of all rollouts, in order; `first` is the index of the first one in the step.

        `turn_weight`: the weight in a conversation's reward of the sum of its turns' rewards. Raises
        ValueError for log-probs, experts or supports that do not match their tokens.
        """
        rollouts = [(g, rollout) for g, group in enumerate(groups) for rollout in group.rollouts]
        names = sorted({name for _, rollout in rollouts for name in rollout.rewards})
        priors = [groups[g].prior for g, _ in rollouts]
        return TrainBatch(
            prompt_ids=[groups[g].prompt.token_ids for g, _ in rollouts],
            response_ids=[rollout.token_ids for _, rollout in rollouts],
            group_n=torch.tensor([g for g, _ in rollouts], dtype=torch.int64),
            reward_n=torch.tensor([rollout.reward for _, rollout in rollouts], dtype=torch.float32),
            truncated_n=torch.tensor([rollout.finish_reason == "length" for _, rollout in rollouts]),
            engine_logp_r=_engine_logp([rollout for _, rollout in rollouts]),
            version_r=torch.tensor([v for _, r in rollouts for v in _versions(r)], dtype=torch.int64),
            place_n=torch.arange(first, first + len(rollouts)),
            turn_reward_r=_turn_rewards([rollout for _, rollout in rollouts], turn_weight),
            prior_n=None
            if set(priors) <= {None}
            else torch.tensor([math.nan if p is None else p for p in priors], dtype=torch.float32),
            trained_n=torch.tensor([rollout.trained for _, rollout in rollouts], dtype=torch.bool),
            demonstration_n=torch.tensor(
                [r.source == "demonstration" for _, r in rollouts], dtype=torch.bool
            ),
            routing=_routing([(groups[g].prompt, rollout) for g, rollout in rollouts]),
            support=_supports([rollout for _, rollout in rollouts]),
            turns=[r.turns for _, r in rollouts] if any(r.turns for _, r in rollouts) else None,
            images=[groups[g].prompt.images for g, _ in rollouts]
            if any(group.prompt.images for group in groups)
            else None,
            component_n={
                name: torch.tensor([r.rewards.get(name, 0.0) for _, r in rollouts], dtype=torch.float32)
                for name in names
            },
        )


def _versions(rollout: Rollout) -> list[int]:
    """The weight version that sampled each token."""
    versions = [rollout.weight_version] * len(rollout.token_ids)
    for version, first, end in rollout.spans:
        versions[first:end] = [version] * (end - first)
    return versions


def _turn_rewards(rollouts: Sequence[Rollout], weight: float) -> Tensor | None:
    """`weight` times the reward of each turn, at its last token; None if no turn has a reward."""
    column: list[float] = []
    for rollout in rollouts:
        paid = [0.0] * len(rollout.token_ids)
        for turn, end in zip(rollout.turns, ends_of(rollout.turns, len(paid)), strict=False):
            if paid:  # the reward of a turn without tokens is at the token before it
                paid[max(end, 1) - 1] += weight * (turn.reward or 0.0)
        column += paid
    return torch.tensor(column, dtype=torch.float32) if any(column) else None


def _routing(rollouts: Sequence[tuple[Prompt, Rollout]]) -> list[Routing | None] | None:
    """The experts of each response's tokens; None if no response has any."""
    if all(rollout.routing is None for _, rollout in rollouts):
        return None
    routings = [None if r.routing is None else Routing(*r.routing) for _, r in rollouts]
    for i, ((prompt, rollout), routing) in enumerate(zip(rollouts, routings, strict=True)):
        if routing is None:
            continue
        if rollout.turns:
            raise ValueError(f"response {i} of the batch has turns, and the experts of a single response")
        tokens = len(prompt.token_ids) + len(rollout.token_ids) - 1
        size = tokens * routing.layers * routing.per_token * routing.width
        if len(routing.ids) != size:
            raise ValueError(
                f"response {i} of the batch has {tokens} tokens before its last, and the rollout engine gave "
                f"{len(routing.ids)} bytes of experts: want {size}"
            )
    return routings


def _supports(rollouts: Sequence[Rollout]) -> list[Support | None] | None:
    """The supports of each response's tokens; None if all were sampled from the whole vocabulary."""
    if all(rollout.support is None for rollout in rollouts):
        return None
    for i, rollout in enumerate(rollouts):
        if rollout.support is not None and (problem := Support(*rollout.support).problem(rollout.token_ids)):
            raise ValueError(f"response {i} of the batch: {problem}")
    return [rollout.support for rollout in rollouts]


def _engine_logp(rollouts: Sequence[Rollout]) -> Tensor | None:
    """The engine's log-probs of all responses, fp32 [r]; NaN for responses that no engine sampled.

    None if no response has any, or if an engine gave none for some of its responses.
    """
    known = [rollout.logprobs or [math.nan] * len(rollout.token_ids) for rollout in rollouts]
    if not any(rollout.logprobs for rollout in rollouts) or any(
        rollout.source == "policy" and rollout.token_ids and not rollout.logprobs for rollout in rollouts
    ):
        return None
    for i, rollout in enumerate(rollouts):
        if len(known[i]) != len(rollout.token_ids):
            raise ValueError(
                f"response {i} of the batch has {len(rollout.token_ids)} tokens, and the rollout engine gave "
                f"{len(rollout.logprobs)} log-probs: want one a token"
            )
    return torch.tensor([logp for logps in known for logp in logps], dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """Sizes of the whole optimizer step, over all ranks and micro-batches: the only normalisers."""

    groups: int
    sequences: int
    tokens: int
    left_out: tuple[int, int] = (0, 0)  # sequences and tokens of responses that are not trained

    @staticmethod
    def of(rows: TrainBatch) -> BatchTotals:
        return BatchTotals(len(rows.groups[1]), len(rows), int(rows.length_n.sum()), rows.left_out)


@dataclass
class LossInputs:
    """The inputs of a loss for one micro-batch: its rows and the current policy's log-probs.

    `logp_r` is fp32 [r], differentiable, at the sampling temperature. A loss returns its *share* of the
    optimizer step's loss: shares add up over micro-batches and ranks because every normaliser comes from
    `totals`.
    """

    rows: TrainBatch
    logp_r: Tensor
    totals: BatchTotals

    @cached_property
    def logp_n(self) -> Tensor:
        """Per-sequence log-prob sums l_i, fp32 [n]."""
        return self.rows.sequence_sum(self.logp_r)


# The former names of these types, which users' own losses and estimators may import for one more release.
Rows = TrainBatch
Totals = BatchTotals


OnWait = Callable[[], None] | None

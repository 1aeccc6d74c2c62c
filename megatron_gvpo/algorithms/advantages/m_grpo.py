"""M-GRPO: every agent's tokens are compared with those of the same role (arXiv 2511.13288, its abstract)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveInt, model_validator

from megatron_gvpo.algorithms.advantages.baselines import members_of_groups
from megatron_gvpo.algorithms.advantages.estimator import component, normalised
from megatron_gvpo.algorithms.base import Advantage, Component, Metrics
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.turns import ends_of
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class SubAgentCall(NamedTuple):
    """One call of a sub-agent: its role, and the spans (first, end) of own tokens that it wrote."""

    role: str
    spans: list[tuple[int, int]]


class RoleEstimator(Advantage):
    """The tokens of a rollout's main agent and of its sub-agents have advantages of their own, fp32 [r].

    In a conversation the first turn's agent is the main agent, and every other `Turn.agent` a role. A turn
    continues a call of its agent if its context contains something that the agent wrote in that call;
    otherwise it begins another call. With `open_ids` and `close_ids`, a single response has all agents: a
    token of `open_ids` begins a call of the only role, one of `close_ids` ends it (both are the sub-agent's),
    everything else is the main agent's.

    Main tokens have GRPO's advantage of the reward over the group. The tokens of call j of a role in rollout
    i have (v_ij - mean) / (std + eps) over the group's rollouts that call this role, where

        v_ij = blend reward_i + (1 - blend) local_ij.

    local_ij is the component `local` of the reward or, without one, the environment's rewards for the turns
    of the call (`Turn.reward`). Groups are aligned to `segments` calls of a role: the calls of a rollout with
    fewer are repeated, so that every rollout counts equally; calls beyond `segments` have advantage 0. This
    follows the paper's abstract only.
    """

    per_token: ClassVar[bool] = True

    name: Literal["roles"] = "roles"
    open_ids: tuple[int, ...] = ()
    close_ids: tuple[int, ...] = ()
    local: str | None = None
    blend: float = Field(0.5, ge=0, le=1)
    segments: PositiveInt = 4
    ddof: int = Field(1, ge=0, le=1)  # std over the group divides by its size minus this
    eps: float = Field(1e-6, ge=0)  # added to the std, so that nothing is divided by 0

    @model_validator(mode="after")
    def _possible(self) -> RoleEstimator:
        if both := set(self.open_ids) & set(self.close_ids):
            raise ValueError(f"token {min(both)} is among both open_ids and close_ids")
        if bool(self.open_ids) != bool(self.close_ids):
            raise ValueError("open_ids and close_ids go together: the tokens around a sub-agent's text")
        if self.open_ids and self.local is None:
            raise ValueError("local is missing: with open_ids, it is what sub-agents are judged by")
        return self

    @property
    def needs_turns(self) -> bool:
        return not self.open_ids

    @property
    def components_read(self) -> tuple[Component, ...]:
        return () if self.local is None else (self.local,)

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        main_n = normalised(rows, rows.reward_n, self.ddof, self.eps)
        advantage_r, sub_r = main_n[rows.seq_r], torch.zeros(rows.offsets[-1], dtype=torch.bool)
        calls = [self.calls(rows, row) for row in range(len(rows))]
        value = self._values(rows, calls)
        for members in members_of_groups(rows):
            for role in sorted({call.role for row in members for call in calls[row]}):
                of_role = {
                    row: [j for j, call in enumerate(calls[row]) if call.role == role] for row in members
                }
                of_role = {row: indices for row, indices in of_role.items() if indices}
                judged = [
                    [value[row][j] for j in indices[: self.segments]] for row, indices in of_role.items()
                ]
                for (row, indices), scores in zip(of_role.items(), self._scores(judged), strict=True):
                    for number, j in enumerate(indices):
                        for first, end in calls[row][j].spans:
                            span = slice(rows.offsets[row] + first, rows.offsets[row] + end)
                            advantage_r[span] = scores[number] if number < len(scores) else 0.0
                            sub_r[span] = True
        return advantage_r.float(), {"sub_agent_tokens": sub_r.double().mean()}

    def _values(self, rows: TrainBatch, calls: Sequence[Sequence[SubAgentCall]]) -> list[list[float]]:
        """v of every call of every row."""
        reward = rows.reward_n.double().tolist()
        if self.local is not None:
            local = component(rows, self.local, "local").tolist()
            return [
                [self.blend * reward[row] + (1 - self.blend) * local[row]] * len(row_calls)
                for row, row_calls in enumerate(calls)
            ]
        paid = [0.0] * rows.offsets[-1] if rows.turn_reward_r is None else rows.turn_reward_r.tolist()
        return [
            [
                self.blend * reward[row]
                + (1 - self.blend) * sum(sum(paid[start + a : start + b]) for a, b in call.spans)
                for call in row_calls
            ]
            for row, (start, row_calls) in enumerate(zip(rows.offsets, calls, strict=False))
        ]

    def _scores(self, judged: Sequence[Sequence[float]]) -> list[list[float]]:
        """The advantages of values, a list a rollout, where every rollout counts once."""
        count = len(judged)
        mean = sum(sum(values) / len(values) for values in judged) / count
        squares = sum(sum((v - mean) ** 2 for v in values) / len(values) for values in judged)
        if len({v for values in judged for v in values}) == 1:
            return [[0.0] * len(values) for values in judged]
        std = (squares / max(count - self.ddof, 1)) ** 0.5
        return [[(v - mean) / (std + self.eps) for v in values] for values in judged]

    def calls(self, rows: TrainBatch, row: int) -> list[SubAgentCall]:
        """The calls of sub-agents in a row, in the order in which they began."""
        ids = rows.response_ids[row]
        if self.open_ids:
            return self._between_marks(ids)
        turns = rows.turns[row] if rows.turns else ()
        begun: list[SubAgentCall] = []
        call_of: dict[
            int, tuple[SubAgentCall, int]
        ] = {}  # by turn, with the index of the call's first own token
        lengths: list[int] = []  # tokens of each turn: its context plus its own
        for number, (turn, end) in enumerate(zip(turns, ends_of(turns, len(ids)), strict=False)):
            full = lengths[turn.after] if turn.after >= 0 else len(rows.prompt_ids[row])
            context = full if turn.keep is None else turn.keep
            lengths.append(context + len(turn.given) + end - turn.begin)
            if turn.agent == turns[0].agent:
                continue
            call, first_own = call_of.get(turn.after, (None, context))
            if call is None or call.role != turn.agent or context <= first_own:
                call, first_own = SubAgentCall(turn.agent, []), context + len(turn.given)
                begun.append(call)
            call_of[number] = call, first_own
            call.spans.append((turn.begin, end))
        return begun

    def _between_marks(self, ids: Sequence[int]) -> list[SubAgentCall]:
        calls: list[SubAgentCall] = []
        first: int | None = None
        for index, token in enumerate(ids):
            if first is None and token in self.open_ids:
                first = index
            if first is not None and (token in self.close_ids or index == len(ids) - 1):
                calls.append(SubAgentCall("", [(first, index + 1)]))
                first = None
        return calls

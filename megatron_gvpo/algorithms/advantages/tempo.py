"""TEMPO: token credits from the prefix tree of a group (arXiv 2509.18314)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.advantages.baselines import members_of_groups
from megatron_gvpo.algorithms.advantages.estimator import group_std, rewards_differ
from megatron_gvpo.algorithms.base import Advantage, Metrics
from megatron_gvpo.core.lazy_imports import torch
from megatron_gvpo.types import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor


class PrefixTreeEstimator(Advantage):
    """A_it = [ (r_i - mean) + V(s_{t+1}) - V(s_t) ] / (std + eps), fp32 [r].

    V(s) is the mean reward of the group's responses that begin with the prefix s; in a conversation the
    prefix includes the environment's messages. The difference is 0 except where responses begin to differ.
    The division by the standard deviation is taken from descriptions by others.
    """

    per_token: ClassVar[bool] = True

    name: Literal["prefix_tree"] = "prefix_tree"
    ddof: int = Field(1, ge=0, le=1)  # std over the group divides by its size minus this
    eps: float = Field(1e-6, ge=0)

    def __call__(self, rows: TrainBatch) -> tuple[Tensor, Metrics]:
        reward_n = rows.reward_n.double()
        change_r = torch.zeros(len(rows.seq_r), dtype=torch.float64)
        for members in members_of_groups(rows):
            rewards = reward_n[members].tolist()
            changes = value_changes([_steps(rows, i) for i in members], rewards)
            for i, change in zip(members, changes, strict=True):
                change_r[rows.offsets[i] : rows.offsets[i] + len(change)] = torch.tensor(
                    change, dtype=torch.float64
                )
        centred_n = reward_n - rows.group_mean(reward_n)
        std_n = group_std(rows, reward_n, self.ddof) + self.eps
        advantage_r = (centred_n[rows.seq_r] + change_r) / std_n[rows.seq_r]
        advantage_r = advantage_r.where(rewards_differ(rows)[rows.seq_r], 0)
        return advantage_r.float(), {"branching": (change_r != 0).double().mean()}


def _steps(rows: TrainBatch, row: int) -> Sequence[Hashable]:
    """The row's tokens; the first token of a turn stands with the observation before it."""
    tokens: list[Hashable] = list(rows.response_ids[row])
    for turn in rows.turns[row] if rows.turns else ():
        if turn.begin < len(tokens):
            tokens[turn.begin] = (tokens[turn.begin], turn.after, turn.keep, turn.given)
    return tokens


def value_changes(responses: Sequence[Sequence[Hashable]], rewards: Sequence[float]) -> list[list[float]]:
    """V(s_{t+1}) - V(s_t) of every response while another one shares its prefix; 0 after that."""
    changes: list[list[float]] = [[] for _ in responses]
    values = [sum(rewards) / len(rewards)] * len(responses)
    node, nodes = [0] * len(responses), 1
    together, t = list(range(len(responses))), 0  # the responses that still share their prefix with another
    while together:
        together = [i for i in together if t < len(responses[i])]
        names: dict[tuple[int, Hashable], int] = {}
        for i in together:
            key = (node[i], responses[i][t])
            node[i] = names.setdefault(key, nodes + len(names))
        nodes += len(names)
        count = Counter(node[i] for i in together)
        total: Counter[int] = Counter()
        for i in together:
            total[node[i]] += rewards[i]  # type: ignore[assignment]  # a Counter adds floats as well
        for i in together:
            value = total[node[i]] / count[node[i]]
            changes[i].append(value - values[i])
            values[i] = value
        together, t = [i for i in together if count[node[i]] > 1], t + 1
    return changes

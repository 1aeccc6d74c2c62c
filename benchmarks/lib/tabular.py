"""A minimal task for the package's own blocks: the policy is a table of logits, and a response is one token.

There are `PROMPTS` prompts with `RESPONSES` possible responses each, a few of them right. The policy is
softmax(logits[prompt]), so the expected reward can be computed exactly. Steps, mini-batches, members, batch
policies, estimators and losses are the same as in a run; only the model and the engine are tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.algorithms.base import STEP_START
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch

PROMPTS, RESPONSES, RIGHT = 64, 40, 3
PROMPTS_PER_STEP = 16


@dataclass
class Asking:
    """The part of a sampling step that members read."""

    step: int
    seed: int


class Task:
    """Rewards, and the logits at a run's start; prompts differ in the probability of a right response."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        right = torch.stack([torch.randperm(RESPONSES, generator=generator)[:RIGHT] for _ in range(PROMPTS)])
        self.reward_xv = torch.zeros(PROMPTS, RESPONSES).scatter_(1, right, 1.0)
        difficulty_x = 3 * torch.rand(PROMPTS, 1, generator=generator) - 1.5
        noise_xv = torch.randn(PROMPTS, RESPONSES, generator=generator)
        self.logits_xv = noise_xv - difficulty_x * self.reward_xv
        self.prompts = [Prompt(str(x), (x,), str(x)) for x in range(PROMPTS)]


def train(
    algorithm: AlgorithmConfig, seed: int, *, n: int, steps: int, mini_batches: int, lr: float
) -> dict[str, float]:
    """Train once; returns the expected reward at start, end and worst, and the policy's entropy in nats.

    The result `responses` counts the sampled responses; some methods sample more than one batch a step.
    """
    task = Task(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    logits_xv = task.logits_xv.clone().requires_grad_()
    first_xv = torch.log_softmax(task.logits_xv, -1)
    adam = torch.optim.Adam([logits_xv], lr=lr, betas=(0.9, 0.95))
    members = [member.build() for member in algorithm.members]
    policy = algorithm.batch_policy.build(PROMPTS_PER_STEP)
    curve, sampled_count = [], 0
    for step in range(1, steps + 1):
        old_xv = torch.log_softmax(logits_xv.detach(), -1)
        groups = None
        while groups is None:
            drawn = torch.randperm(PROMPTS, generator=generator)[:PROMPTS_PER_STEP].tolist()
            sampled: list[Group] = sample(task, old_xv, drawn, n, generator)
            sampled_count += n * len(drawn)
            for member in members:
                sampled = member(sampled, Asking(step, seed))  # type: ignore[arg-type]
            groups = policy.offer(sampled)
        bounds = [len(groups) * i // mini_batches for i in range(mini_batches + 1)]
        for a, b in pairwise(bounds):
            update(algorithm, adam, logits_xv, groups[a:b], {"old": old_xv, "first": first_xv})
        policy_xv = torch.softmax(logits_xv.detach(), -1)
        curve.append(float((policy_xv * task.reward_xv).sum(-1).mean()))
    entropy = -(policy_xv * policy_xv.clamp(min=1e-30).log()).sum(-1).mean()
    result = {"reward": curve[-1], "worst": min(curve), "entropy": float(entropy), "start": start(task)}
    return result | {"responses": sampled_count}


def start(task: Task) -> float:
    return float((torch.softmax(task.logits_xv, -1) * task.reward_xv).sum(-1).mean())


def sample(
    task: Task, logp_xv: Tensor, drawn: Sequence[int], n: int, generator: torch.Generator
) -> list[Group]:
    groups = []
    for x in drawn:
        responses = torch.multinomial(logp_xv[x].exp(), n, replacement=True, generator=generator).tolist()
        rollouts = [
            Rollout([v], [float(logp_xv[x, v])], str(v), "stop", reward=float(task.reward_xv[x, v]))
            for v in responses
        ]
        groups.append(Group(task.prompts[x], rollouts))
    return groups


def update(
    algorithm: AlgorithmConfig,
    adam: torch.optim.Optimizer,
    logits_xv: Tensor,
    groups: Sequence[Group],
    of: dict[str, Tensor],
) -> None:
    """Take one optimizer step like the trainer."""
    rows = TrainBatch.from_groups(groups)
    x_r = torch.tensor([ids[0] for ids in rows.prompt_ids])
    v_r = torch.tensor([ids[0] for ids in rows.response_ids])
    columns: dict[str, Any] = {
        f"{column}_logp_r": (of["old"] if reference == STEP_START else of["first"])[x_r, v_r]
        for column, reference in algorithm.loss.reference_policies.items()
    }
    rows = rows.with_columns(**columns)
    if algorithm.estimator is not None:
        rows, _ = algorithm.estimator.fill(rows)
    logp_xv = torch.log_softmax(logits_xv, -1)
    loss, _ = algorithm.loss(LossInputs(rows, logp_xv[x_r, v_r], BatchTotals.of(rows)))
    entropy_r = -(logp_xv.exp() * logp_xv).sum(-1)[x_r]
    adam.zero_grad()
    (loss - algorithm.loss.entropy_coef * entropy_r.mean()).backward()
    torch.nn.utils.clip_grad_norm_([logits_xv], 1.0)
    adam.step()

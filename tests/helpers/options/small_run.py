"""Runs of the real trainer with a small policy, and what can be seen of them."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "quickstart"))

import make_task
import pytest
from torch import Tensor

from helpers.options import small_policy
from helpers.options.small_policy import SmallEngine, SmallPolicy
from megatron_gvpo.algorithms.members.base import MemberContext
from megatron_gvpo.core import collectives
from megatron_gvpo.core.user_functions import load_function
from megatron_gvpo.data.task import Task, load_task
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.megatron import parallel
from megatron_gvpo.observe.rollouts.table import Responses
from megatron_gvpo.sampling import rollouts
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.training import components
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer
from megatron_gvpo.types import LossInputs, TrainBatch

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ{}:,.\"'<>/()_#"
STEPS, PROMPTS = 2, 8  # a step has 6 prompts, so that the second one visits some again


def right(prompt: Prompt, rollout: Rollout) -> float:
    """Half of the responses are right, all to some prompts, and none to others."""
    kind = _kind(prompt)
    return float(kind == 0 or (kind != 1 and sum(rollout.token_ids) % 2 == 0))


def _kind(prompt: Prompt) -> int:
    """0: every response is right; 1: none, unless the prompt has a hint; else some."""
    kind = int(prompt.answer or sum(prompt.token_ids)) % 4
    return 2 if kind == 1 and len(prompt.token_ids) > 24 else kind


def part(prompt: Prompt, rollout: Rollout, modulus: int = 3) -> float:
    return (sum(rollout.token_ids) % modulus) / (modulus - 1)


def styled(prompt: Prompt, rollout: Rollout) -> float:
    """A component that counts in the reward, and is 0 where every response is wrong."""
    return part(prompt, rollout, 4) * (_kind(prompt) != 1)


def convert(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "prompt": f"x{record['prompt']}"}


def other_convert(record: dict[str, Any]) -> dict[str, Any] | None:
    return None if record["answer"] == "3" else record


def better(prompt: Prompt, a: Rollout, b: Rollout, margin: int = 0) -> float:
    return float(sum(a.token_ids) > sum(b.token_ids) + margin)


def likeness(a: str, b: str, factor: float = 1.0) -> float:
    return factor * len(set(a) & set(b)) / max(len(set(a) | set(b)), 1)


def group_rewards(group: Group, factor: float = 1.0) -> list[float]:
    return [factor * len(rollout.token_ids) for rollout in group.rollouts]


def expected(prompt: Prompt, factor: float = 1.0) -> float:
    return factor * (sum(prompt.token_ids) % 5) / 5


def teacher_texts(groups: Sequence[Group], n: int, word: str = "a") -> list[list[str]]:
    return [[f"{word}{g}{i}" for i in range(n)] for g, _ in enumerate(groups)]


def more_responses(groups: Sequence[Group], sampling: MemberContext, factor: float = 1.0) -> list[Group]:
    answers = sampling.ask([group.prompt for group in groups], int(factor))
    return [
        replace(group, rollouts=[*group.rollouts, *more.rollouts])
        for group, more in zip(groups, answers, strict=True)
    ]


def row_values(rows: TrainBatch, factor: float = 1.0) -> Tensor:
    return 1.0 + factor * rows.length_n.float()


def row_loss(inputs: LossInputs, factor: float = 1.0) -> Tensor:
    rows, weight_n = inputs.rows, inputs.rows.reward_n - inputs.rows.group_mean(inputs.rows.reward_n)
    if rows.advantage_n is not None:
        weight_n = rows.advantage_n
    share = -(weight_n * inputs.logp_n).sum() / inputs.totals.sequences
    for column in (rows.old_logp_r, rows.ref_logp_r):
        if column is not None:
            share = share + factor * ((inputs.logp_r - column) ** 2).sum() / inputs.totals.tokens
    return factor * share


def other_better(prompt: Prompt, a: Rollout, b: Rollout, margin: int = 0) -> float:
    return 1 - better(prompt, a, b, margin)


def other_likeness(a: str, b: str, factor: float = 1.0) -> float:
    return likeness(a, b, 3 * factor)


def other_group_rewards(group: Group, factor: float = 1.0) -> list[float]:
    return [-r for r in group_rewards(group, factor)]


def other_expected(prompt: Prompt, factor: float = 1.0) -> float:
    return 1 - expected(prompt, factor)


def other_teacher_texts(groups: Sequence[Group], n: int, word: str = "a") -> list[list[str]]:
    return teacher_texts(groups, n, word + "b")


def other_more_responses(
    groups: Sequence[Group], sampling: MemberContext, factor: float = 1.0
) -> list[Group]:
    return more_responses(groups, sampling, factor + 1)


def other_row_values(rows: TrainBatch, factor: float = 1.0) -> Tensor:
    return row_values(rows, factor) ** 2


def other_row_loss(inputs: LossInputs, factor: float = 1.0) -> Tensor:
    return row_loss(inputs, -factor)


def make(directory: Path) -> None:
    """Write a tokenizer, a model's config.json, and data with every field that some block reads."""
    tokens = make_task.TOKENS
    make_task.TOKENS = [*tokens, *LETTERS]
    try:
        make_task.make_model(directory / "model", seed=0, width=16)
        template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}{{ style }}="
        (directory / "model" / "chat_template.jinja").write_text(template)
    finally:
        make_task.TOKENS = tokens
    rng, lines = random.Random(0), []
    for number in range(PROMPTS):
        word = "".join(rng.choices("abcdefgh", k=4 if number % 3 else 9))
        record: dict[str, Any] = {"prompt": f"{word} {rng.choice('pqrs')}{number}=", "answer": str(number)}
        record |= {
            "solution": rng.choice(["ab", "abc1", "xyz12"]),
            "topic": number % 3,
            "rate": number / PROMPTS,
        }
        record |= {"hint": f"say {word[:2]}", "hint_1": "a", "hint_2": f"bc{number}"}
        scored = [("aa1", 1.0), ("b", 0.3), ("cde2", 0.0), ("f", 0.7)][: 3 + number % 2]
        record["responses"] = [{"response": f"{t}{number % 7}", "reward": r} for t, r in scored]
        record["rated"] = record["responses"][::-1][:2]
        lines.append(json.dumps(record) + "\n")
    (directory / "train.jsonl").write_text("".join(lines))
    (directory / "held_out.jsonl").write_text("".join(lines[::5]))


def values_of(algorithm: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The configuration of a run with this method."""
    here = "helpers.options.small_run"
    rewards: list[dict[str, Any]] = [
        {"name": "right", "function": f"{here}:right", "weight": 0.7},
        {"name": "format", "function": f"{here}:styled", "weight": 0.3},
    ]
    rewards += [
        {"name": name, "function": f"{here}:part", "weight": 0.0, "options": {"modulus": modulus}}
        for modulus, name in enumerate(("rubric", "stratum", "rank_1", "rank_2", "grade_1", "grade_2"), 3)
    ]
    fields = {"demonstration_key": "solution", "responses_key": "responses"}
    config = {
        "output_dir": str(directory / "out"),
        "model": {"path": str(directory / "model"), "dtype": "float32"},
        "data": {"train": {"path": str(directory / "train.jsonl"), **fields}, "max_prompt_tokens": 120},
        "rollout": {"n": 4, "max_tokens": 7},
        "rewards": {"components": rewards},
        "train": {"steps": STEPS, "prompts_per_step": 6, "mini_batches": 2, "batch_epochs": 2},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"export_hf": False},
        "logging": {"tensorboard": False, "progress": "off", "steps": {"max_gb": 0.0}},
        "algorithm": algorithm,
    }
    return config


class DirectRewards:
    """Stands for the reward workers: calls the functions in this process."""

    def __init__(self, config: Any, counts: Sequence[str] = ()) -> None:
        self._components = config.components

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def check(self, groups: Sequence[Group]) -> None:
        pass

    def warnings(self, groups: Sequence[Group]) -> list[str]:
        return []

    def score(self, groups: Sequence[Group]) -> None:
        for group in groups:
            for rollout in group.rollouts:
                rollout.rewards = {c.name: self._one(c, group.prompt, rollout) for c in self._components}
                rollout.reward = sum(c.weight * rollout.rewards[c.name] for c in self._components)

    def _one(self, component: Any, prompt: Prompt, rollout: Rollout) -> float:
        if component.pays_turns:
            return sum(turn.reward or 0.0 for turn in rollout.turns)
        return float(load_function(component.function)(prompt, rollout, **component.options))


@dataclass
class Seen:
    """The observations of a run: the numbers that train, and all others, each in the order of the run."""

    trained: list[Any] = field(default_factory=list)
    reported: list[Any] = field(default_factory=list)


class Watch(Callback):
    """Collects what can be seen."""

    def __init__(self) -> None:
        self.seen = Seen()

    def on_responses(self, trainer: Trainer, responses: Responses) -> None:
        for trained in responses.trained:
            self.seen.trained += [trained.rows.response_ids, trained.weight_r]
        for group in responses.groups:
            self.seen.reported += [group.prompt.id, group.rewards, [r.trained for r in group.rollouts]]

    def on_step(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        apart = ("time/", "throughput/", "memory/", "head/")
        shown = {k: v for k, v in metrics.items() if not k.startswith(apart) and k != "train/lr"}
        policy = trainer.components.policy
        self.seen.trained += [policy.weight_vh, {k: v for k, v in shown.items() if k.startswith("train/")}]
        if policy.critic is not None:
            self.seen.trained.append(policy.critic.weight_h)
        self.seen.reported.append(shown)


class SmallTrainer(Trainer):
    """The real trainer's steps, without a directory, checkpoints and signals."""

    def fit(self) -> dict[str, float]:
        with self.components:
            for step in range(1, self.config.train.steps + 1):
                self._train_step(step)
                self.notify("on_step", step, self._metrics)
        return self._metrics

    def _release(self) -> None:
        pass  # the process keeps its groups for the next run


_TASKS: dict[str, Task] = {}


def remembered_task(config: Config, card: ModelCard, tools: tuple[Any, ...] = ()) -> Task:
    """`load_task`, which is called once for each configuration of the data."""
    fields = [part.block.record_fields for part in config.algorithm.blocks_inside()]
    read = [config.data, config.model, config.algorithm.sampler, config.rollout, config.eval, fields]
    if (key := repr(read)) not in _TASKS:
        _TASKS[key] = load_task(config, card, tools)
    return _TASKS[key]


def patched(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins into the trainer, and a process group of one under it."""
    card = json.loads((directory / "model" / "config.json").read_text())
    patch.setattr(small_policy, "MODEL", {"vocabulary": card["vocab_size"], "end": card["eos_token_id"]})
    patch.setattr(components, "Policy", SmallPolicy)
    patch.setattr(components, "load_task", remembered_task)
    patch.setattr(rollouts, "engine_class", lambda name: SmallEngine)
    patch.setattr(rollouts, "RewardPool", DirectRewards)
    parallel.initialize(ParallelConfig(), 0)
    # One rank needs no communication, and gloo's threads take most of the time on a busy machine.
    alone = SimpleNamespace(is_initialized=lambda: False, get_rank=lambda: 0, get_world_size=lambda: 1)
    patch.setattr(collectives, "dist", alone)


def run(config: Config) -> Seen:
    """Train, and return what can be seen of it."""
    watch = Watch()
    SmallTrainer(config, [watch], overwrite=True, checked=True).fit()
    return watch.seen


def differ(one: Any, other: Any) -> bool:
    """True if two observations differ by more than rounding."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return True
        scale = float(one.abs().max()) if one.numel() else 0.0
        return bool(((one - other).abs() > 1e-4 * scale + 1e-9).any())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(differ(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(map(differ, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return not math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-7)
    return bool(one != other)

"""Inspects a run before it starts, with the cheapest checks first, and collects verdicts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_gvpo.checks.preflight import preflight
from megatron_gvpo.core.errors import ConfigError, DataError, RolloutError
from megatron_gvpo.core.gpus import list_gpus
from megatron_gvpo.data.task import Task, load_task
from megatron_gvpo.groups import Group
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.inspection.prompts import inspect_prompts, shown_prompts, shown_solutions
from megatron_gvpo.inspection.responses import inspect_responses
from megatron_gvpo.inspection.rewards import MEND_FIRST, inspect_rewards
from megatron_gvpo.inspection.rules import inspect_engine, inspect_learning_rate, inspect_memory
from megatron_gvpo.inspection.tiny_step import TinyStep
from megatron_gvpo.inspection.verdict import RunVerdict, failure, not_tried, ok, warning
from megatron_gvpo.settings.advice import warnings_of
from megatron_gvpo.settings.config import Config
from megatron_gvpo.workers.tools import configured_schemas

SHOWN_RESPONSES = 2


@dataclass
class Inspection:
    verdicts: list[RunVerdict] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # prompts as the model sees them
    solutions: list[str] = field(default_factory=list)  # texts in the data on which a run trains, as SFT does
    responses: list[str] = field(default_factory=list)

    @property
    def could_work(self) -> bool:
        return all(verdict.level != "failure" for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        verdicts = [asdict(verdict) for verdict in self.verdicts]
        return {
            "could_work": self.could_work,
            "verdicts": verdicts,
            "prompts": self.prompts,
            "solutions": self.solutions,
            "responses": self.responses,
        }


def inspect(config: Config, world: int, gpu_gib: float, tell: Callable[[RunVerdict], None]) -> Inspection:
    """All verdicts. `tell` is called with each verdict as soon as it exists.

    Raises nothing for a run that could not work.

    `world`: ranks of the run; `gpu_gib`: memory of one of its GPUs.
    """
    inspection = Inspection()

    def add(*verdicts: RunVerdict) -> None:
        for verdict in verdicts:
            inspection.verdicts.append(verdict)
            tell(verdict)

    layout = _layout(config, world)
    add(layout, inspect_engine(config), *(warning("settings", text) for text in warnings_of(config)))
    if layout.level == "failure":  # all further checks need the model
        return inspection
    cards = ModelCards(config)
    add(inspect_learning_rate(config, cards.policy), inspect_memory(config, world, gpu_gib))
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        step = TinyStep(config, cards.policy, Path(folder))
        try:
            task = _task(config, cards, add)
            if task is None:
                return inspection
            inspection.prompts, inspection.solutions = shown_prompts(task), shown_solutions(task)
            add(*inspect_prompts(config, task))
            step.start()
            judged = _tried("reward", lambda: inspect_rewards(config, task))
            add(*judged)
            groups: list[Group] = []
            if any(verdict.remedy == MEND_FIRST for verdict in judged):
                verdicts = [not_tried("start model", "the reward would fail for its responses, too")]
            else:
                verdicts = _tried("start model", lambda: _responses(config, cards, task, groups))
            inspection.responses = [group.rollouts[0].text for group in groups[:SHOWN_RESPONSES]]
            add(*verdicts)
            add(step.verdict())
        finally:
            step.stop()
    return inspection


def _layout(config: Config, world: int) -> RunVerdict:
    """Run the first checks of `train`, or those of `slurm` if this machine lacks the GPUs."""
    try:
        preflight(config, "train" if list_gpus() else "slurm", world)
    except ConfigError as error:
        return failure("configuration", str(error))
    return ok("configuration", f"complete, and its layout is possible on {world} rank{'s' * (world > 1)}")


def _task(config: Config, cards: ModelCards, add: Callable[[RunVerdict], None]) -> Task | None:
    try:
        return load_task(config, cards.policy, configured_schemas(config.rollout.conversation))
    except (ConfigError, DataError) as error:
        add(failure("data", str(error)))
        return None


def _responses(config: Config, cards: ModelCards, task: Task, groups: list[Group]) -> list[RunVerdict]:
    verdicts, sampled = inspect_responses(config, cards, task)
    groups += sampled
    return verdicts


def _tried(topic: str, look: Callable[[], list[RunVerdict]]) -> list[RunVerdict]:
    """Verdicts of a check that the user's input may break, such as a reward that cannot be loaded."""
    try:
        return look()
    except (ConfigError, DataError, RolloutError) as error:
        return [failure(topic, str(error))]

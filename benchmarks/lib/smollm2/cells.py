"""One run of a comparison on SmolLM2's sums: trained in this process until its share is used, then graded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from statistics import fmean

from megatron_gvpo.settings.config import Config
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer


class CompleteUntrainedError(Exception):
    """The cell was complete before its first step. `fit` would train one step before it stops."""


def train_and_grade(
    config: Config, is_complete: Callable[[int, Mapping[str, float]], bool], deadline: float = math.inf
) -> dict[str, float]:
    """Train until `is_complete` is true. It is called at the start, with step 0, and after every step.

    Returns the mean of each reward over held-out responses, which are sampled once, at the end; an
    empty dict if `deadline`, of the monotonic clock, came first. The run saves nothing.
    """
    grades: dict[str, float] = {}

    class Cell(Trainer):
        def evaluate(self) -> dict[str, float]:
            return {}

        def save(self) -> None:
            pass

    class Measure(Callback):
        def on_start(self, trainer: Trainer) -> None:
            self.on_step(trainer, 0, {})
            if grades:
                raise CompleteUntrainedError

        def on_step(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
            if is_complete(step, metrics):
                grades.update(grade(trainer, step))
                trainer.stop("this cell is complete")
            elif time.monotonic() > deadline:
                trainer.stop("the time has passed")

    trainer = Cell(config, [Measure()], overwrite=True)
    with closing(trainer), suppress(CompleteUntrainedError):
        trainer.fit()
    return grades


def grade(trainer: Trainer, step: int) -> dict[str, float]:
    groups, _ = trainer.components.evaluate(step)
    rewards = [rollout.rewards for group in groups for rollout in group.rollouts]
    return {key: fmean(reward[key] for reward in rewards) for key in rewards[0]}

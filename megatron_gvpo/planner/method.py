"""Derives from a recipe the work that a method needs beside its updates: scoring passes and a critic."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gvpo.algorithms.base import STEP_START, TEACHER
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.recipe import read_recipe
from megatron_gvpo.core.errors import ConfigError


@dataclass(frozen=True)
class Method:
    """Work of a training method beside its updates."""

    scoring: float  # the policy's own forward passes over a step's tokens before the first update
    critic: bool = False
    compares: bool = False  # compares the responses to a prompt with each other
    teacher_passes: int = 0  # passes of a teacher over a step's responses, for their log-probs
    teacher_divergence: bool = False  # every update compares whole distributions with a teacher's
    loss_terms: bool = True  # the loss has other terms than that divergence


def method(recipe: str, mini_batches: int) -> Method:
    """Returns the work of a recipe, counted as `Trainer._judged` and `_freeze_references` do it.

    `mini_batches`: mini-batches per step. Raises ConfigError if the recipe does not exist, or if the policy
    does not sample its responses.
    """
    try:
        read_recipe(recipe)
    except ValueError as error:
        raise ConfigError(f"--recipe {recipe}: {error}") from None
    algorithm = AlgorithmConfig.model_validate(recipe)
    if not algorithm.samples_from_policy:
        raise ConfigError(
            f"--recipe {recipe}: a plan needs a method that samples responses from the policy; the responses "
            f"of this one come from a {algorithm.sampler}"
        )
    of_estimator = {} if algorithm.estimator is None else algorithm.estimator.reference_policies
    of_loss = algorithm.loss.reference_policies.values()
    others = [*of_estimator.values(), *(reference for reference in of_loss if reference != STEP_START)]
    of_teacher, divergence = others.count(TEACHER), algorithm.loss.divergence
    scoring = float(len(others) - of_teacher)
    if STEP_START in of_loss and "old" not in of_estimator and algorithm.reference_logprobs == "trainer":
        # The first mini-batch needs no scoring pass: the policy has not changed since the step began.
        scoring += (mini_batches - 1) / mini_batches
    compares = algorithm.needs_group and not algorithm.members
    return Method(
        scoring,
        algorithm.critic is not None,
        compares,
        of_teacher,
        divergence is not None and divergence.needs_teacher,
        algorithm.loss.has_terms,
    )

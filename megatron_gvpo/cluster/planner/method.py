"""What a method asks of the trainer beside its updates: passes that score, and a critic."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gvpo.algorithms.base import STEP_START
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.recipe import read_recipe
from megatron_gvpo.config.schema import ConfigError


@dataclass(frozen=True)
class Method:
    scoring: float  # the policy's forward passes over a step's tokens before they are trained on
    critic: bool = False
    compares: bool = False  # the responses to a prompt with each other


def method(recipe: str, mini_batches: int) -> Method:
    """Of a recipe with so many updates a step: what `Trainer._judged` and `_freeze_references` do.

    Raises ConfigError for one that does not exist, or whose responses the policy does not sample.
    """
    try:
        read_recipe(recipe)
    except ValueError as error:
        raise ConfigError(f"--recipe {recipe}: {error}") from None
    algorithm = AlgorithmConfig.model_validate(recipe)
    if algorithm.sampler != "engine":
        raise ConfigError(
            f"--recipe {recipe}: plans are for methods whose responses are sampled; its come from a "
            f"{algorithm.sampler}"
        )
    of_estimator = {} if algorithm.estimator is None else algorithm.estimator.reference_policies
    of_loss = algorithm.loss.reference_policies.values()
    scoring = float(len(of_estimator)) + sum(reference != STEP_START for reference in of_loss)
    if STEP_START in of_loss and "old" not in of_estimator and algorithm.reference_logprobs == "trainer":
        # The first mini-batch is trained by the policy at step start itself.
        scoring += (mini_batches - 1) / mini_batches
    compares = algorithm.needs_group and not algorithm.members
    return Method(scoring, algorithm.critic is not None, compares)

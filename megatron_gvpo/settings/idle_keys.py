"""Refuses keys, or warns about them, that are set although nothing in the run reads them.

An option of a block that another option of the same block switches off is refused by the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_gvpo.settings.conversation import PYTHON
from megatron_gvpo.settings.run_sections import RunSections


def check_idle_keys(config: RunSections) -> None:
    """Raises ValueError, which names the key, for a key that is set and has no effect."""
    for key, why in _idle(config):
        if _is_set(config, key):
            raise ValueError(f"{key} has no effect: {why}; leave it out")
    _check_weights(config)


def keys_of_sampling(config: RunSections) -> str | None:
    """A warning about keys of sampling and rewards in a run that samples nothing; None without any.

    They are not refused, because the file may be for a method that samples, with this method given by an
    override.
    """
    algorithm = config.algorithm
    if algorithm.samples_from_policy:
        return None
    keys = ["rollout.n", "rollout.async_steps", "rollout.over_sampling_prompts"]
    if config.data.eval is None:
        keys += [f"rollout.{key}" for key in ("temperature", "top_p", "top_k", "min_p", "stop_token_ids")]
        keys += ["rollout.stop", "rewards.components"]
    if not (idle := [key for key in keys if _is_set(config, key)]):
        return None
    return (
        f"{', '.join(idle)}: no effect with algorithm.sampler={algorithm.sampler}, where the data have the "
        "responses" + (" and their rewards" if algorithm.has_rewards else "")
    )


def _check_weights(config: RunSections) -> None:
    """Raises ValueError for weights of components beside an estimator that counts all of them alike."""
    estimator = config.algorithm.estimator
    if estimator is None or not estimator.by_components or 0 not in estimator.components_read:
        return
    for i, component in enumerate(config.rewards.components):
        if component.weight != 1:
            remedy = "leave it out"
            if "weights" in type(estimator).model_fields:
                remedy = "give the weights of all that count in algorithm.estimator.weights, by name"
            raise ValueError(
                f"rewards.components.{i}.weight={component.weight:g} ({component.name}) has no effect: "
                f"algorithm.estimator={estimator.name} normalises and counts every component alike: {remedy}"
            )


def _idle(config: RunSections) -> Iterator[tuple[str, str]]:
    """Keys that have no reader in this run, each with the reason."""
    data, algorithm = config.data, config.algorithm
    if "eval" not in data.model_fields_set:  # data.eval=null, an override, switches evaluation off
        yield "eval.every", "data.eval names the held-out prompts, and is missing"
    if algorithm.prompts.weighted:
        yield "data.shuffle", f"algorithm.prompts={algorithm.prompts.name} draws prompts by weight"
    if not config.rewards.is_served:
        why = "no component asks a model on servers, and a function that fails counts as 0"
        yield "rewards.max_lost", why
    if (talks := config.rollout.conversation) is not None:
        here = "rollout.conversation"
        if talks.environment is not None:
            yield f"{here}.parser", "an environment reads the policy's turns itself"
        if talks.program is not None:
            yield f"{here}.observation_tokens", "a program's own limits bound what it says"
        if PYTHON not in talks.tools:
            yield f"{here}.sandbox", f"it is of the tool {PYTHON}"


def _is_set(config: RunSections, key: str) -> bool:
    """True if the key was set to another value than its default."""
    section: Any = config
    *path, name = key.split(".")
    for part in path:
        if section is None or part not in section.model_fields_set:
            return False
        section = getattr(section, part)
    if section is None or name not in section.model_fields_set:
        return False
    default = type(section).model_fields[name].get_default(call_default_factory=True)
    return bool(getattr(section, name) != default)

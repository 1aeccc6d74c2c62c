"""A method as a composition of blocks, and the recipes that name the usual ones."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, model_validator

from megatron_gvpo.algorithms.base import STEP_START, Block
from megatron_gvpo.algorithms.batch_policy import Accumulate, KeepAll
from megatron_gvpo.algorithms.estimators import Estimator
from megatron_gvpo.algorithms.gvpo import GVPO
from megatron_gvpo.algorithms.nll import NLL
from megatron_gvpo.algorithms.pg import PolicyGradient
from megatron_gvpo.algorithms.ppo import PPO

RECIPES = Path(__file__).parent / "recipes"


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


AnyLoss = Annotated[GVPO | PolicyGradient | PPO | NLL, Field(discriminator="name"), BeforeValidator(_named)]
AnyBatchPolicy = Annotated[KeepAll | Accumulate, Field(discriminator="name"), BeforeValidator(_named)]


class AlgorithmConfig(Block):
    """A recipe's blocks under the user's own keys: `algorithm: gpg`, or

        algorithm:
          recipe: gvpo
          loss: {beta: 0.2}

    A block given under another `name` replaces the recipe's; otherwise its keys are merged into it.
    With `recipe: null` the blocks' own defaults hold.
    """

    recipe: str | None = "gvpo"
    sampler: Literal["engine", "dataset"] = "engine"  # responses come from the policy, or from the data set
    batch_policy: AnyBatchPolicy = KeepAll()
    estimator: Estimator | None = None  # for losses that are weighed by advantages
    loss: AnyLoss = GVPO()
    # Who computes the log-probs of the policy at step start that the loss compares with: "engine" takes those
    # that came with the responses, corrected by their mean gap a token, and saves the scoring pass.
    reference_logprobs: Literal["trainer", "engine"] = "trainer"

    @model_validator(mode="before")
    @classmethod
    def _compose(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"recipe": values}
        if not isinstance(values, Mapping):
            return values
        recipe = values.get("recipe", cls.model_fields["recipe"].default)
        return merge(_read_recipe(recipe), values) if isinstance(recipe, str) else values

    @model_validator(mode="after")
    def _possible(self) -> Self:
        """Combinations of blocks that mean nothing."""
        loss = self.loss
        if self.sampler == "dataset" and loss.signal != "none":
            raise ValueError(
                f"sampler=dataset gives one demonstration a prompt and no rewards, but the loss {loss.name} "
                f"is weighed by each response's {loss.signal}: use the loss nll, or sampler=engine"
            )
        if self.sampler == "dataset" and self.batch_policy.name != "keep_all":
            raise ValueError(
                f"batch_policy={self.batch_policy.name} compares rewards, and sampler=dataset has none: "
                "use keep_all"
            )
        if self.sampler == "dataset" and loss.sized(1) != loss:
            raise ValueError(
                "loss.aggregation.constant is missing: sampler=dataset has no longest response for it"
            )
        if loss.signal == "advantage" and self.estimator is None:
            raise ValueError(f"estimator is missing: the loss {loss.name} is weighed by its advantages")
        if loss.signal != "advantage" and self.estimator is not None:
            raise ValueError(
                f"estimator has no effect with the loss {loss.name}, which does not use advantages: "
                "set it to null"
            )
        if self.reference_logprobs == "engine":
            self._engine_may_be_reference()
        return self

    def _engine_may_be_reference(self) -> None:
        anchors = set(self.loss.anchors.values())
        if not anchors:
            problem = "compares with no policy: there is nothing to save"
        elif not self.loss.sums_anchors:
            problem = (
                "exponentiates differences from the policy at step start, where the engine's rounding would "
                "pass for a change of the policy: loss.importance corrects for the engine"
            )
        elif anchors != {STEP_START}:
            problem = "compares with another policy than the one at step start, the only one the engine has"
        else:
            return
        raise ValueError(f"reference_logprobs=engine: the loss {self.loss.name} {problem}; use trainer")

    @property
    def needs_group(self) -> bool:
        """Whether it compares the responses of a prompt with each other."""
        return self.loss.couples_groups or (self.estimator is not None and self.estimator.needs_group)


@cache
def _recipe_names() -> list[str]:
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def _read_recipe(name: str) -> dict[str, Any]:
    if name not in _recipe_names():
        near = difflib.get_close_matches(name, _recipe_names(), 1, 0.5)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"there is no recipe {name!r} among {', '.join(_recipe_names())}{hint}")
    recipe: dict[str, Any] = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    return recipe


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings `over` on top of `base`; a block under another name or recipe replaces the whole block.

    A plain string in `base` is a block's short form where `over` sets keys of that block.
    """
    merged = {**base, **over}
    for key in base.keys() & over.keys():
        old, new = base[key], over[key]
        if isinstance(old, str):
            old = {"recipe" if key == "algorithm" else "name": old}
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            replaced = any(new.get(tag, old[tag]) != old[tag] for tag in ("name", "recipe") if tag in old)
            merged[key] = new if replaced else merge(old, new)
    return merged

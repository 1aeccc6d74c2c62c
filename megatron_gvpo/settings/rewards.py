"""The section `rewards` of a configuration: the components of the reward, and how they are called.

`BUILT_IN` is the table of built-in rewards, by the name of a component.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, Field, model_validator

from megatron_gvpo.core.metric_names import check_key, own_names
from megatron_gvpo.core.plain_values import cut
from megatron_gvpo.core.section import EVERY_KEY, Processes, Seconds, Section
from megatron_gvpo.settings.reward_servers import JudgeConfig, RewardModelConfig


def check_installed() -> None:
    """Raises ValueError, with a remedy, if the package reasoning-gym is missing."""
    if find_spec("reasoning_gym") is None:
        raise ValueError(
            "the package reasoning-gym is not installed: pip install 'megatron-gvpo[reasoning-gym]'"
        )


COUNT = "megatron_gvpo.rewards.conversation_rewards:count"  # the reward is one of a conversation's counts


class BuiltIn(NamedTuple):
    """A reward that comes with the package; `function` names it, so that it is imported only where used."""

    function: str
    needs_answer: bool = False  # the reward compares with `prompt.answer`
    pays_turns: bool = False  # the reward sums an environment's rewards for the turns
    is_binary: bool = False  # the reward is 0 or 1
    option: str | None = None  # the only option, which is a text
    check: Callable[[], None] = lambda: None  # raises ValueError, with a remedy, for a missing package


BUILT_IN = {
    "math": BuiltIn(
        "megatron_gvpo.rewards.math_answer:verify_math", needs_answer=True, is_binary=True, option="marker"
    ),
    "format": BuiltIn("megatron_gvpo.rewards.math_format:verify_format", is_binary=True, option="pattern"),
    "reasoning_gym": BuiltIn(
        "megatron_gvpo.rewards.math_answer:score_generated", check=check_installed, option="tag"
    ),
    "environment": BuiltIn("megatron_gvpo.rewards.conversation_rewards:environment_reward", pays_turns=True),
}


def check_built_in(name: str) -> None:
    """Raises ValueError for a name that no built-in reward has."""
    if name not in BUILT_IN:
        raise ValueError(
            f"there is no built-in reward {name!r} (there are: {', '.join(sorted(BUILT_IN))}); for your own, "
            "give its function"
        )


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Raises ValueError for an option that a built-in reward does not have, or with which it never pays."""
    known = BUILT_IN[name].option
    for option, value in options.items():
        if option != known:
            has = "no options" if known is None else f"the option {known} alone"
            raise ValueError(f"options.{option}: no such option; the reward {name} has {has}")
        if value is None or value == "":
            raise ValueError(
                f"options.{option} is empty: want a text, such as '####' with its quotes, because # begins a "
                "comment in YAML; to have none, leave it out"
            )
        if not isinstance(value, str):
            raise ValueError(f"options.{option}: want a text in quotes, not {cut(repr(value))}")
    if name == "format" and (pattern := options.get("pattern")) is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"options.pattern={pattern!r} is not a regular expression: {error}") from None


def _free_name(name: str) -> str:
    check_key(name, own_names("reward/<component>"))
    return name


class RewardConfig(Section):
    fixed_keys = EVERY_KEY

    # The name in the metrics (`reward/NAME`), which no other metric has. `math` and `format` are built in.
    name: Annotated[str, AfterValidator(_free_name)]
    weight: float = 1.0  # Factor of this component in the reward, which is the weighted sum.
    function: str | None = None  # Your own function: `module:function` or `path/file.py:function`.
    options: dict[str, Any] = Field(default_factory=dict)  # Keyword arguments of the function.
    model: RewardModelConfig | None = None  # A reward model on servers, instead of a function.
    judge: JudgeConfig | None = None  # A language model that judges, instead of a function.

    @property
    def served(self) -> RewardModelConfig | JudgeConfig | None:
        """The model on servers that scores; None for a function."""
        return self.model or self.judge

    @property
    def built_in(self) -> bool:
        return self.function is None and self.served is None

    @property
    def needs_answer(self) -> bool:
        """True if it compares with the answers of the data."""
        return self.built_in and BUILT_IN[self.name].needs_answer

    @property
    def is_binary(self) -> bool:
        """True if it is known to be 0 or 1."""
        return self.built_in and BUILT_IN[self.name].is_binary

    @property
    def pays_turns(self) -> bool:
        return self.built_in and BUILT_IN[self.name].pays_turns

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if sum(value is not None for value in (self.function, self.model, self.judge)) > 1:
            raise ValueError("give one of function, model and judge")
        if self.options and self.served is not None:
            raise ValueError("options are for a function")
        if self.built_in:
            check_built_in(self.name)
            _check_options(self.name, self.options)
        return self


class RewardsConfig(Section):
    fixed_keys = ("components",)
    free_keys = ("timeout", "workers", "max_lost")

    components: tuple[RewardConfig, ...] = (RewardConfig(name="math"),)
    timeout: Seconds = 10.0  # Seconds for one component of one response; then that component is 0.
    workers: Processes = 1  # Reward processes of every rank.
    # End the run if a larger share of a batch's responses gets no reward from reward models and judges.
    max_lost: float = Field(0.5, ge=0, lt=1)

    @property
    def is_served(self) -> bool:
        """True if a component is a model on servers."""
        return any(component.served is not None for component in self.components)

    @property
    def turn_weight(self) -> float:
        """Factor of the rewards of a conversation's turns in its reward: the weight of `environment`."""
        return sum((c.weight for c in self.components if c.pays_turns), 0.0)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        names = [component.name for component in self.components]
        for i, component in enumerate(self.components):
            if component.name in names[:i]:
                raise ValueError(f"components.{i}: the name {component.name!r} is given twice")
        return self

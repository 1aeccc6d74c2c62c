"""The reward that is expected of a prompt before its responses are seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from megatron_gvpo.algorithms.base import Block
from megatron_gvpo.core.user_functions import call_function, check_call, load_function, refused
from megatron_gvpo.groups import Prompt


class Prior(Block):
    """A source of the reward that is expected of a prompt."""

    # It gives an expected reward.
    gives_prior: ClassVar[bool] = True
    # The engine samples the most likely response of every prompt, and its reward is the prior.
    greedy: ClassVar[bool] = False

    name: str

    @property
    def function_of_prompt(self) -> Callable[[Prompt], float] | None:
        """The function that gives the expected reward of a prompt, where the prompt alone decides it."""
        return None


class NoPrior(Prior):
    """No reward is expected."""

    gives_prior: ClassVar[bool] = False

    name: Literal["none"] = "none"


class GreedyPrior(Prior):
    """The reward of the policy's most likely response, which is not trained (ReMax, arXiv 2310.10505)."""

    needs_engine: ClassVar[bool] = True
    greedy: ClassVar[bool] = True

    name: Literal["greedy"] = "greedy"


class FunctionPrior(Prior):
    """A user's function: `function(prompt, **options)` -> the expected reward.

    This is the interface for a learned prior such as V_0 (arXiv 2602.03584). Every rank calls the function,
    so it must give every rank the same.
    """

    name: Literal["function"] = "function"
    function: str
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _callable(self) -> Self:
        check_call(load_function(self.function), "f(prompt, **options)", 1, self.options)
        return self

    @property
    def function_of_prompt(self) -> Callable[[Prompt], float]:
        return self.expected

    def expected(self, prompt: Prompt) -> float:
        where = ("prior.function", self.function)
        value = call_function(*where, prompt, **self.options)
        try:
            expected = float(value)
        except (TypeError, ValueError, OverflowError):
            raise refused(*where, f"expected a number, it returned {type(value).__name__}") from None
        if not math.isfinite(expected):
            raise refused(*where, f"expected a finite number, it returned {expected}")
        return expected


class TrackedPrior(Prior):
    """The expected reward that follows from earlier responses to the prompt (`algorithm.tracker`)."""

    needs_tracker: ClassVar[bool] = True

    name: Literal["tracker"] = "tracker"

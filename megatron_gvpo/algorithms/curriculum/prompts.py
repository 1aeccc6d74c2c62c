"""The choice of the prompts of a batch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from megatron_gvpo.algorithms.base import Block, unless
from megatron_gvpo.algorithms.curriculum.tracker import PromptHistory


class PromptChoice(Block):
    """A rule by which the prompts of a batch are chosen."""

    # Prompts are drawn by `weight`; otherwise they come in the order of the data (data.shuffle).
    weighted: ClassVar[bool] = False

    name: str

    @property
    def stated_in(self) -> str | None:
        """The field of the data record that states a success rate, for prompts not visited yet."""
        return None

    def weight(self, known: PromptHistory | None) -> float:
        """The weight of a prompt relative to the others, by what is known of it."""
        return 1.0


class InOrder(PromptChoice):
    """Every prompt once an epoch, in random order (data.shuffle) or in the data's."""

    name: Literal["in_order"] = "in_order"


class SuccessRate(PromptChoice):
    """Draw prompts by their success rate p, without repetition in a batch (GPG's code, arXiv 2504.02546).

    favour  hard    1 - p
            soft    1 - p, and 0 where p is 0 or 1
            medium  1 where 0 < p < 1, else 0
            unsure  sqrt(v (1 - v)) / N^gamma: SPO (arXiv 2509.13232), v = a / N the success that the tracker
                    expects, N = a + b its counts
    A prompt that was not visited has weight 1. `floor` is added to every weight, so that no prompt is lost.
    `field` names the field of the data record with a success rate; it is p until the prompt is visited.
    """

    needs_tracker: ClassVar[bool] = True
    needs_rewards: ClassVar[bool] = True
    weighted: ClassVar[bool] = True

    name: Literal["success_rate"] = "success_rate"
    favour: Literal["hard", "soft", "medium", "unsure"] = "hard"
    floor: float = Field(0.05, ge=0)
    gamma: float = Field(0.5, ge=0)
    field: str | None = None

    @property
    def idle_options(self) -> dict[str, str]:
        return unless(gamma=(self.favour == "unsure", "favour=unsure"))

    @property
    def stated_in(self) -> str | None:
        return self.field

    @property
    def record_fields(self) -> dict[str, str]:
        return {} if self.field is None else {"field": self.field}

    def weight(self, known: PromptHistory | None) -> float:
        if known is None:
            return 1.0 + self.floor
        p = known.success
        match self.favour:
            case "hard":
                weight = 1 - p
            case "soft":
                weight = 1 - p if 0 < p < 1 else 0.0
            case "medium":
                weight = float(0 < p < 1)
            case "unsure":
                v = known.expected
                weight = (v * (1 - v)) ** 0.5 / known.weight**self.gamma
        return weight + self.floor

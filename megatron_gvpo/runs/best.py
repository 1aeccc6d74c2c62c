"""The best checkpoint of a run so far, by a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_gvpo.config.sections import BestConfig


class Best:
    """The step with the best value of the metric among those that were offered; none without settings."""

    def __init__(self, settings: BestConfig | None) -> None:
        self._settings = settings
        self.step: int | None = None
        self._value = math.nan

    def offer(self, step: int, metrics: Mapping[str, float]) -> bool:
        """True if this step, which has a checkpoint, is the best so far. The first of equal ones is kept."""
        if self._settings is None:
            return False
        value = metrics.get(self._settings.metric, math.nan)
        if math.isnan(value):
            return False
        sign = 1 if self._settings.order == "highest" else -1
        if self.step is not None and sign * value <= sign * self._value:
            return False
        self.step, self._value = step, value
        return True

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON values."""
        if self._settings is None or self.step is None:
            return {}
        return {"by": self._settings.model_dump(), "step": self.step, "value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, unless it is of another metric."""
        if self._settings is not None and state.get("by") == self._settings.model_dump():
            self.step, self._value = state["step"], state["value"]

"""The correction that a policy gradient may have for the policy that sampled: its option `importance`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_gvpo.algorithms import importance
from megatron_gvpo.algorithms.importance.base import Importance
from megatron_gvpo.algorithms.registry import choice

if TYPE_CHECKING:
    AnyImportance = Importance
else:
    AnyImportance = choice(importance, kind=Importance, default="truncate")

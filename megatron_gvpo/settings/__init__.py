"""The configuration: a typed section for each part, the rules between them, and files with overrides.

Nothing here loads torch, a model or data: checks that need these are in `checks/`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config as Config
    from megatron_gvpo.settings.config import load_config as load_config

_NAMES = ("Config", "load_config")


def __getattr__(name: str) -> Any:
    """Import `Config` or `load_config` when it is first used: the sections take 0.3 s."""
    if name not in _NAMES:
        raise AttributeError(f"module 'megatron_gvpo.settings' has no attribute {name!r}")
    return getattr(import_module("megatron_gvpo.settings.config"), name)

"""The configuration: typed sections (`schema`), files and overrides, and the checks before a run starts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_gvpo.config.schema import Config as Config
    from megatron_gvpo.config.schema import load_config as load_config


def __getattr__(name: str) -> Any:
    """Import a name of `megatron_gvpo.config.schema` when it is first used: the schema takes 0.3 s."""
    schema = import_module("megatron_gvpo.config.schema")  # `from ... import` would ask this function again
    if name in schema.__all__:
        return getattr(schema, name)
    raise AttributeError(f"module 'megatron_gvpo.config' has no attribute {name!r}")

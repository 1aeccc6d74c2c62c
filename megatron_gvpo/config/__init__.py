"""The configuration: typed sections (`schema`), files and overrides, and the checks before a run starts."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Names of `megatron_gvpo.config.schema`, imported when they are first used: the schema loads torch."""
    from megatron_gvpo.config import schema

    if hasattr(schema, name):
        return getattr(schema, name)
    raise AttributeError(f"module 'megatron_gvpo.config' has no attribute {name!r}")

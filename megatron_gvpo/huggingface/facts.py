"""The values of config.json with which weights belong together, although their shapes may not show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Facts = dict[str, str | int | float | bool]  # by dotted key

_NOT_OF_THE_WEIGHTS = frozenset(
    {
        *("_name_or_path", "_attn_implementation", "attn_implementation", "dtype", "torch_dtype"),
        *("transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"),
        *("max_position_embeddings", "return_dict", "output_hidden_states", "output_attentions"),
    }
)


def facts_of(config: Mapping[str, Any]) -> Facts:
    """The texts, numbers and booleans of a config.json, which change what a model computes from its weights.

    Lists and null are left out: versions of transformers write them differently.
    """
    return dict(_facts(config, ""))


def first_difference(one: Facts, other: Facts) -> tuple[str, Any, Any] | None:
    """The first key, in alphabetical order, that both have with different values, and the values; or None."""
    different = sorted(key for key in one.keys() & other.keys() if one[key] != other[key])
    return (different[0], one[different[0]], other[different[0]]) if different else None


def _facts(config: Mapping[str, Any], above: str) -> Iterator[tuple[str, str | int | float | bool]]:
    for key, value in config.items():
        if key in _NOT_OF_THE_WEIGHTS:
            continue
        if isinstance(value, Mapping):
            yield from _facts(value, f"{above}{key}.")
        elif isinstance(value, str | int | float | bool):
            yield f"{above}{key}", value

"""Reads a configuration: YAML files merged in order, then dotted overrides; and one from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_gvpo.algorithms.recipe import merge
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.plain_values import check_plain, cut
from megatron_gvpo.core.secrets import literal_secrets
from megatron_gvpo.core.user_functions import load_function
from megatron_gvpo.core.yaml_files import parse_value, read_yaml
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.explain import explain


def load_config(files: Sequence[str | Path], overrides: Iterable[str] = ()) -> Config:
    """Read and merge YAML files (later ones win), apply `key.sub=value` overrides, validate.

    Raises ConfigError.
    """
    merged: dict[str, Any] = {}
    for file in files:
        merged = merge(merged, read_yaml(Path(file)))
    for override in overrides:
        merged = merge(merged, parse_override(override))
    return build_config(merged)


def build_config(values: Mapping[str, Any]) -> Config:
    """Validate a nested mapping. Raises ConfigError."""
    load_function.cache_clear()  # a notebook's next run reads the user's file again
    try:
        config = Config.model_validate(values)
        check_plain(values)  # comes second: the sections say more precisely what is wrong
        literal_secrets(config.model_dump())  # from here on they are hidden
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def as_config(config: Config | Mapping[str, Any]) -> Config:
    """The configuration of a user of the Python API, who may give a nested dict. Raises ConfigError."""
    if isinstance(config, Config):
        literal_secrets(config.model_dump())  # from here on they are hidden
        return config
    if isinstance(config, Mapping):
        return build_config(config)
    raise ConfigError(
        f"a configuration is what load_config([file, ...]) returns, or a dict of its keys, not "
        f"{type(config).__name__}"
    )


def parse_override(override: str) -> dict[str, Any]:
    """The nested mapping of `key.sub=value`. Raises ConfigError, also for a secret in plain text."""
    dotted, sign, text = override.partition("=")
    if not sign or not all(dotted.split(".")):
        raise ConfigError(f"override {cut(override)!r}: expected key.sub=value")
    try:
        value = parse_value(text)
    except ValueError as error:
        raise ConfigError(f"override {cut(dotted)}: {error}") from None
    for key in reversed(dotted.split(".")):
        value = {key: value}
    if shown := literal_secrets(value):
        raise ConfigError(
            f"{shown[0]}: a secret on a command line, which all users of this machine can read: give "
            "`{env: NAME}`, and the secret in the environment variable NAME"
        )
    return value

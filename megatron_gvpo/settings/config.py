"""The whole configuration: typed sections, YAML files merged in order, dotted overrides on top.

`load_config(["train.yaml", "cpu.yaml"], ["optimizer.lr=1e-5"])` returns a validated `Config` or raises
`ConfigError`, which names the key, the value and a right one. Nothing here loads torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError, model_validator

from megatron_gvpo.algorithms.recipe import merge
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.plain_values import check_plain, cut
from megatron_gvpo.core.secrets import literal_secrets, resolve
from megatron_gvpo.core.user_functions import forget_functions
from megatron_gvpo.core.yaml_files import parse_value, read_yaml
from megatron_gvpo.settings.explain import explain
from megatron_gvpo.settings.rules import cross_check
from megatron_gvpo.settings.run_sections import RunSections
from megatron_gvpo.settings.sections import SamplingConfig


class Config(RunSections):
    """The configuration of a training run; building it checks that its sections go together."""

    @model_validator(mode="before")
    @classmethod
    def _with_secrets(cls, values: Any) -> Any:
        return resolve(values)

    @model_validator(mode="before")
    @classmethod
    def _evaluate_as_sampled(cls, values: Any) -> Any:
        """Give `eval.sampling` the keys of `rollout` that it does not have."""
        rollout = _keys_of(values, "rollout")
        own, evaluation = _keys_of(values, "eval", "sampling"), _keys_of(values, "eval")
        if not isinstance(values, Mapping) or rollout is None or own is None or evaluation is None:
            return values  # the sections report the errors
        keys = (rollout.keys() & SamplingConfig.model_fields) - own.keys()
        inherited = {key: rollout[key] for key in keys}
        try:
            SamplingConfig.model_validate(inherited)
        except ValidationError:
            return values  # the error is reported once, for `rollout`
        return {**values, "eval": {**evaluation, "sampling": {**own, **inherited}}}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        cross_check(self)
        return self


def _keys_of(values: Any, *path: str) -> dict[str, Any] | None:
    """The keys that are set in a section, which is a mapping or a Section; None if it is neither."""
    for name in (*path, ""):
        if isinstance(values, BaseModel):
            values = {key: getattr(values, key) for key in values.model_fields_set}
        if not isinstance(values, Mapping):
            return None
        values = values.get(name, {}) if name else values
    return dict(values)


def merged_values(files: Sequence[str | Path], overrides: Iterable[str]) -> dict[str, Any]:
    """Merge YAML files, of which later ones win, and then `key.sub=value` overrides. Raises ConfigError.

    An override that replaces a block, such as algorithm=grpo, must come before those of the block's keys.
    """
    merged: dict[str, Any] = {}
    for file in files:
        merged = merge(merged, read_yaml(Path(file)))
    before: list[str] = []
    for override in overrides:
        merged = merge(merged, parse_override(override))
        key, _, text = override.partition("=")
        if text.strip() == "{}" and _value(key, merged):
            raise ConfigError(
                f"override {cut(override)}: it would change nothing, because keys are merged; give the keys "
                "that are to change"
            )
        if lost := [key for key in before if _is_lost(key, merged)]:
            raise ConfigError(
                f"override {cut(lost[0])}: {cut(override)} comes after it and replaces what it changes: give "
                f"{cut(override)} first"
            )
        before.append(key)
    return merged


def _value(key: str, values: Any) -> Any:
    """The value of a dotted key in nested values; None without one."""
    for part in key.split("."):
        if isinstance(values, list):
            values = _numbered(values)
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _numbered(values: list[Any]) -> dict[str, Any]:
    return {str(number): item for number, item in enumerate(values)}


def _is_lost(key: str, values: Any) -> bool:
    """True if a key is no longer in the values; False if a section around it is null, or a name is given."""
    for part in key.split("."):
        if isinstance(values, list):
            values = _numbered(values)
        if not isinstance(values, Mapping) or part not in values:
            return values is not None and part not in ("name", "recipe")
        values = values[part]
    return False


def load_config(files: Sequence[str | Path], overrides: Iterable[str] = ()) -> Config:
    """Read and merge YAML files (later ones win), apply `key.sub=value` overrides, validate.

    Raises ConfigError.
    """
    values = merged_values(files, overrides)
    if "serve" in values:
        names = " ".join(map(str, files))
        raise ConfigError(
            f"{names}: the section `serve` belongs to a server of the Tinker API, which `megatron-gvpo serve "
            f"--tinker {names}` starts; a training run and its rollout servers have no such section"
        )
    return build_config(values)


def build_config(values: Mapping[str, Any]) -> Config:
    """Validate a nested mapping. Raises ConfigError."""
    forget_functions()  # a notebook's next run reads the user's file again
    try:
        config = Config.model_validate(values)
        check_plain(values)  # the sections come first, because their errors are more precise
        literal_secrets(config.model_dump())  # from here on, output hides these secrets
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def as_config(config: Config | Mapping[str, Any]) -> Config:
    """The configuration of a user of the Python API, who may give a nested dict. Raises ConfigError."""
    if isinstance(config, Config):
        literal_secrets(config.model_dump())  # from here on, output hides these secrets
        return config
    if isinstance(config, Mapping):
        return build_config(config)
    raise ConfigError(
        f"a configuration is what load_config([file, ...]) returns, or a dict of its keys, not "
        f"{type(config).__name__}"
    )


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The configuration files among a command's words, whose paths may have an `=`, and the overrides."""
    overrides = [word for word in words if "=" in word and not _is_path(word)]
    return [word for word in words if "=" not in word or _is_path(word)], overrides


def _is_path(word: str) -> bool:
    return "/" in word.partition("=")[0] or os.path.isfile(word)


def parse_override(override: str) -> dict[str, Any]:
    """The nested mapping of `key.sub=value`. Raises ConfigError, also for a secret in plain text."""
    dotted, sign, text = override.partition("=")
    if not sign or not all(dotted.split(".")):
        raise ConfigError(f"override {cut(override)!r}: expected key.sub=value")
    if (without := re.sub(r"\[(\d+)\]", r".\1", dotted.strip())) != dotted:
        why = "without spaces" if without == dotted.strip() else "with an item's number behind a point"
        raise ConfigError(f"override {cut(override)!r}: write the key {why}: {cut(without)}=VALUE")
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

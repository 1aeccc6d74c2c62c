"""The whole configuration: typed sections, YAML files merged in order, dotted overrides on top.

`load_config(["train.yaml", "cpu.yaml"], ["optimizer.lr=1e-5"])` returns a validated `Config` or raises
`ConfigError`, which names the key, the value and what would be right. Torch is loaded only for
`rollout.servers.colocated`, whose check asks the transport's class.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.recipe import merge
from megatron_gvpo.config.adapter import AdapterConfig
from megatron_gvpo.config.checks.cross_checks import cross_check
from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.explain import explain
from megatron_gvpo.config.parallel import ParallelConfig
from megatron_gvpo.config.plain_values import check_plain, cut, each_once
from megatron_gvpo.config.secrets import literal_secrets, resolve
from megatron_gvpo.config.section import LocalPath, Section
from megatron_gvpo.config.sections import (
    CheckpointConfig,
    DataConfig,
    DatasetConfig,
    EvalConfig,
    FP8Config,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    SamplingConfig,
    TrainConfig,
)
from megatron_gvpo.config.servers import ServersConfig, WeightSyncConfig
from megatron_gvpo.config.yaml import parse_value, read_yaml
from megatron_gvpo.conversations.config import ConversationConfig
from megatron_gvpo.images.families import text_values
from megatron_gvpo.rewards.config import RewardConfig, RewardsConfig
from megatron_gvpo.runtime.user_functions import load_function
from megatron_gvpo.teachers.config import TeacherConfig

__all__ = [
    "AdapterConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "ConversationConfig",
    "DataConfig",
    "DatasetConfig",
    "EvalConfig",
    "FP8Config",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RewardsConfig",
    "RolloutConfig",
    "SamplingConfig",
    "Section",
    "ServersConfig",
    "TeacherConfig",
    "TrainConfig",
    "WeightSyncConfig",
    "build_config",
    "load_config",
    "read_json_object",
    "read_model_config",
]


class Config(Section):
    fixed_keys = ("teacher",)
    free_keys = ("output_dir",)

    output_dir: LocalPath  # The directory that the run writes: metrics, checkpoints, the exported model.
    model: ModelConfig
    data: DataConfig
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig = RewardsConfig()
    teacher: TeacherConfig | None = None  # A model whose log-probs of the responses the policy learns from.
    train: TrainConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def samples_responses(self) -> bool:
        """True if a run samples responses and scores them: to train on, or of held-out prompts."""
        return self.algorithm.samples_from_policy or self.data.eval is not None

    @property
    def served_path(self) -> str:
        """The checkpoint directory that rollout servers start with."""
        return self.rollout.servers.model_path or self.model.path

    @model_validator(mode="before")
    @classmethod
    def _with_secrets(cls, values: Any) -> Any:
        return resolve(values)

    @model_validator(mode="before")
    @classmethod
    def _evaluate_as_sampled(cls, values: Any) -> Any:
        """Give `eval.sampling` the keys of `rollout` that it does not have."""
        rollout = _given(values, "rollout")
        own, evaluation = _given(values, "eval", "sampling"), _given(values, "eval")
        if not isinstance(values, Mapping) or rollout is None or own is None or evaluation is None:
            return values  # which the sections refuse, in their own words
        keys = (rollout.keys() & SamplingConfig.model_fields) - own.keys()
        inherited = {key: rollout[key] for key in keys}
        try:
            SamplingConfig.model_validate(inherited)
        except ValidationError:
            return values  # an error once, where it is
        return {**values, "eval": {**evaluation, "sampling": {**own, **inherited}}}

    @model_validator(mode="after")
    def _possible(self) -> Self:
        cross_check(self)
        return self


def _given(values: Any, *path: str) -> dict[str, Any] | None:
    """The keys that are given in a section, be it a mapping or made in Python; None if it is neither."""
    for name in (*path, ""):
        if isinstance(values, BaseModel):
            values = {key: getattr(values, key) for key in values.model_fields_set}
        if not isinstance(values, Mapping):
            return None
        values = values.get(name, {}) if name else values
    return dict(values)


def load_config(files: Sequence[str | Path], overrides: Iterable[str] = ()) -> Config:
    """Read and merge YAML files (later ones win), apply `key.sub=value` overrides, validate.

    Raises ConfigError.
    """
    merged: dict[str, Any] = {}
    for file in files:
        merged = merge(merged, read_yaml(Path(file)))
    for override in overrides:
        value = _parse_override(override)
        if shown := literal_secrets(value):
            raise ConfigError(
                f"{shown[0]}: a secret on a command line, which all users of this machine can read: give "
                "`{env: NAME}`, and the secret in the environment variable NAME"
            )
        merged = merge(merged, value)
    return build_config(merged)


def build_config(values: Mapping[str, Any]) -> Config:
    """Validate a nested mapping. Raises ConfigError."""
    load_function.cache_clear()  # a notebook's next run takes the user's file as it is now
    try:
        config = Config.model_validate(values)
        check_plain(values)  # after the sections, which refuse more in their own words
        literal_secrets(config.model_dump())  # hides them
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return config


def as_config(given: Config | Mapping[str, Any]) -> Config:
    """The configuration that a user of the Python API gives, also as a nested dict. Raises ConfigError."""
    if isinstance(given, Config):
        literal_secrets(given.model_dump())  # hides them
        return given
    if isinstance(given, Mapping):
        return build_config(given)
    raise ConfigError(
        f"a configuration is what load_config([file, ...]) returns, or a dict of its keys, and no "
        f"{type(given).__name__}"
    )


def read_model_config(path: str, key: str = "model.path") -> dict[str, Any]:
    """Read the model's Hugging Face config.json.

    That of a model with images has its language model's keys at the top (`text_values`).
    Raises ConfigError, which names `key`, if there is none.
    """
    file = Path(path) / "config.json"
    try:
        is_there = file.is_file()
    except OSError as error:  # no permission, or a name that is too long
        raise ConfigError(f"{file}: {error.strerror}") from None
    if not is_there:
        raise ConfigError(f"{key}={path}: no config.json there (a Hugging Face checkpoint directory)")
    return text_values(read_json_object(file))


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file with one JSON object. Raises ConfigError, which names the file, for any other content."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=each_once)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}, line {error.lineno}: not valid JSON ({error.msg})") from None
    except RecursionError:
        raise ConfigError(f"{file}: not valid JSON (nested too deeply)") from None
    except ValueError as error:  # not UTF-8, a number of more digits than Python reads, or a key given twice
        raise ConfigError(f"{file}: not valid JSON ({error})") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected an object of names and values, found {type(values).__name__}")
    return values


def _parse_override(override: str) -> dict[str, Any]:
    dotted, sign, text = override.partition("=")
    if not sign or not all(dotted.split(".")):
        raise ConfigError(f"override {cut(override)!r}: expected key.sub=value")
    try:
        value = parse_value(text)
    except ValueError as error:
        raise ConfigError(f"override {cut(dotted)}: {error}") from None
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value

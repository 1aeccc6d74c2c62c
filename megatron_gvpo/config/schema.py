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

import yaml
from pydantic import Field, ValidationError, model_validator

from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.recipe import merge
from megatron_gvpo.config.cross_checks import check_combinations
from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.explain import explain
from megatron_gvpo.config.parallel import ParallelConfig
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
    RewardConfig,
    RewardsConfig,
    RolloutConfig,
    SamplingConfig,
    TrainConfig,
)
from megatron_gvpo.config.servers import ServersConfig, WeightSyncConfig
from megatron_gvpo.config.yaml import Loader

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
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
    "TrainConfig",
    "WeightSyncConfig",
    "build_config",
    "load_config",
    "read_json_object",
    "read_model_config",
]


class Config(Section):
    output_dir: LocalPath  # The directory that the run writes: metrics, checkpoints, the exported model.
    model: ModelConfig
    data: DataConfig
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = RolloutConfig()
    rewards: RewardsConfig = RewardsConfig()
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

    @model_validator(mode="after")
    def _possible(self) -> Self:
        check_combinations(self)
        return self


def load_config(files: Sequence[str | Path], overrides: Iterable[str] = ()) -> Config:
    """Read and merge YAML files (later ones win), apply `key.sub=value` overrides, validate.

    Raises ConfigError.
    """
    merged: dict[str, Any] = {}
    for file in files:
        merged = merge(merged, _read_yaml(Path(file)))
    for override in overrides:
        merged = merge(merged, _parse_override(override))
    return build_config(merged)


def build_config(values: Mapping[str, Any]) -> Config:
    """Validate a nested mapping. Raises ConfigError."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, Config)) from None


def read_model_config(path: str, key: str = "model.path") -> dict[str, Any]:
    """Read the model's Hugging Face config.json. Raises ConfigError, which names `key`, if there is none."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ConfigError(f"{key}={path}: no config.json there (a Hugging Face checkpoint directory)")
    return read_json_object(file)


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file with one JSON object. Raises ConfigError, which names the file, for any other content."""
    try:
        values = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}, line {error.lineno}: not valid JSON ({error.msg})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected an object of names and values, found {type(values).__name__}")
    return values


def _read_yaml(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"{file}: no such configuration file")
    try:
        with file.open("rb") as stream:  # a stream, so that YAML's errors name the file
            values = yaml.load(stream, Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a word like a number, such as 0x_
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected `section: {{key: value}}`, found {type(values).__name__}")
    return values


def _parse_override(override: str) -> dict[str, Any]:
    dotted, sign, text = override.partition("=")
    if not sign or not dotted:
        raise ConfigError(f"override {override!r}: expected key.sub=value")
    try:
        value: Any = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError):
        value = text
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return value

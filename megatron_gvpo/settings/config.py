"""The whole configuration: typed sections, YAML files merged in order, dotted overrides on top.

`load_config(["train.yaml", "cpu.yaml"], ["optimizer.lr=1e-5"])` returns a validated `Config` or raises
`ConfigError`, which names the key, the value and what would be right. Torch is loaded only for
`rollout.servers.colocated`, whose check asks the transport's class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.core.secrets import resolve
from megatron_gvpo.core.section import LocalPath, Section
from megatron_gvpo.settings.parallel import ParallelConfig
from megatron_gvpo.settings.reward_servers import TeacherConfig
from megatron_gvpo.settings.rewards import RewardsConfig
from megatron_gvpo.settings.rules import cross_check
from megatron_gvpo.settings.sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    SamplingConfig,
    TrainConfig,
)


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

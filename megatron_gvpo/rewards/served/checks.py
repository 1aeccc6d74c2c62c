"""The checks of reward models and judges before anything heavy is loaded."""

from __future__ import annotations

from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.schema import read_model_config
from megatron_gvpo.rewards.served.config import JudgeConfig, RewardModelConfig


def check_served(served: RewardModelConfig | JudgeConfig, key: str) -> None:
    """Raises ConfigError for a missing checkpoint, or one that is not a classifier with one label."""
    if served.path is None:
        return
    where = f"{key}.path"
    config = read_model_config(served.path, where)
    if isinstance(served, JudgeConfig):
        return
    architecture = str((config.get("architectures") or ["(not named)"])[0])
    if not architecture.endswith("ForSequenceClassification"):
        raise ConfigError(
            f"{where}={served.path}: its architecture is {architecture}, and a reward model is a "
            "...ForSequenceClassification with one label"
        )
    labels = config.get("num_labels", len(config.get("id2label") or {}) or 2)  # transformers' default is 2
    if labels != 1:
        raise ConfigError(f"{where}={served.path}: it has {labels} labels, and a reward model has one")

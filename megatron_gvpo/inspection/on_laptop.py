"""The same run as this machine can try it: one rank, fp32, the engine inside the trainer's process."""

from __future__ import annotations

from typing import Any

from megatron_gvpo.settings.config import Config, build_config

# These keys belong to a cluster or a GPU, and do not change what a step computes.
_ROLLOUT = ("engine", "servers", "weights", "speculation", "async_steps", "router_replay", "batch_size")
_MODEL = ("dtype", "fp8")
_TRAIN = ("share_prompts", "head_stash_mb")


def laptop_values(config: Config, **changes: dict[str, Any]) -> dict[str, Any]:
    """The keys of the configuration without those of a cluster, and with `changes` in their sections."""
    values = config.model_dump(mode="json", exclude_unset=True)
    values.pop("parallel", None)
    values.pop("logging", None)
    for section, keys in (("rollout", _ROLLOUT), ("model", _MODEL), ("train", _TRAIN)):
        for key in keys:
            values.get(section, {}).pop(key, None)
    values.get("optimizer", {}).pop("offload_fraction", None)
    values["model"]["dtype"] = "float32"
    values["logging"] = {"progress": "off"}
    for section, own in changes.items():
        values[section] = {**values.get(section, {}), **own}
    return values


def laptop_config(config: Config, **changes: dict[str, Any]) -> Config:
    """The configuration with which this machine tries the run. Raises ConfigError where it has none."""
    return build_config(laptop_values(config, **changes))

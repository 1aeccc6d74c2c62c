"""The configuration of a run as one process of this machine can compute it.

`in_layout` is for a run that has ended. `laptop_config` is for a run that has not started: fp32, and the
engine inside the trainer's process. Nothing here loads torch: commands refuse a wrong run before that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.record import settings_of
from megatron_gvpo.runs.written import CONFIG
from megatron_gvpo.settings.config import Config, build_config, load_config, merge, parse_override

_PATHS = ("path", "convert", "function", "packages", "environment", "program", "tools", "directory")


def load_run(output_dir: Path, overrides: Sequence[str] = (), step: int | None = None) -> Config:
    """The configuration that the run in this directory has recorded. Raises ConfigError.

    `step`: return the one under which this step ran, where the run was resumed with other settings.
    `overrides`: paths that differ on this machine, and secrets that the record lacks, as `{env: NAME}`;
    nothing else, because the run is not changed.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        if key.rpartition(".")[2] not in _PATHS and not value.startswith("{env:"):
            raise ConfigError(
                f"{key}: the run has had its own; only paths may be given, such as model.path=DIR"
            )
    if not (output_dir / CONFIG).is_file():
        raise ConfigError(f"RUN={output_dir}: there is no {CONFIG}: want the output_dir of a run")
    overrides = [*overrides, f"output_dir={output_dir}"]
    earlier = None if step is None else settings_of(output_dir, step)[0]
    if earlier is None:
        return load_config([output_dir / CONFIG], overrides)
    values = yaml.safe_load(earlier)
    for override in overrides:
        values = merge(values, parse_override(override))
    return build_config(values)


def check_model_is_there(config: Config) -> None:
    """Raises ConfigError if the run's model is not at its path on this machine."""
    if not os.path.isfile(os.path.join(config.model.path, "config.json")):
        raise ConfigError(
            f"model.path={config.model.path}: the run's model is not there; give its place on this machine, "
            "model.path=DIR"
        )


def in_layout(config: Config, layout: Sequence[str] = ()) -> Config:
    """The configuration of the same run in another layout: no result of a step depends on it.

    `layout`: overrides of keys of `parallel`; the other keys have their defaults, so that without any it is
    data-parallel over the ranks that there are. Raises ConfigError.
    """
    values = config.model_dump(mode="json", exclude_unset=True)
    values.pop("parallel", None)
    values.get("optimizer", {}).pop("offload_fraction", None)
    values.get("model", {}).pop("fp8", None)
    for override in layout:
        values = merge(values, parse_override(override))
    return build_config(values)


# These keys belong to a cluster or a GPU, and do not change the results of a step.
_ROLLOUT = (
    *("engine", "servers", "weights", "speculation"),
    *("async_steps", "over_sampling_prompts", "router_replay", "batch_size"),
)
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
    algorithm = values.get("algorithm", {})
    if "max_tokens" in changes.get("rollout", {}):
        for shaper in algorithm.get("shapers", ()):
            shaper.pop("buffer", None)  # it may be longer than these responses
    if config.train.updates_per_step == 1:
        algorithm.pop("reference_logprobs", None)  # it needs the responses of older weights
    return values


def laptop_config(config: Config, **changes: dict[str, Any]) -> Config:
    """The configuration with which this machine tries the run.

    Raises ConfigError if this machine cannot try the run.
    """
    return build_config(laptop_values(config, **changes))

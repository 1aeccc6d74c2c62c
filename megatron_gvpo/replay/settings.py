"""The configuration of a run that is over, as this machine can compute it.

Nothing here loads torch: the commands refuse a wrong run before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.runs.written import CONFIG
from megatron_gvpo.settings.config import Config, build_config, load_config


def load_run(output_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration that a run has recorded, of this directory. Raises ConfigError."""
    if not (output_dir / CONFIG).is_file():
        raise ConfigError(f"RUN={output_dir}: there is no {CONFIG}: want the output_dir of a run")
    return load_config([output_dir / CONFIG], [*overrides, f"output_dir={output_dir}"])


def on_one_rank(config: Config) -> Config:
    """The configuration of the same run in one process: no result of a step depends on its layout."""
    values = config.model_dump(mode="json", exclude_unset=True)
    values.pop("parallel", None)
    values.get("optimizer", {}).pop("offload_fraction", None)
    values.get("model", {}).pop("fp8", None)
    return build_config(values)

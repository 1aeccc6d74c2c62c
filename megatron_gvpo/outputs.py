"""What a run writes into its output directory, so that an earlier run is never mixed with a new one."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_gvpo.config import ConfigError

# Named one by one: the directory may hold what is not the run's, as the quickstart's holds its data.
OWN = (
    "checkpoints",
    "hf",
    "hf.partial",
    "metrics.jsonl",
    "summary.json",
    "curve.png",
    "samples.jsonl",
    "tensorboard",
    "profile",
    "wandb_run_id",
)


def refuse_earlier_run(output_dir: str) -> None:
    """Raises ConfigError where an earlier run has left metrics or checkpoints."""
    directory = Path(output_dir)
    if (directory / "metrics.jsonl").exists() or any((directory / "checkpoints").glob("step_*")):
        raise ConfigError(
            f"output_dir={output_dir} holds an earlier run: continue it with --resume, replace it with "
            "--overwrite, or give another output_dir"
        )


def remove_earlier_run(output_dir: str) -> None:
    """Remove the files of an earlier run, and nothing else."""
    for path in (Path(output_dir) / name for name in OWN):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

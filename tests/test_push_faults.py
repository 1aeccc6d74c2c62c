"""What failed pushes cost, and what they leave alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from megatron_gvpo.config import Config, load_config
from megatron_gvpo.rollout.server import TensorSpec
from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.disk import Disk, run_directory


def config_of(good: Path, out: Path, shared: Path | None) -> Config:
    where = f"rollout.weights.directory={shared or 'null'}"
    return load_config([good], ["rollout.engine=sglang", f"output_dir={out}", where])


def test_a_run_removes_nothing_of_others_from_a_directory_that_they_share(good: Path, tmp_path: Path):
    """Another run's weights, and files of the user's own with whatever name."""
    shared = tmp_path / "scratch"
    (shared / "version_0").mkdir(parents=True)
    (shared / "version_0" / "mine").write_text("years of work")
    runs = [Disk(run_directory(config_of(good, tmp_path / name, shared)), 5.0) for name in ("a", "b")]
    bucket = Bucket([TensorSpec("w", "uint8", (4,))], torch.zeros(4, dtype=torch.uint8))

    async def pushed(run: Disk, version: int) -> None:
        await run.begin([], version)
        await run.send(bucket)
        await run.end()

    for version in range(2):
        for run in runs:
            asyncio.run(pushed(run, version))
    found = {str(file.relative_to(shared)) for file in shared.rglob("*.safetensors")}
    assert len(found) == 2 and all("version_1/" in file for file in found)
    asyncio.run(runs[0].close())
    assert len(list(shared.rglob("*.safetensors"))) == 1
    asyncio.run(runs[1].close())
    assert [file.read_text() for file in shared.rglob("*") if file.is_file()] == ["years of work"]


def test_the_weights_of_a_run_that_goes_on_are_where_they_were(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(good, tmp_path / "run", tmp_path / "scratch")
    assert run_directory(config) == run_directory(config) != tmp_path / "scratch"
    monkeypatch.chdir(tmp_path)  # a server need not have been started there
    assert run_directory(config_of(good, Path("run"), None)) == tmp_path / "run" / "weights"
    assert run_directory(config_of(good, Path("run"), Path("scratch"))) == run_directory(config)

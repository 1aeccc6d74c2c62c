"""examples/images: its files fit together, and both trainings run; the first trains the vision tower."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch
from helpers.paths import ROOT
from helpers.tiny_run import StopAfter
from PIL import Image as Picture
from safetensors.torch import load_file

from megatron_gvpo import cli
from megatron_gvpo.core.errors import DataError, RolloutError
from megatron_gvpo.core.signals import Interrupted
from megatron_gvpo.data.image_files import ImageError
from megatron_gvpo.observe import read_metrics
from megatron_gvpo.observe.report.packing import images_of
from megatron_gvpo.observe.rollouts.reader import read_rollouts
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer

EXAMPLE = ROOT / "examples" / "images"
FEW = ("train.prompts_per_step=4", "data.train.limit=16", "train.steps=2", "logging.progress=off")


VARIETY = "rewards.components=[{name: length, function: 'reward.py:length'}]"  # two steps teach no counting


@pytest.fixture
def material(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's model and a few of its pictures, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    task = runpy.run_path(str(EXAMPLE / "make_task.py"))
    task["make_model"](Path("runs/images/task/model"), 0)
    task["SIZES"].update(train=16, test=2)
    task["make_data"](Path("runs/images/task/data"), 0)
    Path("reward.py").write_text("def length(prompt, rollout):\n    return float(len(rollout.token_ids))\n")


@pytest.mark.usefixtures("leave_the_process_group", "material")
def test_the_example_trains(capsys: pytest.CaptureFixture[str]) -> None:
    first = json.loads(Path("runs/images/task/data/train.jsonl").read_text().splitlines()[0])
    counts, final = first["solution"].split("\n")
    assert final == f"\\boxed{{{first['answer']}}}" and counts.endswith(f":{first['answer']}")
    assert sum(int(count[0]) for count in counts.split(",")) % 5 == int(first["answer"])

    cpu, warm = "examples/cpu.yaml", "optimizer.warmup_steps=1"
    assert cli.main(["train", "examples/images/sft.yaml", cpu, *FEW, warm]) == 0
    assert cli.main(["train", "--overwrite", "examples/images/gvpo.yaml", cpu, *FEW, warm, VARIETY]) == 0
    made, tuned, trained = (
        load_file(Path(f"runs/images/{where}/model.safetensors")) for where in ("task/model", "sft/hf", "hf")
    )
    for name, tensor in trained.items():
        tower = "visual" in name
        assert torch.equal(tensor, tuned[name]) == tower, name
        assert not torch.equal(tuned[name], made[name]), name
    before, *steps = read_metrics(Path("runs/images/metrics.jsonl"))
    assert "eval/pass@1" in before and len(steps) == 2
    assert all(step["mismatch/abs_max"] < 1e-4 for step in steps)
    saved = read_rollouts("runs/images")
    names = {row["group"]: row["images"] for row in saved.to_pylist() if row["step"] == 2}
    assert all(len(of_group) == 1 and Path(of_group[0]).is_file() for of_group in names.values())
    assert images_of(saved.filter(pc.field("step") == 2)) == names  # as the report shows them

    assert cli.main(["replay", "runs/images", "--step", "2"]) == 0
    printed = capsys.readouterr().out
    assert "DIFFERS" not in printed and printed.count("not checked") == 1  # the method has no advantages
    [picture] = names[0]
    Picture.open(picture).rotate(180).save(picture)
    assert cli.main(["replay", "runs/images", "--step", "2", "--without-model"]) == 1
    printed = capsys.readouterr().out
    assert f"template: response 0 (group 0, member 0): image 0, {picture}, had another content" in printed
    assert cli.main(["replay", "runs/images", "--step", "2"]) == 1
    missing = f"the data have no image with the content that {picture} had in the run"
    assert missing in capsys.readouterr().out


class LosePictures(Callback):
    def on_step(self, trainer: Trainer, step: int, metrics: Any) -> None:
        if step == 1:
            shutil.rmtree("runs/images/task/data/pictures")


@pytest.mark.usefixtures("leave_the_process_group", "material")
def test_a_run_that_loses_its_pictures_keeps_its_steps() -> None:
    overrides = (*FEW, "optimizer.warmup_steps=1", "data.eval=null", "train.mini_batches=1", VARIETY)
    files = ["examples/images/gvpo.yaml", "examples/cpu.yaml"]
    config = load_config(files, [*overrides, "model.path=runs/images/task/model"])
    with pytest.raises(RolloutError, match=r"image .*pictures/.*png: No such file"):
        Trainer(config, [LosePictures()]).fit()
    assert Path("runs/images/checkpoints/step_00000001/state.json").is_file()


class LosesPictures(Trainer):
    """Loses them in its second step, between sampling and training."""

    def _mini_batches(self, *arguments: Any) -> Any:
        if self.step == 1:
            shutil.rmtree("runs/images/task/data/pictures")
        return super()._mini_batches(*arguments)


@pytest.mark.usefixtures("leave_the_process_group", "material")
def test_a_step_that_loses_its_pictures_leaves_the_steps_before_it() -> None:
    overrides = (*FEW, "optimizer.warmup_steps=1", "data.eval=null", "train.mini_batches=1", VARIETY)
    files = ["examples/images/gvpo.yaml", "examples/cpu.yaml"]
    config = load_config(files, [*overrides, "model.path=runs/images/task/model"])
    with pytest.raises(ImageError, match=r"step 2: image .*png: No such file.*continues from step 1"):
        LosesPictures(config).fit()
    assert Path("runs/images/checkpoints/step_00000001/state.json").is_file()


@pytest.mark.usefixtures("leave_the_process_group", "material")
def test_a_run_does_not_go_on_with_other_pictures() -> None:
    """The data file, which only names them, is the same."""
    overrides = (*FEW, "optimizer.warmup_steps=1", "data.eval=null", "train.mini_batches=1", VARIETY)
    more = ("model.path=runs/images/task/model", "checkpoint.every=1", "checkpoint.export_hf=false")
    files = ["examples/images/gvpo.yaml", "examples/cpu.yaml"]
    with suppress(Interrupted):
        Trainer(load_config(files, [*overrides, *more]), [StopAfter(1)]).fit()
    picture = Path("runs/images/task/data/pictures/train-15.png")
    Picture.new("RGB", Picture.open(picture).size, "red").save(picture)
    with pytest.raises(DataError, match="its images are not those that the checkpoint was trained on"):
        Trainer(load_config(files, [*overrides, *more]), resume=True)


@pytest.mark.proof
@pytest.mark.usefixtures("leave_the_process_group", "material")
@pytest.mark.parametrize("recipe", ["grpo_care", "vspo", "tempsamp_r1", "reg_grpo"])
def test_the_methods_of_papers_on_images_and_videos_train(recipe: str) -> None:
    """DeepVideo-R1's method is reg_grpo. They see images here, as the papers' frames are."""
    start = ("model.path=runs/images/task/model", "data.train.demonstration_key=solution", "data.eval=null")
    few = (*FEW, "optimizer.warmup_steps=1", "train.mini_batches=1", VARIETY)
    files = ("examples/images/gvpo.yaml", "examples/cpu.yaml")
    assert cli.main(["train", "--overwrite", *files, *start, *few, f"algorithm={recipe}"]) == 0
    _, *steps = read_metrics(Path("runs/images/metrics.jsonl"))
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["mismatch/abs_max"] < 1e-4 and step["train/grad_norm"] > 0 for step in steps)


@pytest.mark.proof
def test_the_example_learns(tmp_path: Path) -> None:
    """GVPO raises the held-out pass@1 of the fine-tuned model by 20 points or more."""
    command = [sys.executable, str(EXAMPLE / "run.py"), "logging.progress=off"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=3600)
    result = json.loads((tmp_path / "runs" / "images" / "result.json").read_text())
    before, *_, after = (line["eval/pass@1"] for line in result["evaluations"])
    assert after >= before + 0.2, result

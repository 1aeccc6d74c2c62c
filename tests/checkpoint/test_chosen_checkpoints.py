"""Exports on the way, the best checkpoint, and `--step` of `eval` and `export`, on a real run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from helpers.inputs.good_config import GOOD
from helpers.tiny_run import GVPO, StopAfter, configure, fit, records
from safetensors.torch import load_file

from megatron_gvpo.cli import main
from megatron_gvpo.core.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megatron_gvpo.core.yaml_files import Loader
from megatron_gvpo.megatron.checkpoint.load import load_newest
from megatron_gvpo.runs.existing_run import exported_step
from megatron_gvpo.runs.record import Best
from megatron_gvpo.settings.config import build_config
from megatron_gvpo.settings.sections import BestConfig, CheckpointConfig
from megatron_gvpo.training import checkpoints
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.checkpoints import Checkpoints

LOWEST = "checkpoint.keep_best={metric: reward/mean, order: lowest}"
HOW = (*GVPO, "data.eval=null", "checkpoint.every=1", "checkpoint.keep=1", "checkpoint.export_every=2")


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in directory.iterdir())


def worst(out: Path) -> int:
    rewards = {line["step"]: line["reward/mean"] for line in records(out) if line["step"]}
    return min(rewards, key=rewards.__getitem__)


@pytest.fixture(scope="module")
def chosen(task, tmp_path_factory) -> Path:
    """A run of four steps, resumed after two, that keeps the step with the lowest reward: an early one."""
    out = tmp_path_factory.mktemp("chosen") / "run"
    fit(configure(task, out, *HOW, LOWEST), [StopAfter(2)])
    fit(configure(task, out, *HOW, LOWEST), resume=True)
    return out


@pytest.mark.usefixtures("leave_the_process_group")
def test_the_best_checkpoint_stays_beside_the_newest(chosen):
    best = worst(chosen)
    assert best < 4, "otherwise the test shows nothing"
    assert steps(chosen / "checkpoints") == [best, 4]
    state = json.loads((chosen / "checkpoints" / "step_00000004" / "state.json").read_text())
    assert state["best"]["step"] == best, "a resumed run knows it"


@pytest.mark.usefixtures("leave_the_process_group")
def test_exports_on_the_way(chosen, task, tmp_path):
    assert steps(chosen / "exports") == [2, 4]
    last = load_file(chosen / "hf" / "model.safetensors")
    fourth = load_file(chosen / "exports" / "step_00000004" / "model.safetensors")
    assert all(torch.equal(last[name], fourth[name]) for name in last)
    words = [str(task / "run.yaml"), f"output_dir={chosen}", *HOW, LOWEST, "--step", str(worst(chosen))]
    assert main(["export", *words, "--out", str(tmp_path / "hf")]) == 0
    written, best = (load_file(d / "model.safetensors") for d in (tmp_path / "hf", chosen / "hf_best"))
    assert all(torch.equal(written[name], best[name]) for name in best)
    assert not all(torch.equal(written[name], last[name]) for name in last)


class SeeExports(Callback):
    """Reads the exports before the first step."""

    def on_start(self, trainer):
        out = Path(trainer.config.output_dir)
        self.seen = {export: load_file(out / export / "model.safetensors") for export in EXPORTS}


EXPORTS = ("hf_best", "exports/step_00000002")


@pytest.mark.usefixtures("leave_the_process_group")
def test_exports_that_a_kill_has_left_out_are_written_on_resume(task, tmp_path):
    """As a kill leaves it after the checkpoint of step 2: that step is the best, and hf_best is of step 1."""
    latest = "checkpoint.keep_best={metric: train/lr, order: lowest}"  # its decay makes the newest the best
    how = (*HOW, latest, "optimizer.warmup_steps=0")
    fit(configure(task, tmp_path, *how), [StopAfter(2)])
    expected = {export: load_file(tmp_path / export / "model.safetensors") for export in EXPORTS}
    assert exported_step(tmp_path / "hf_best") == 2
    shutil.rmtree(tmp_path / "exports")
    (tmp_path / "hf_best" / "export.json").write_text('{"step": 1}')
    (tmp_path / "hf_best" / "model.safetensors").unlink()
    exports = SeeExports()
    fit(configure(task, tmp_path, *how, "train.steps=2"), [exports], resume=True)
    for export, tensors in exports.seen.items():
        assert all(torch.equal(tensors[name], expected[export][name]) for name in expected[export]), export


def test_a_best_model_of_a_lost_checkpoint_is_named(tmp_path, monkeypatch, caplog):
    """As a damaged newest checkpoint leaves it: the run goes on from step 2, and hf_best is of step 4."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoints, "broadcast_msgpack", lambda missing: missing)
    (tmp_path / "hf_best").mkdir()
    written = object.__new__(Checkpoints)
    written._out, written._best = tmp_path, Best(BestConfig(metric="reward/mean"))
    written._options = CheckpointConfig(every=1, keep_best={"metric": "reward/mean"})
    assert "metric=reward/mean: no step that has a checkpoint had this metric" in str(written.without_best())
    written._best.offer(1, {"reward/mean": 0.5})
    assert written.without_best() is None
    for step, warned in ((2, False), (4, True)):
        (tmp_path / "hf_best" / "export.json").write_text(f'{{"step": {step}}}')
        written.complete_exports(2)
        assert ("hf_best is of step 4, whose checkpoint is lost" in caplog.text) is warned
    assert "from step 2: the best step up to there is 1; hf_best stays until" in caplog.text


def test_a_damaged_checkpoint_that_was_named_tells_of_the_others(tmp_path, monkeypatch):
    """`--overwrite`, the remedy where no checkpoint is intact, would remove them."""
    for step in (2, 4, 6):
        (tmp_path / f"step_{step:08d}").mkdir()
        (tmp_path / f"step_{step:08d}" / "state.json").write_text("{}")

    def damaged(directory: Path) -> None:
        raise DamagedCheckpointError(f"{directory}: a tensor is damaged")

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(CheckpointError, match=r"_00000004: a tensor is damaged; .*of the steps 2, 6$"):
        load_newest(tmp_path, damaged, step=4)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact .*--overwrite"):
        load_newest(tmp_path, damaged)


@pytest.mark.parametrize("error", [DamagedCheckpointError, CheckpointError])
def test_a_checkpoint_that_a_living_run_removes_is_not_damaged(tmp_path, monkeypatch, error):
    """`eval` and `export` read beside a run, which keeps its newest checkpoints alone."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    def write(step: int) -> Path:
        (tmp_path / f"step_{step:08d}").mkdir()
        (tmp_path / f"step_{step:08d}" / "state.json").write_text("{}")
        return tmp_path / f"step_{step:08d}"

    def load(directory: Path) -> str:
        if directory == first:
            write(4)
            shutil.rmtree(first)
            raise error(f"{directory}: a file is missing")
        return directory.name

    first = write(2)
    assert load_newest(tmp_path, load) == "step_00000004"


@pytest.mark.usefixtures("leave_the_process_group")
def test_eval_takes_a_step(chosen, task, capsys):
    words = [str(task / "run.yaml"), f"output_dir={chosen}", *GVPO]
    printed = []
    for which in (["--step", str(worst(chosen))], ["--step", "4"], ["--resume"]):
        assert main(["eval", *words, *which]) == 0
        out = capsys.readouterr().out
        printed.append(json.loads(out[out.index("{") :]))
    assert printed[1] == printed[2] != printed[0]


@pytest.mark.parametrize("command", [["eval"], ["export", "--out", "none"]])
def test_a_step_without_a_checkpoint_is_refused(command, task, tmp_path, capsys):
    for name in ("step_00000002", "step_00000004"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "state.json").write_text("{}")
    name, *more = command
    assert main([name, str(task / "run.yaml"), f"output_dir={tmp_path}", *GVPO, *more, "--step", "77"]) == 2
    error = capsys.readouterr().err
    assert "--step 77" in error and "(it has: 2, 4)" in error


def test_the_first_of_equal_ones_is_best_and_other_metrics_are_forgotten():
    highest, lowest = BestConfig(metric="m"), BestConfig(metric="m", order="lowest")
    best = Best(highest)
    offered = [best.offer(step, m) for step, m in enumerate([{}, {"m": 1}, {"m": 2}, {"m": 2}, {"m": 1}], 1)]
    assert offered == [False, True, True, False, False] and best.step == 3
    again, other = Best(highest), Best(lowest)
    again.load_state_dict(best.state_dict())
    other.load_state_dict(best.state_dict())
    assert (again.step, other.step) == (3, None)
    assert not again.offer(5, {"m": float("nan")}) and other.offer(5, {"m": 7})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"export_every": 2}, "checkpoint.export_every=2 with checkpoint.every=0"),
        ({"keep_best": {"metric": "reward/mean"}}, "set checkpoint.every"),
        ({"every": 5, "keep_best": {"metric": "eval/pas@1"}}, "no metric has this name"),
        ({"every": 5, "keep_best": {"metric": "eval/pass@1"}}, "set data.eval"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        build_config({**yaml.load(GOOD, Loader), "checkpoint": keys})

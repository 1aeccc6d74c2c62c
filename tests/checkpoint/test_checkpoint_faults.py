"""Disks that fill while a checkpoint is written, and damaged checkpoints: whole runs on a tiny task."""

from __future__ import annotations

import os
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
from helpers.tiny_run import (
    GVPO,
    SHORT,
    assert_same_run,
    configure,
    fit,
    records,
    weights,
)

from megatron_gvpo.core.errors import CheckpointError
from megatron_gvpo.megatron.checkpoint.directory import complete_checkpoints
from megatron_gvpo.megatron.checkpoint.state import bare_chunks
from megatron_gvpo.training.callbacks import Callback

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


class FullDisk(Callback):
    """From some checkpoint on, no file may grow beyond 1 MB: checkpoints are larger than that, metrics are
    not.
    """

    def __enter__(self):
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        return self

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)

    def on_checkpoint(self, trainer, directory):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, self.limits[1]))


def test_a_disk_full_while_saving_leaves_the_previous_checkpoint(task, tmp_path, finished):
    config = configure(task, tmp_path, *GVPO, "checkpoint.every=1", "checkpoint.keep=1")
    with (
        FullDisk() as disk,
        pytest.raises(CheckpointError, match=r"cannot write .*step_00000002: .* MiB are free there"),
    ):
        fit(config, [disk])
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step_00000001"]
    assert (tmp_path / "checkpoints" / "step_00000002.partial").is_dir(), (
        "what was left of it is not a checkpoint"
    )
    (tmp_path / "checkpoints" / "step_00000009.partial").mkdir()
    fit(config, resume=True)
    assert_same_run(tmp_path, finished)
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step_00000004"]
    assert not list((tmp_path / "checkpoints").glob("step_*.*")), "nor anything else that was not finished"


def test_a_disk_full_while_saving_in_the_background_is_reported(task, tmp_path):
    """The error comes before the next update, and the previous checkpoint stays."""

    class FullLater(FullDisk):
        def on_step(self, trainer, step, metrics):
            if step == 2:  # the checkpoint of step 1 was complete before the update
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, self.limits[1]))

        def on_checkpoint(self, trainer, directory):
            pass

    config = configure(task, tmp_path, *GVPO, *SHORT, "checkpoint.every=1", "checkpoint.asynchronous=true")
    with FullLater() as disk, pytest.raises(CheckpointError, match=r"cannot write .*step_00000002"):
        fit(config, [disk])
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step_00000001"]
    assert records(tmp_path)[-1]["step"] == 2


def test_a_rank_that_hangs_while_saving_in_the_background_ends_the_run_as_elsewhere(task, tmp_path):
    """Fails on the old code, in which the others waited half an hour, whatever the configuration says."""
    limits = []

    class Look(Callback):
        def on_checkpoint(self, trainer, directory):
            group = trainer.components.policy.background_group()
            limits.append(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())

    own = ("train.steps=1", "checkpoint.asynchronous=true", "parallel.timeout_seconds=77")
    fit(configure(task, tmp_path, *GVPO, *SHORT, *own), [Look()])
    assert limits == [77.0]


def test_a_disk_full_while_exporting_leaves_the_export_and_the_checkpoint(task, tmp_path):
    fit(configure(task, tmp_path, *GVPO, "train.steps=2"))
    before = weights(tmp_path)
    with FullDisk() as disk, pytest.raises(CheckpointError, match=r"cannot write .*hf: .*File too large"):
        fit(configure(task, tmp_path, *GVPO, "train.steps=3"), [disk], resume=True)
    after = weights(tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert complete_checkpoints(tmp_path / "checkpoints")[-1].name == "step_00000003"
    fit(configure(task, tmp_path, *GVPO, "train.steps=3"), resume=True)
    assert not all(torch.equal(before[name], tensor) for name, tensor in weights(tmp_path).items())


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("state.json", b"{}", "state.json is not the state of a checkpoint .*: KeyError: 'layout'"),
        ("state.json", b"\x00", "state.json, line 1: not valid JSON"),
        ("__0_0.distcp", b"cut off", "cannot read .*step_00000004: "),
        (".metadata", None, "cannot read .*step_00000004: "),
    ],
)
def test_a_damaged_checkpoint_is_named(task, tmp_path, finished, file, content, message):
    checkpoint = tmp_path / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    for source in (finished / "checkpoints" / "step_00000004").iterdir():
        (checkpoint / source.name).write_bytes(source.read_bytes())
    (checkpoint / file).unlink()
    if content is not None:
        (checkpoint / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        fit(configure(task, tmp_path, *GVPO), resume=True)


def test_a_damaged_newest_checkpoint_is_replaced_by_the_newest_whole_one(task, tmp_path, finished, caplog):
    """Checkpoints 3 and 4 of three are damaged: the run goes on from step 2."""
    shutil.copytree(finished, tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    shard = checkpoints / "step_00000004" / "__0_0.distcp"
    state = checkpoints / "step_00000003" / "state.json"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    state.write_text(state.read_text().replace('"step": 3', '"step": -3'))
    fit(configure(task, tmp_path / "run", *GVPO, "checkpoint.keep=3"), resume=True)
    assert_same_run(tmp_path / "run", finished)
    first, second, used = [r.getMessage() for r in caplog.records if r.name.endswith("load")]
    assert re.search(f"{shard} is damaged: .* is not what was saved .*; trying step_00000003", first)
    assert re.search(f"{state} is damaged: it is not what was saved .*; trying step_00000002", second)
    assert f"{checkpoints}/step_00000002 is used; step_00000004, step_00000003 are newer, and damaged" in used
    names = [f"step_0000000{name}" for name in ("2", "3.damaged", "4", "4.damaged")]
    assert sorted(path.name for path in checkpoints.iterdir()) == names


def test_a_named_checkpoint_is_on_the_disk(task, tmp_path, monkeypatch):
    """If the node fails right after it got its name, no file lacks its content."""
    synced, named, fsync, replace = set(), {}, os.fsync, os.replace

    def noted(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def name(source, target):
        if Path(source).suffix == ".partial":
            inside = [Path(source), *Path(source).rglob("*")]
            named[Path(target).name] = {path.name for path in inside if path.stat().st_ino not in synced}
            synced.clear()
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", name)
    ema = 'algorithm.loss.reference={"name": "ema", "decay": 0.9}'
    fit(configure(task, tmp_path, *GVPO, *SHORT, ema, "train.steps=1"))
    assert named == {"step_00000001": set()}
    assert (tmp_path / "checkpoints").stat().st_ino in synced, "the name, too"


@pytest.fixture
def without_critic(task, tmp_path):
    """A run of two steps, by a method without a critic, and the settings that continue it with one."""
    fit(configure(task, tmp_path, *SHORT, "algorithm=grpo", "train.steps=2"))
    return *SHORT, "algorithm=ppo", "algorithm.critic.lr=1e-3", "train.steps=4", "checkpoint.every=1"


def test_a_critic_that_the_former_method_lacked_starts_anew(task, tmp_path, without_critic, caplog):
    """Its absence was called damage of every checkpoint, and --overwrite was the advice."""

    class Before(Callback):
        def on_start(self, trainer):
            policy = trainer.components.policy
            self.steps = policy.critic.optimizer.steps, policy.optimizer.steps
            heads = [chunk.output_layer for chunk in bare_chunks(policy.critic.model).values()]
            self.is_new = not any(parameter.any() for head in heads for parameter in head.parameters())

    ppo, before = configure(task, tmp_path, *without_critic), Before()
    fit(ppo, [before], resume=True, allow_change=["algorithm"])
    assert before.steps == (0, 2) and before.is_new
    text = (
        f"{tmp_path}/checkpoints/step_00000002 has no critic, because its run had none: a new one is trained"
    )
    assert any(message.startswith(text) for message in caplog.messages)
    assert [line["step"] for line in records(tmp_path)] == [0, 1, 2, 3, 4]
    assert records(tmp_path)[-1]["train/value_loss"] > 0

    # A lost critic is damage: step 3 is taken, which has one.
    caplog.clear()
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000004" / "critic")
    fit(ppo, resume=True)
    assert (tmp_path / "checkpoints" / "step_00000004.damaged").is_dir() and text not in caplog.messages


def test_a_critic_is_not_new_after_a_damaged_one(task, tmp_path, without_critic, caplog):
    """Step 3's critic is read in part, before step 2, which has none, is tried."""
    ppo = configure(task, tmp_path, *without_critic, "train.steps=3")
    fit(ppo, resume=True, allow_change=["algorithm"])
    shard = tmp_path / "checkpoints" / "step_00000003" / "critic" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(
        CheckpointError, match=r"step_00000002 has no critic.* move .*step_00000003 elsewhere"
    ):
        fit(ppo, resume=True)
    os.replace(tmp_path / "checkpoints" / "step_00000003", tmp_path / "elsewhere")
    fit(ppo, resume=True)
    assert [line["step"] for line in records(tmp_path)] == [0, 1, 2, 3]

    # The policy is read first, so the critic is still new.
    caplog.clear()
    shard = tmp_path / "checkpoints" / "step_00000003" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    fit(ppo, resume=True)
    assert (tmp_path / "checkpoints" / "step_00000003.damaged").is_dir()
    assert "step_00000002 has no critic, because" in caplog.text


def test_nothing_of_a_damaged_checkpoint_stays(task, tmp_path):
    """Its policy is whole and is loaded before its damaged critic: then step 3 replaces all of it."""
    ppo = (*SHORT, "algorithm=ppo", "algorithm.critic.lr=1e-3", "checkpoint.every=1", "checkpoint.keep=2")
    fit(configure(task, tmp_path, *ppo))
    before, checkpoints = records(tmp_path), tmp_path / "checkpoints"
    shard = checkpoints / "step_00000004" / "critic" / "__0_0.distcp"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    fit(configure(task, tmp_path, *ppo), resume=True)
    assert (checkpoints / "step_00000004.damaged").is_dir()
    assert records(tmp_path) == before, "the learning rate, too"

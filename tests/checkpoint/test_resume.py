"""A resumed run equals an uninterrupted one exactly, in every bit of the weights and every metric but the
times.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.distributed import launch
from helpers.tiny_run import (
    ENGINE_REFERENCE,
    GVPO,
    SHORT,
    StopAfter,
    assert_same_run,
    configure,
    fit,
    records,
    reward_options,
)

from megatron_gvpo.core.errors import CheckpointError, ConfigError, DamagedCheckpointError
from megatron_gvpo.megatron.checkpoint.directory import complete_checkpoints, read_record
from megatron_gvpo.observe import read_metrics
from megatron_gvpo.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


METHODS = {
    "gvpo": GVPO,
    "engine's reference": ENGINE_REFERENCE,
    "saved in the background": (*GVPO, "checkpoint.every=1", "checkpoint.asynchronous=true"),
    "ema": ("checkpoint.asynchronous=true", *GVPO, 'algorithm.loss.reference={"name": "ema", "decay": 0.9}'),
    # Its reference is fixed: model.path.
    "grpo": ("algorithm=grpo", "train.mini_batches=2", "algorithm.loss.importance={cap: 2.0}"),
    "ppo": ("algorithm=ppo", "train.mini_batches=2", "algorithm.critic.lr=1e-3"),
}
IN_TEST = ("gvpo", "saved in the background", "ppo")


@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=() if name in IN_TEST else pytest.mark.proof) for name in METHODS],
)
def test_a_resumed_run_equals_an_uninterrupted_one(task, tmp_path, method):
    overrides, uninterrupted, parts = METHODS[method], tmp_path / "whole", tmp_path / "parts"
    fit(configure(task, uninterrupted, *overrides))
    stopped = fit(configure(task, parts, *overrides, reward_options(task, signal_in=2)))
    assert stopped.step == 2
    fit(configure(task, parts, *overrides), resume=True)
    assert_same_run(uninterrupted, parts)
    if method != "gvpo":
        assert records(parts)[-1]["train/kl"] > 0, "the policy has left its reference"
    if method == "ppo":
        assert records(parts)[-1]["train/value_loss"] < records(parts)[1]["train/value_loss"]
    if method == "grpo":
        assert records(parts)[-1]["train/importance"] == pytest.approx(1, abs=1e-5)


def test_the_learning_rate_follows_the_present_number_of_updates(task, tmp_path):
    """A run of two updates a step would be at the end of its decay after half of its steps with one."""
    uninterrupted, parts, one = tmp_path / "whole", tmp_path / "parts", ("algorithm=ppo", *SHORT)
    fit(configure(task, uninterrupted, *one))
    fit(configure(task, parts, *one, "train.mini_batches=2"), [StopAfter(2)])
    resumed = fit(configure(task, parts, *one), resume=True, allow_change=("train.mini_batches",))
    assert [r["train/lr"] for r in records(parts)[3:]] == [r["train/lr"] for r in records(uninterrupted)[3:]]
    policy = resumed.components.policy
    assert policy.critic.optimizer.scheduler.num_steps == policy.optimizer.scheduler.num_steps == 4


def test_a_signal_does_not_write_a_checkpoint_again(task, tmp_path):
    """A large checkpoint takes minutes, which the job that gets the signal may not have."""

    class Written(StopAfter):
        def __init__(self, step: int) -> None:
            super().__init__(step)
            self.names: list[str] = []

        def on_start(self, trainer: Trainer) -> None:
            self.on_step(trainer, trainer.step, {})

        def on_checkpoint(self, trainer: Trainer, directory: Path) -> None:
            self.names.append(directory.name)

    options = (*GVPO, *SHORT, "checkpoint.every=1")
    fit(configure(task, tmp_path, *options), [written := Written(2)])
    assert written.names == ["step_00000001", "step_00000002"]
    state = tmp_path / "checkpoints" / "step_00000002" / "state.json"
    content, before = state.read_bytes(), state.stat()
    again = fit(configure(task, tmp_path, *options), [written := Written(2)], resume=True)
    assert again.step == 2 and written.names == [] and again.checkpoints.last == state.parent
    assert state.read_bytes() == content and state.stat().st_ino == before.st_ino
    fit(configure(task, tmp_path, *options), [written := Written(9)], resume=True)
    assert written.names == ["step_00000003", "step_00000004"]


def test_lost_and_repeated_records_of_steps_are_told_and_mended(task, tmp_path, caplog):
    fit(configure(task, tmp_path, *GVPO, reward_options(task, signal_in=3)))
    metrics = tmp_path / "metrics.jsonl"
    zero, _, two = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(zero + two.replace('{"step": 2', '{"step": 2, "old": 1') + zero + two)
    fit(configure(task, tmp_path, *GVPO), resume=True)
    assert [record["step"] for record in records(tmp_path)] == [0, 2, 3, 4]
    assert not any("old" in record for record in records(tmp_path)), "the last one stays"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("metrics.jsonl has no record of step 1: " in text for text in warnings)
    assert any(
        "metrics.jsonl had several records of steps 0, 2: the last of each stays" in t for t in warnings
    )


def test_a_checkpoint_with_the_name_of_another_step_is_not_read(task, tmp_path):
    fit(configure(task, tmp_path, *SHORT, *GVPO, "train.steps=2"))
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(checkpoints / "step_00000002", checkpoints / "step_00000001")
    shutil.copytree(checkpoints / "step_00000002", checkpoints / "step_00000900")
    for name in ("step_00000001", "step_00000900"):
        with pytest.raises(CheckpointError, match=f"{name} is not .*is of step 2; rename") as refused:
            read_record(checkpoints / name)
        assert not isinstance(refused.value, DamagedCheckpointError)
    with pytest.raises(ConfigError, match=r"step_00000900 is not .*is of step 2; rename"):
        fit(configure(task, tmp_path, *SHORT, *GVPO), resume=True)
    assert len(list(checkpoints.iterdir())) == 3, "none is called damaged"


def test_resume_of_sft(task, tmp_path, caplog):
    overrides, uninterrupted, parts = (
        ("algorithm=sft", "data.eval=null"),
        tmp_path / "whole",
        tmp_path / "parts",
    )
    fit(configure(task, uninterrupted, *overrides))
    assert records(uninterrupted)[-1]["train/loss"] < records(uninterrupted)[1]["train/loss"]
    assert fit(configure(task, parts, *overrides), [StopAfter(2)]).step == 2
    fit(configure(task, parts, *overrides), resume=True)
    assert "prompts are not those" not in caplog.text
    assert_same_run(uninterrupted, parts)
    seconds = json.loads((parts / "summary.json").read_text())["seconds"]
    lines = read_metrics(parts / "metrics.jsonl")
    of_steps = {name: sum(line.get(f"time/{name}", 0) for line in lines) for name in ("training", "step")}
    assert seconds["training"] == pytest.approx(of_steps["training"]), "of both starts"
    assert seconds["total"] > of_steps["step"]


def test_a_method_that_chooses_prompts_otherwise_goes_on(task, tmp_path, caplog):
    """The checkpoint of the method that draws them by weight was called damaged."""
    first, second = "vspo", "gvpo"
    for steps, method, allowed in ((1, first, ()), (2, second, ["algorithm"]), (3, first, ["algorithm"])):
        how = (*SHORT, f"algorithm={method}", f"train.steps={steps}")
        fit(configure(task, tmp_path, *how), resume=steps > 1, allow_change=allowed)
    assert caplog.text.count("the order of prompts (algorithm.prompts)") == 2
    assert [line["step"] for line in records(tmp_path)] == [0, 1, 2, 3]


def test_resume_while_groups_are_accumulated(task, tmp_path):
    uninterrupted, parts = tmp_path / "whole", tmp_path / "parts"
    gpg = ("algorithm=gpg", "algorithm.batch_policy.threshold=1.0", "rollout.n=3", "data.eval=null")
    fit(configure(task, uninterrupted, *gpg, reward_options(task, coarse=True)))
    rounds = [int(line["batch/rounds"]) for line in records(uninterrupted)[1:]]
    step = next(i for i, needed in enumerate(rounds) if i and needed > 1)
    signal = reward_options(task, coarse=True, signal_in=step + 1)
    assert fit(configure(task, parts, *gpg, signal)).step == step, "stopped within the step after it"
    (saved,) = complete_checkpoints(parts / "checkpoints")
    assert json.loads((saved / "state.json").read_text())["batch_policy"]["pending"]
    fit(configure(task, parts, *gpg, reward_options(task, coarse=True)), resume=True)
    assert_same_run(uninterrupted, parts)


def test_a_resumed_run_has_the_date_on_which_it_began(task, tmp_path, caplog):
    """A chat template may write it, and prompts would change in mid-run."""
    model = shutil.copytree(task / "model", tmp_path / "model")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ strftime_now('%Y') }}"
    (model / "chat_template.jinja").write_text(template)
    overrides = (*GVPO, *SHORT, f"model.path={model}")
    fit(configure(task, tmp_path, *overrides, "train.steps=1"))
    (record := tmp_path / "run.json").write_text(record.read_text().replace('"time": "20', '"time": "17'))
    file = model / "generation_config.json"  # another change that the records of files do not show
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [1, 3]}))
    trainer = Trainer(configure(task, tmp_path, *overrides, "train.steps=2"), resume=True)
    assert {prompt.text[-4:-2] for prompt in trainer.components.prompts} == {"17"}
    assert "the prompts are not those that the checkpoint was trained on" in caplog.text, "of another year"
    assert "responses end with one of the tokens [1, 3], and ended with one of [1] when" in caplog.text
    trainer = Trainer(configure(task, tmp_path, *overrides), overwrite=True)
    assert {prompt.text[-4:-2] for prompt in trainer.components.prompts} == {"20"}
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000001")  # as a kill before the first checkpoint left it
    for name in ("summary.json", "curve.png"):
        (tmp_path / name).unlink(missing_ok=True)
    trainer = Trainer(configure(task, tmp_path, *overrides), resume="auto")
    assert {prompt.text[-4:-2] for prompt in trainer.components.prompts} == {"20"}, "it starts again"


@pytest.mark.proof  # test_resharding.py resumes on several ranks
def test_resume_on_two_ranks(task, tmp_path):
    launch("helpers.workers.trainer_worker:interrupted_and_not", [2], str(task), str(tmp_path))
    assert len(list((tmp_path / "dp2-whole" / "hf").glob("*.safetensors"))) > 2, "it exceeded small constants"
    for layout in ("dp2", "tp2"):
        assert_same_run(tmp_path / f"{layout}-whole", tmp_path / f"{layout}-parts")
    assert fit(configure(task, tmp_path / "tp2-whole", *GVPO), resume=True).step == 4, (
        "another layout reads it"
    )


def test_an_interrupt_before_the_first_step(task, tmp_path, finished, monkeypatch):
    """Starting the workers is part of start-up: nothing has been trained yet, and the run can be resumed."""
    monkeypatch.setenv("SIGNAL_WHILE_LOADING", "1")
    stopped = fit(configure(task, tmp_path, *GVPO, "checkpoint.every=2", "checkpoint.export_every=1"))
    assert stopped.step == 0
    assert not (tmp_path / "exports").exists(), "the base model is not copied in the seconds before a kill"
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step_00000000"]
    monkeypatch.delenv("SIGNAL_WHILE_LOADING")
    fit(configure(task, tmp_path, *GVPO), resume=True)
    assert_same_run(tmp_path, finished)


def test_rewards_that_end_with_the_job_are_not_counted(task, tmp_path):
    """Slurm ends every process of a job, reward subprocesses too; their failure says nothing about the
    policy.
    """
    uninterrupted, parts, every_step = (
        tmp_path / "whole",
        tmp_path / "parts",
        ("checkpoint.every=1", "eval.every=0"),
    )
    fit(configure(task, uninterrupted, *GVPO, *every_step))
    killed = reward_options(task, signal_in=3, killed=True)
    assert fit(configure(task, parts, *GVPO, *every_step, killed)).step == 2
    fit(configure(task, parts, *GVPO, *every_step), resume=True)
    assert_same_run(uninterrupted, parts)


def test_a_checkpoint_of_other_data_is_refused(task, finished):
    with pytest.raises(ValueError, match=r"trained on 48 prompts, and data\.train now has 40"):
        other = configure(task, finished, *GVPO, "data.train.limit=40")
        fit(other, resume=True, allow_change=("data.train.limit",))

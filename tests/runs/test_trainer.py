"""The main job end to end on a tiny task: real megatron-core, embedded engine, reward workers.

test_resume.py tests interrupted runs, test_checkpoint_faults.py full disks and damaged checkpoints.
"""

from __future__ import annotations

import json
import shutil
import time

import pytest
import torch
from helpers.distributed import launch
from helpers.tiny_run import (
    GVPO,
    SHORT,
    StopAfter,
    configure,
    fit,
    records,
    reward_options,
    weights,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gvpo.core.errors import ConfigError, RolloutError
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.checkpoint.directory import complete_checkpoints
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.sampling.samplers import EngineSampler
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.checkpoints import Checkpoints
from megatron_gvpo.training.components import Components
from megatron_gvpo.training.trainer import Trainer
from megatron_gvpo.types import TrainBatch

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


def test_a_run_leaves_its_records(finished):
    lines = records(finished)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval/pass@2" in line] == [0, 2, 4]
    assert all(line["train/skipped"] == 0 for line in lines[1:])
    assert all(line["train/kl"] > 0 for line in lines[1:]), "the second mini-batch looks back at step start"
    assert [line["response/weight_version"] for line in lines[1:]] == [0, 1, 2, 3], "samples are on-policy"
    for line in lines[1:]:  # the first mini-batch's weights are known beforehand, the second's are not
        assert (line["head/known"], line["head/stash"]) == pytest.approx((0.5, 0.5))
        assert line["head/stash_mb"] > 0
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["steps"] == 4
    assert (summary["pass_at_1_before"], summary["pass_at_1_after"]) == tuple(
        lines[i]["eval/pass@1"] for i in (0, 4)
    )
    phases = {"rollout", "reward", "scoring", "training", "sync", "checkpoint"}
    assert phases < summary["seconds"].keys()
    assert sum(summary["seconds"][name] for name in phases) <= summary["seconds"]["total"]
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((finished / "profile").glob("rank0_steps2-2.json.gz"))
    checkpoints = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert checkpoints == ["step_00000002", "step_00000003", "step_00000004"]


def test_a_run_without_metrics_comes_to_its_end(task, finished, tmp_path):
    """Fails on the old code: it found nothing to plot, and ended with Python's error after its export."""
    shutil.copytree(finished, tmp_path / "out")
    (tmp_path / "out" / "metrics.jsonl").unlink()  # as the message about damaged metrics proposes
    shutil.rmtree(tmp_path / "out" / "hf")  # the run was stopped before its export
    settings = ("checkpoint.every=1", "checkpoint.keep=3", "logging.tensorboard=true")
    config = configure(task, tmp_path / "out", *GVPO, *settings, "logging.profile_steps=[2, 2]")
    fit(config, resume=True)
    assert (tmp_path / "out" / "hf" / "config.json").is_file()
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["pass_at_1_before"] is None


def test_a_resumed_run_refuses_the_metrics_of_another(task, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "out")
    file = tmp_path / "out" / "metrics.jsonl"
    *earlier, last = file.read_text().splitlines()
    record = json.loads(last)
    record["reward/mean"] += 0.01
    file.write_text("\n".join([*earlier, json.dumps(record)]) + "\n")
    settings = ("checkpoint.every=1", "checkpoint.keep=3", "logging.tensorboard=true")
    config = configure(task, tmp_path / "out", *GVPO, *settings, "logging.profile_steps=[2, 2]")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: its record of step 4 is not .*reward/mean"):
        fit(config, resume=True)


def test_tensorboard_has_what_the_metrics_have(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert rewards == [
        (line["step"], pytest.approx(line["reward/mean"])) for line in records(finished) if line["step"]
    ]


def test_transformers_agrees_with_the_trained_policy(task, finished):
    config = configure(task, finished, *GVPO)
    parts = Components(config)
    try:
        assert Checkpoints(parts, lambda directory: None).resume() == (4, None)
        parts.sync(4)
        with parts:
            batch = parts.sampler.request(parts.prompts[:6], seed=1)
            rows = TrainBatch.from_groups(parts.sampler.complete(batch, step=5))
            ours_r = parts.policy.score(rows)
    finally:
        parallel.shut_down()
    model = AutoModelForCausalLM.from_pretrained(finished / "hf", dtype=torch.float32)
    expected = []
    for prompt, response in zip(rows.prompt_ids, rows.response_ids, strict=True):
        ids = torch.tensor([[*prompt, *response]])
        logp = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1], dim=-1)
        expected.append(logp.gather(1, torch.tensor(response)[:, None]).squeeze(1))
    torch.testing.assert_close(ours_r, torch.cat(expected).detach(), atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(finished / "hf").eos_token_id is not None


def test_every_step_samples_and_trains_on_all_its_responses(task, tmp_path, monkeypatch):
    sampled, trained = [], []
    finish, from_groups = EngineSampler.finish, TrainBatch.from_groups

    def spy_on_finish(self, pending):
        groups = finish(self, pending)
        sampled.append([(group.prompt.id, len(group.rollouts)) for group in groups])
        return groups

    def spy_on_rows(*groups):
        rows = from_groups(*groups)
        trained.append(len(rows))
        return rows

    monkeypatch.setattr(EngineSampler, "finish", spy_on_finish)
    monkeypatch.setattr(TrainBatch, "from_groups", staticmethod(spy_on_rows))
    more = ("train.steps=3", "train.prompts_per_step=24", "data.eval=null", "checkpoint.export_hf=false")
    fit(configure(task, tmp_path, *GVPO, *more))
    assert [len(groups) for groups in sampled] == [24] * 3
    assert {n for groups in sampled for _, n in groups} == {4}
    ids = [[prompt for prompt, _ in groups] for groups in sampled]
    assert len({*ids[0], *ids[1]}) == 48, "the first epoch visits every prompt once"
    assert trained == [48, 48] * 3, "two mini-batches a step"


def test_every_epoch_of_a_batch_compares_with_the_policy_at_step_start(task, tmp_path, monkeypatch, capsys):
    """This includes the first mini-batch, whose first update needs no log-probs of that policy."""
    update, updates, at_start = Policy.update, [], []

    def spy(self, rows, *, at_step_start, **options):
        if at_step_start:
            at_start.append(self.score(rows))
        updates.append((at_step_start, rows))
        return update(self, rows, at_step_start=at_step_start, **options)

    monkeypatch.setattr(Policy, "update", spy)
    epochs = ("algorithm=grpo", "train.mini_batches=2", "train.batch_epochs=2", "algorithm.loss.kl_coef=0")
    fit(configure(task, tmp_path, *epochs, *SHORT, "train.steps=1", "logging.progress=off"))
    assert capsys.readouterr().out == "", "logging.progress=off"
    assert [first for first, _ in updates] == [True, False, False, False]
    first, second, first_again, second_again = (rows for _, rows in updates)
    assert first.old_logp_r is None and first_again.response_ids == first.response_ids
    torch.testing.assert_close(first_again.old_logp_r, at_start[0], rtol=0, atol=1e-5)
    assert torch.equal(second_again.old_logp_r, second.old_logp_r)
    assert records(tmp_path)[-1]["train/kl"] > 0


def test_dr_grpo_divides_by_the_longest_response_that_sampling_allows(task, tmp_path):
    for name, overrides in {"default": (), "explicit": ("algorithm.loss.aggregation.constant=10",)}.items():
        more = ("train.steps=1", "optimizer.warmup_steps=0", *SHORT)
        fit(configure(task, tmp_path / name, "algorithm=dr_grpo", *overrides, *more))
    by_default, explicit = (records(tmp_path / name)[-1] for name in ("default", "explicit"))
    assert by_default == explicit and by_default["train/grad_norm"] > 0


def test_a_non_finite_gradient_is_skipped_and_counted(task, tmp_path):
    fit(configure(task, tmp_path, *GVPO, reward_options(task, poison_in=2)))
    assert [line["train/skipped"] for line in records(tmp_path)[1:]] == [0, 1, 0, 0]
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path).values())


def test_a_checkpoint_counts_the_skipped_update_of_its_own_step(task, tmp_path):
    """Fails on the old code, whose count was one behind."""
    skipped = ("train.steps=2", "train.max_empty_batches=9", reward_options(task, poison_in=2))
    fit(configure(task, tmp_path, "algorithm=gvpo", *SHORT, *skipped))
    assert records(tmp_path)[-1]["train/skipped"] == 1
    state = json.loads((tmp_path / "checkpoints/step_00000002/state.json").read_text())
    assert state["empty_batches"] == {"in_a_row": {"skipped": 1}}


def test_a_run_whose_batches_stay_empty_ends_and_can_go_on(task, tmp_path):
    """Only responses of weights 0 are right, so the shaper leaves nothing from the second step on."""
    (tmp_path / "first.py").write_text(
        "def f(prompt, rollout):\n    return float(rollout.weight_version < 1)\n"
    )
    rewards = f'rewards.components=[{{name: first, function: "{tmp_path}/first.py:f"}}]'
    keep = "algorithm.shapers=[{name: keep}]"
    config = configure(task, tmp_path / "out", *GVPO, *SHORT, rewards, keep, "train.max_empty_batches=2")
    with pytest.raises(
        RolloutError, match=r"step 2: nothing is left .*algorithm.shapers.0 \(keep\).* 2 batches in a row"
    ):
        fit(config)
    assert [path.name for path in complete_checkpoints(tmp_path / "out/checkpoints")] == ["step_00000001"]
    without = configure(task, tmp_path / "out", *GVPO, *SHORT, rewards, "algorithm.shapers=[]")
    fit(without, resume=True, allow_change=("algorithm.shapers",))
    assert [line["step"] for line in records(tmp_path / "out")] == [0, 1, 2, 3, 4]


def test_a_run_goes_on_under_another_recipe(task, tmp_path, caplog):
    """Members, batch policy and estimator keep their state by name; what the new method lacks is said."""
    constant = "optimizer.warmup_steps=0"
    config = configure(task, tmp_path, "algorithm=gvpo_history", *SHORT, "train.steps=1", constant)
    fit(config)
    other = ("algorithm=dapo", "algorithm.shapers=[]", *SHORT, "train.steps=2", constant, "optimizer.lr=2e-3")
    with pytest.raises(ConfigError, match=r'algorithm\.recipe was "gvpo_history" and is "dapo"'):
        fit(configure(task, tmp_path, *other), resume=True)
    allowed = ("algorithm", "optimizer.lr")
    assert fit(configure(task, tmp_path, *other), resume=True, allow_change=allowed).step == 2
    messages = [record.getMessage() for record in caplog.records]
    assert any("the checkpoint's state of the member replay is left out" in text for text in messages)
    changed = next(text for text in messages if text.startswith("continued with other settings: "))
    assert "optimizer.lr was 0.001 and is 0.002" in changed


def test_callbacks_hear_everything_in_order(task, tmp_path):
    heard = []

    class Listener(Callback):
        def on_start(self, trainer):
            heard.append("start")

        def on_step(self, trainer, step, metrics):
            heard.append(("step", step, "eval/pass@1" in metrics))

        def on_checkpoint(self, trainer, directory):
            assert (directory / "state.json").is_file()
            heard.append(("checkpoint", directory.name))

        def on_end(self, trainer):
            assert (tmp_path / "hf" / "config.json").is_file()
            heard.append("end")

        def on_exit(self, trainer):
            heard.append("exit")

    steps = [("step", 0, True), ("step", 1, False), ("step", 2, True)]
    more = ("train.steps=2", "checkpoint.every=2")
    fit(configure(task, tmp_path, *GVPO, *more), [Listener()])
    assert heard == ["start", *steps, ("checkpoint", "step_00000002"), "end", "exit"]
    heard.clear()
    fit(configure(task, tmp_path, *GVPO, *more), [Listener(), StopAfter(1)], overwrite=True)
    assert heard == ["start", *steps[:2], ("checkpoint", "step_00000001"), "exit"]


def test_a_reward_that_always_fails_is_told_with_its_error(task, tmp_path, caplog):
    """It counts as 0, so the run continues and learns nothing."""
    (tmp_path / "wrong.py").write_text("def wrong(prompt, rollout):\n    return rollout['text']\n")
    reward = f'rewards.components=[{{"name": "mine", "function": "{tmp_path}/wrong.py:wrong"}}]'
    fit(configure(task, tmp_path / "run", *GVPO, "train.steps=2", "checkpoint.export_hf=false", reward))
    [warning] = [r.getMessage() for r in caplog.records if "rewards.components" in r.getMessage()]
    assert warning.startswith(
        "rewards.components.0 (mine) failed for 8 of 8 responses, and counts 0 for them: "
    )
    assert warning.endswith("TypeError: 'Rollout' object is not subscriptable (wrong.py, line 2)")


def test_a_reward_that_one_rank_lacks_is_heard_of_by_all(task, tmp_path):
    launch("helpers.workers.trainer_worker:a_reward_that_one_rank_lacks", [2], str(task), str(tmp_path))
    errors = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    assert errors[0] == errors[1]
    assert errors[0].endswith(f"missing.py:reward: there is no file {task}/missing.py (on rank 1)")


def test_an_error_of_one_rank_is_shown_at_once(task, tmp_path):
    """The tests' `fit` waited on that rank for the others, two minutes long, before its error was shown."""
    with pytest.raises(AssertionError, match="OSError: only rank 1 has this error"):
        launch(
            "helpers.workers.trainer_worker:fail_on_one_rank", [2], str(task), str(tmp_path), *GVPO, *SHORT
        )
    assert time.time() - float((tmp_path / "failed_at").read_text()) < 60


def test_an_earlier_run_is_neither_mixed_nor_lost(task, tmp_path):
    config = configure(task, tmp_path, *GVPO, "train.steps=2", "data.eval=null")
    (tmp_path / "data").mkdir()
    fit(config)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"holds an earlier run: .*--resume.*--overwrite"):
        Trainer(config)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    shorter = configure(task, tmp_path, *GVPO, "train.steps=1", "optimizer.warmup_steps=0", "data.eval=null")
    fit(shorter, overwrite=True)
    remaining_files = sorted(path.name for path in tmp_path.iterdir())
    records_of_it = ["config.yaml", "curve.png", "data", "hf", "metrics.jsonl", "rollouts", "run.json"]
    assert remaining_files == ["checkpoints", *records_of_it, "steps", "summary.json"]
    assert [path.name for path in (tmp_path / "steps").iterdir()] == ["step_000001.safetensors"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert [line["step"] for line in records(tmp_path)] == [0, 1]

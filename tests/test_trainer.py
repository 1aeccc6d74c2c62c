"""The main job end to end on a tiny task: real megatron-core, embedded engine, reward workers.

A resumed run must equal an uninterrupted one exactly: every metric that the clock did not write, and every
bit of the weights.
"""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
from distributed import launch
from safetensors.torch import load_file
from tiny_run import StopAfter, configure, fit, records, reward_options
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_gvpo.callbacks import Callback
from megatron_gvpo.config import ConfigError
from megatron_gvpo.megatron import checkpoint, parallel
from megatron_gvpo.megatron.checkpoint import CheckpointError
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.parts import Parts
from megatron_gvpo.sampling import EngineSampler
from megatron_gvpo.trainer import Trainer
from megatron_gvpo.types import Rows

GVPO = ("algorithm=gvpo", "train.mini_batches=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module", autouse=True)
def leave_the_process_group():
    yield
    parallel.shut_down()


@pytest.fixture(scope="module")
def finished(task, runs) -> Path:
    """A GVPO run of four steps, with a checkpoint after every step, of which three are kept."""
    out = runs / "finished"
    more = (
        "checkpoint.every=1",
        "checkpoint.keep=3",
        "logging.tensorboard=true",
        "logging.profile_steps=[2, 2]",
    )
    fit(configure(task, out, *GVPO, *more))
    return out


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "hf" / "model.safetensors")


def assert_same_run(one: Path, other: Path) -> None:
    assert records(one) == records(other)
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


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
    kept = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert kept == ["step_00000002", "step_00000003", "step_00000004"]


def test_tensorboard_has_what_the_metrics_have(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert rewards == [
        (line["step"], pytest.approx(line["reward/mean"])) for line in records(finished) if line["step"]
    ]


def test_transformers_agrees_with_the_trained_policy(task, finished):
    config = configure(task, finished, *GVPO)
    parts = Parts(config)
    try:
        assert parts.resume() == 4
        parts.sync(4)
        with parts:
            ticket = parts.sampler.submit(parts.prompts[:6], seed=1)
            rows = Rows.from_groups(parts.sampler.collect(ticket))
            ours_r = parts.policy.score(rows)
    finally:
        parallel.shut_down()
    model = AutoModelForCausalLM.from_pretrained(finished / "hf", dtype=torch.float32)
    theirs = []
    for prompt, response in zip(rows.prompt_ids, rows.response_ids, strict=True):
        ids = torch.tensor([[*prompt, *response]])
        logp = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1], dim=-1)
        theirs.append(logp.gather(1, torch.tensor(response)[:, None]).squeeze(1))
    torch.testing.assert_close(ours_r, torch.cat(theirs).detach(), atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(finished / "hf").eos_token_id is not None


def test_every_step_samples_and_trains_on_all_its_responses(task, tmp_path, monkeypatch):
    sampled, trained = [], []
    collect, from_groups = EngineSampler.collect, Rows.from_groups

    def spy_on_collect(self, ticket):
        groups = collect(self, ticket)
        sampled.append([(group.prompt.id, len(group.rollouts)) for group in groups])
        return groups

    def spy_on_rows(groups):
        rows = from_groups(groups)
        trained.append(len(rows))
        return rows

    monkeypatch.setattr(EngineSampler, "collect", spy_on_collect)
    monkeypatch.setattr(Rows, "from_groups", staticmethod(spy_on_rows))
    more = ("train.steps=3", "train.prompts_per_step=24", "data.eval=null", "checkpoint.export_hf=false")
    fit(configure(task, tmp_path, *GVPO, *more))
    assert [len(groups) for groups in sampled] == [24] * 3
    assert {n for groups in sampled for _, n in groups} == {4}
    ids = [[prompt for prompt, _ in groups] for groups in sampled]
    assert len({*ids[0], *ids[1]}) == 48, "the first epoch visits every prompt once"
    assert trained == [48, 48] * 3, "two mini-batches a step"


ENGINE_REFERENCE = (*GVPO, "algorithm.reference_logprobs=engine")


def test_every_step_is_watched_for_a_mismatch(finished, caplog):
    """The embedded engine differs from the trainer by rounding only, and nobody is warned."""
    for line in records(finished)[1:]:
        assert line["mismatch/tokens"] == pytest.approx(16 * line["response/length"])
        assert 0 < line["mismatch/abs_mean"] < 1e-5 and line["mismatch/kl"] < 1e-10
        assert abs(line["mismatch/slope"]) < 1e-5
    assert "not the one that is trained" not in caplog.text


def with_gap(monkeypatch, gap: float, versions_behind: int = 0) -> None:
    """An engine whose log-probs are too small by `gap` in every token, and whose weights are older."""
    from_groups = Rows.from_groups

    def perturbed(groups):
        rows = from_groups(groups)
        return rows.with_columns(
            engine_logp_r=rows.engine_logp_r - gap, version_r=rows.version_r - versions_behind
        )

    monkeypatch.setattr(Rows, "from_groups", staticmethod(perturbed))


def counted_scores(monkeypatch) -> list[int]:
    """The number of rows of every scoring pass from now on."""
    scored, score = [], Policy.score

    def counting(self, rows):
        scored.append(len(rows))
        return score(self, rows)

    monkeypatch.setattr(Policy, "score", counting)
    return scored


SHORT = ("train.max_tokens_per_micro_batch=4096", "data.eval=null", "checkpoint.export_hf=false")


@pytest.mark.parametrize("gap", [0.0, 0.25])
def test_the_engines_reference_trains_like_the_trainers_without_scoring(
    task, tmp_path, monkeypatch, caplog, gap
):
    """Also where the engine is off in every token, which is taken off again, and said."""
    fit(configure(task, tmp_path / "trainer", *GVPO, *SHORT))
    with_gap(monkeypatch, gap)
    scored = counted_scores(monkeypatch)
    fit(configure(task, tmp_path / "engine", *ENGINE_REFERENCE, *SHORT))
    assert scored == [], "no group is split here, so nothing needs a scoring pass"
    for ours, theirs in zip(records(tmp_path / "engine")[1:], records(tmp_path / "trainer")[1:], strict=True):
        assert ours["train/kl"] > 0, "the second mini-batch looks back at step start"
        for name in ("reward/mean", "response/length", "train/loss", "train/kl", "train/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
        assert ours["mismatch/tokens"] < theirs["mismatch/tokens"], "only the first mini-batch is compared"
        assert ours["mismatch/gap"] == pytest.approx(gap, abs=1e-5)
        assert ours["mismatch/slope"] == pytest.approx(gap, abs=1e-5)
        assert ours["mismatch/residual_slope"] == pytest.approx(0, abs=1e-5)
    warnings = [r.message for r in caplog.records if "not the one that is trained" in r.message]
    assert len(warnings) == (gap > 0), "once a run"


def test_what_older_weights_sampled_has_them_as_its_reference(task, tmp_path, monkeypatch):
    """Then the first mini-batch, too, looks back, and is no measure of the engine."""
    trained = []
    update = Policy.update

    def spy(self, rows, *, at_step_start, keep_logp=False):
        trained.append((at_step_start, rows))
        return update(self, rows, at_step_start=at_step_start, keep_logp=keep_logp)

    monkeypatch.setattr(Policy, "update", spy)
    with_gap(monkeypatch, 0.0, versions_behind=1)
    fit(configure(task, tmp_path, *ENGINE_REFERENCE, *SHORT, "train.steps=1", "optimizer.warmup_steps=0"))
    assert [first for first, _ in trained] == [True, False]
    for _, rows in trained:
        assert torch.equal(rows.ref_logp_r, rows.engine_logp_r)
    assert not any(name.startswith("mismatch/") for name in records(tmp_path)[-1])


METHODS = {
    "gvpo": GVPO,
    "engine's reference": ENGINE_REFERENCE,
    "saved in the background": (*GVPO, "checkpoint.every=1", "checkpoint.asynchronous=true"),
    "ema": ("checkpoint.asynchronous=true", *GVPO, 'algorithm.loss.reference={"name": "ema", "decay": 0.9}'),
    # Its reference is fixed: model.path.
    "grpo": ("algorithm=grpo", "train.mini_batches=2", "algorithm.loss.importance={cap: 2.0}"),
    "ppo": ("algorithm=ppo", "train.mini_batches=2", "algorithm.critic.lr=1e-3"),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_equals_an_uninterrupted_one(task, tmp_path, method):
    overrides, whole, parts = METHODS[method], tmp_path / "whole", tmp_path / "parts"
    fit(configure(task, whole, *overrides))
    stopped = fit(configure(task, parts, *overrides, reward_options(task, signal_in=2)))
    assert stopped.step == 2
    fit(configure(task, parts, *overrides), resume=True)
    assert_same_run(whole, parts)
    if method != "gvpo":
        assert records(parts)[-1]["train/kl"] > 0, "the policy has left its reference"
    if method == "ppo":
        assert records(parts)[-1]["train/value_loss"] < records(parts)[1]["train/value_loss"]
    if method == "grpo":
        assert records(parts)[-1]["train/importance"] == pytest.approx(1, abs=1e-5)


def test_dr_grpo_divides_by_the_longest_response_that_sampling_allows(task, tmp_path):
    for name, given in {"default": (), "explicit": ("algorithm.loss.aggregation.constant=10",)}.items():
        more = ("train.steps=1", "optimizer.warmup_steps=0", *SHORT)
        fit(configure(task, tmp_path / name, "algorithm=dr_grpo", *given, *more))
    ours, explicit = (records(tmp_path / name)[-1] for name in ("default", "explicit"))
    assert ours == explicit and ours["train/grad_norm"] > 0


def test_resume_of_sft(task, tmp_path):
    overrides, whole, parts = ("algorithm=sft", "data.eval=null"), tmp_path / "whole", tmp_path / "parts"
    fit(configure(task, whole, *overrides))
    assert records(whole)[-1]["train/loss"] < records(whole)[1]["train/loss"]
    assert fit(configure(task, parts, *overrides), [StopAfter(2)]).step == 2
    fit(configure(task, parts, *overrides), resume=True)
    assert_same_run(whole, parts)


def test_resume_while_groups_are_accumulated(task, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    gpg = ("algorithm=gpg", "algorithm.batch_policy.threshold=1.0", "rollout.n=3", "data.eval=null")
    fit(configure(task, whole, *gpg, reward_options(task, coarse=True)))
    rounds = [int(line["batch/rounds"]) for line in records(whole)[1:]]
    step = next(i for i, needed in enumerate(rounds) if i and needed > 1)
    signal = reward_options(task, coarse=True, signal_in=step + 1)
    assert fit(configure(task, parts, *gpg, signal)).step == step, "stopped within the step after it"
    (saved,) = checkpoint.complete(parts / "checkpoints")
    assert json.loads((saved / "state.json").read_text())["batch_policy"]["pending"]
    fit(configure(task, parts, *gpg, reward_options(task, coarse=True)), resume=True)
    assert_same_run(whole, parts)


def test_resume_on_two_ranks(task, runs):
    launch("trainer_worker:interrupted_and_not", [2], str(task), str(runs))
    for layout in ("dp2", "tp2"):
        assert_same_run(runs / f"{layout}-whole", runs / f"{layout}-parts")
    assert fit(configure(task, runs / "tp2-whole", *GVPO), resume=True).step == 4, "another layout reads it"


def test_an_interrupt_before_the_first_step(task, tmp_path, finished, monkeypatch):
    """The workers' start is part of start-up: nothing has been trained, and the run can be resumed."""
    monkeypatch.setenv("SIGNAL_WHILE_LOADING", "1")
    stopped = fit(configure(task, tmp_path, *GVPO))
    assert stopped.step == 0
    assert [path.name for path in checkpoint.complete(tmp_path / "checkpoints")] == ["step_00000000"]
    monkeypatch.delenv("SIGNAL_WHILE_LOADING")
    fit(configure(task, tmp_path, *GVPO), resume=True)
    assert_same_run(tmp_path, finished)


def test_rewards_that_end_with_the_job_are_not_counted(task, tmp_path):
    """Slurm ends every process of a job, and what a reward runs with it: that says nothing of a policy."""
    whole, parts, every_step = tmp_path / "whole", tmp_path / "parts", ("checkpoint.every=1", "eval.every=0")
    fit(configure(task, whole, *GVPO, *every_step))
    killed = reward_options(task, signal_in=3, killed=True)
    assert fit(configure(task, parts, *GVPO, *every_step, killed)).step == 2
    fit(configure(task, parts, *GVPO, *every_step), resume=True)
    assert_same_run(whole, parts)


class FullDisk(Callback):
    """From a checkpoint on, no file may grow beyond 1 MB: a checkpoint does, metrics do not."""

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
    assert [path.name for path in checkpoint.complete(tmp_path / "checkpoints")] == ["step_00000001"]
    assert (tmp_path / "checkpoints" / "step_00000002.partial").is_dir(), (
        "what was left of it is no checkpoint"
    )
    (tmp_path / "checkpoints" / "step_00000009.partial").mkdir()
    fit(config, resume=True)
    assert_same_run(tmp_path, finished)
    assert [path.name for path in checkpoint.complete(tmp_path / "checkpoints")] == ["step_00000004"]
    assert not list((tmp_path / "checkpoints").glob("step_*.*")), "nor anything else that was not finished"


def test_a_disk_full_while_saving_in_the_background_is_reported(task, tmp_path):
    """Before the next update, and the previous checkpoint stays."""

    class FullLater(FullDisk):
        def on_step(self, trainer, step, metrics):
            if step == 2:  # the checkpoint of step 1 was complete before the update
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, self.limits[1]))

        def on_checkpoint(self, trainer, directory):
            pass

    config = configure(task, tmp_path, *GVPO, *SHORT, "checkpoint.every=1", "checkpoint.asynchronous=true")
    with FullLater() as disk, pytest.raises(CheckpointError, match=r"cannot write .*step_00000002"):
        fit(config, [disk])
    assert [path.name for path in checkpoint.complete(tmp_path / "checkpoints")] == ["step_00000001"]
    assert records(tmp_path)[-1]["step"] == 2


def test_a_disk_full_while_exporting_leaves_the_export_and_the_checkpoint(task, tmp_path):
    fit(configure(task, tmp_path, *GVPO, "train.steps=2"))
    before = weights(tmp_path)
    with FullDisk() as disk, pytest.raises(CheckpointError, match=r"cannot write .*hf: .*File too large"):
        fit(configure(task, tmp_path, *GVPO, "train.steps=3"), [disk], resume=True)
    after = weights(tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert checkpoint.complete(tmp_path / "checkpoints")[-1].name == "step_00000003"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("state.json", b"{}", "state.json is no state of a checkpoint of this program: KeyError: 'layout'"),
        ("state.json", b"\x00", "state.json is no state of a checkpoint of this program: JSONDecodeError"),
        ("__0_0_0.distcp", b"cut off", "cannot read .*step_00000004: "),
        (".metadata", None, "cannot read .*step_00000004: "),
    ],
)
def test_a_damaged_checkpoint_is_named(task, tmp_path, finished, file, content, message):
    place = tmp_path / "checkpoints" / "step_00000004"
    place.mkdir(parents=True)
    for source in (finished / "checkpoints" / "step_00000004").iterdir():
        (place / source.name).write_bytes(source.read_bytes())
    (place / file).unlink()
    if content is not None:
        (place / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        fit(configure(task, tmp_path, *GVPO), resume=True)


def test_a_checkpoint_of_other_data_is_refused(task, finished):
    with pytest.raises(ValueError, match=r"trained on 48 prompts, and data\.train now has 40"):
        fit(configure(task, finished, *GVPO, "data.train.limit=40"), resume=True)


def test_a_non_finite_gradient_is_skipped_and_counted(task, tmp_path):
    fit(configure(task, tmp_path, *GVPO, reward_options(task, poison_in=2)))
    assert [line["train/skipped"] for line in records(tmp_path)[1:]] == [0, 1, 0, 0]
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path).values())


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
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["checkpoints", "curve.png", "data", "hf", "metrics.jsonl", "summary.json"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert [line["step"] for line in records(tmp_path)] == [0, 1]

"""Runs that learn from a teacher: on a server, also while it has an outage, and in the trainer."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from helpers.servers.real_servers import logprobs
from helpers.servers.teacher_servers import teaching
from helpers.tiny_run import SHORT, configure, fit, make_task, records

from megatron_gvpo.checks.preflight import preflight
from megatron_gvpo.core.errors import CheckpointError, ConfigError, RolloutError
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.model.build import build
from megatron_gvpo.megatron.teacher import Teacher
from megatron_gvpo.servers import model_requests
from megatron_gvpo.settings.config import Config
from megatron_gvpo.types import TrainBatch

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


@pytest.fixture(scope="module")
def teacher(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the policy's shape, with other weights."""
    directory = tmp_path_factory.mktemp("teacher")
    make_task.make_model(directory, seed=1)
    return directory


def taught(task: Path, out: Path, teacher: Path, url: str, *more: str) -> Config:
    own = f"teacher={{path: {teacher}, server: {{urls: ['{url}'], start_timeout: 0.3}}}}"
    method = ("algorithm=opd", "train.mini_batches=2", "train.batch_epochs=2", "rewards.components=[]")
    return configure(task, out, *method, *SHORT, own, *more)


def test_a_run_asks_for_every_response_once_and_survives_an_outage(
    task: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model_requests, "PAUSE", 0.05)
    few = ("train.steps=2", "optimizer.decay=constant", "train.max_tokens_per_micro_batch=128")
    few = (*few, "checkpoint.export_hf=true", "checkpoint.every=1")
    with teaching(teacher) as (url, served):
        fit(taught(task, tmp_path / "whole", teacher, url, *few))
        sent = [tuple(body["input_ids"]) for body in served.requests[1:]]
        different: list[set[tuple[int, ...]]] = []
        for step in (1, 2):
            rows = pq.read_table(tmp_path / "whole" / "rollouts" / f"step_{step:06}.parquet").to_pylist()
            pairs = {(tuple(row["prompt_ids"]), tuple(row["response_ids"])) for row in rows}
            different.append({(*prompt, *response, response[-1]) for prompt, response in pairs})
            expected = [
                torch.tensor(row["rollout_logprobs"])
                - logprobs(teacher, list(row["prompt_ids"]), list(row["response_ids"]))
                for row in rows
            ]
            logged = records(tmp_path / "whole")[step]
            half = len(expected) // 2  # of a mini-batch
            means = [float(torch.cat(part).mean()) for part in (expected[:half], expected[half:])]
            assert logged["advantage/teacher_kl"] == pytest.approx(sum(means) / 2, abs=1e-4)
            assert logged["train/grad_norm"] > 0 and math.isfinite(logged["train/loss"])
        once = [*different[0], *different[1] - different[0]]
        assert sorted(sent) == sorted(once), "two epochs of two mini-batches ask once"

        served.last = len(served.requests) + 1 + len(different[0]) + 2  # in the second step
        with pytest.raises(RolloutError, match=r"for teacher\.server\.start_timeout=0\.3 s"):
            fit(taught(task, tmp_path / "parts", teacher, url, *few))
        assert [line["step"] for line in records(tmp_path / "parts")] == [0, 1]
        served.last = None
        fit(taught(task, tmp_path / "parts", teacher, url, *few), resume=True)
    lines = ("teacher/requests", "teacher/failed_requests", "teacher/wait_s")
    resumed, uninterrupted = (
        [{key: value for key, value in line.items() if key not in lines} for line in records(tmp_path / run)]
        for run in ("parts", "whole")
    )
    assert resumed == uninterrupted


def test_a_teacher_of_another_tokenizer_is_refused_before_anything_is_loaded(task: Path, tmp_path: Path):
    make_task.make_model(tmp_path / "teacher", seed=1)
    file = tmp_path / "teacher" / "tokenizer.json"
    file.write_text(file.read_text().replace('"7"', '"seven"'))
    with pytest.raises(ConfigError, match=r"'7', \d+ in model\.path, none: .* reads a teacher's log-probs"):
        preflight(taught(task, tmp_path / "out", tmp_path / "teacher", "http://127.0.0.1:1"), "train", 1)


def divergences(task: Path, out: Path, reference: str) -> list[float]:
    """`train/divergence` of three steps that are otherwise GPG."""
    method = ["algorithm.recipe=gpg", f"algorithm.loss.divergence={{coef: 0.1, reference: {reference}}}"]
    fit(configure(task, out, *SHORT, *method, "train.steps=3", "optimizer={lr: 1.0e-4, decay: constant}"))
    return [line["train/divergence"] for line in records(out)[1:]]


def test_a_teacher_that_ends_elsewhere_is_told(
    task: Path, teacher: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A policy that never stops where its teacher does would learn to go on behind the teacher's end."""
    shutil.copytree(teacher, tmp_path / "teacher")
    for name in ("config.json", "generation_config.json"):
        file = tmp_path / "teacher" / name
        values = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(values | {"eos_token_id": 7}))
    warning = "its responses end at token 7, and the policy's at"
    for directory, stops in ((tmp_path / "teacher", "[]"), (tmp_path / "teacher", "[7]"), (teacher, "[]")):
        caplog.clear()
        own = (f"teacher.path={directory}", f"rollout.stop_token_ids={stops}", "train.steps=2")
        fit(configure(task, tmp_path / "run", "algorithm=opd_full", *SHORT, *own), overwrite=True)
        assert (warning in caplog.text) == (directory != teacher and stops == "[]")


def test_a_teacher_does_not_compute_in_fp8(task: Path, teacher: Path, tmp_path: Path):
    """Its weights and activations have model.dtype, as its section says; here, FP8 would be refused."""
    how = ("algorithm=opd_full", f"teacher.path={teacher}", "model.dtype=bfloat16")
    config = configure(task, tmp_path, *how, "model.fp8={recipe: blockwise}")
    parallel.initialize(config.parallel, seed=0)
    with pytest.raises(ConfigError, match=r"model\.fp8\.recipe=blockwise: FP8 needs a GPU"):
        build(config.model, config.parallel, trained=False)
    rows = TrainBatch.from_groups([Group(Prompt("p", (5, 6), "x"), [Rollout([7, 8, 9], [], "", "stop")])])
    assert config.teacher is not None
    held_teacher = Teacher(config.teacher, config.model, config.parallel, config.train, temperature=1.0)
    expected_r = logprobs(teacher, [5, 6], [7, 8, 9])
    torch.testing.assert_close(held_teacher.score(rows), expected_r, rtol=0, atol=0.05)


def test_a_moving_average_is_not_taken_for_the_policy_at_the_start(task: Path, tmp_path: Path):
    def run(reference: str, steps: int) -> Config:
        own = (f"algorithm.loss.reference={reference}", "train.mini_batches=2", f"train.steps={steps}")
        return configure(task, tmp_path, "algorithm=gvpo", *SHORT, "optimizer.decay=constant", *own)

    fit(run("{name: ema, decay: 0.5}", 1))
    with pytest.raises(CheckpointError, match="compared with a moving average, and a fixed reference is"):
        fit(run("fixed", 2), resume=True, allow_change=["algorithm"])


def test_a_moving_average_is_nearer_than_the_policy_at_the_start(task: Path, tmp_path: Path):
    fixed = divergences(task, tmp_path / "fixed", "fixed")
    moving = divergences(task, tmp_path / "moving", "{name: ema, decay: 0.5}")
    assert abs(fixed[0]) < 1e-6 and fixed[1] > 1e-3, "it begins with the policy itself"
    assert moving[1] == pytest.approx(fixed[1] / 4, rel=0.1), "half the way; a KL grows with the square"
    assert 0 < moving[2] < 0.25 * fixed[2]

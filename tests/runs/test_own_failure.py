"""A loss of the user's that fails in the middle of a run: no step that was trained is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from helpers.distributed import launch
from helpers.inputs.rows import make_rows
from helpers.tiny_run import assert_same_run, configure, fit

from megatron_gvpo.algorithms.custom import CustomLoss
from megatron_gvpo.cli.with_model import run_with_model
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.kernels.linear_logprob import linear_logprob
from megatron_gvpo.megatron.checkpoint.save import Writer
from megatron_gvpo.megatron.loss_pass import LossInForward
from megatron_gvpo.runs.existing_run import newest_step
from megatron_gvpo.sampling.samplers import EngineSampler
from megatron_gvpo.settings.config import Config
from megatron_gvpo.types import BatchTotals

# With two updates a step, the calls of step 3 on one rank are the fifth and the sixth.
LOSS = """
import os

calls = 0

def loss(inputs):
    global calls
    calls += 1
    if calls == int(os.environ.get("FAIL_AT", "0")) and os.environ.get("RANK", "0") == os.environ["FAIL_ON"]:
        raise KeyError("x")
    return -(inputs.rows.token_advantages() * inputs.logp_r).sum() / inputs.totals.tokens
"""


def method(directory: Path, name: str) -> tuple[str, ...]:
    """Overrides with a loss in a file of its own, which counts its calls anew."""
    (directory / name).write_text(LOSS)
    loss = f"{{name: custom, function: '{directory / name}:loss'}}"
    return (
        f"algorithm={{recipe: null, loss: {loss}, estimator: {{}}}}",
        "train.mini_batches=2",
        "train.max_tokens_per_micro_batch=4096",
        "data.eval=null",
    )


def fails_on(monkeypatch: pytest.MonkeyPatch, rank: int, call: int) -> None:
    monkeypatch.setenv("FAIL_ON", str(rank))
    monkeypatch.setenv("FAIL_AT", str(call))


def test_the_steps_before_are_saved_and_go_on(task, tmp_path, monkeypatch):
    """Fails on the old code: with checkpoint.every=0 all steps were lost."""
    fails_on(monkeypatch, 0, 5)
    with pytest.raises(UserFunctionError) as error:
        fit(configure(task, tmp_path / "run", *method(tmp_path, "wrong.py")))
    assert str(error.value) == (
        f"step 3: loss.function={tmp_path}/wrong.py:loss: KeyError: 'x' (wrong.py, line 10); "
        "`train ... --resume` continues from step 2"
    )
    fails_on(monkeypatch, 0, 0)
    mended = method(tmp_path, "mended.py")
    fit(configure(task, tmp_path / "run", *mended), resume=True, allow_change=["algorithm"])
    fit(configure(task, tmp_path / "whole", *mended))
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_step_that_has_changed_the_weights_is_not_saved(task, tmp_path, monkeypatch):
    fails_on(monkeypatch, 0, 6)
    with pytest.raises(UserFunctionError, match=r"no checkpoint has been saved yet \(checkpoint\.every\)$"):
        fit(configure(task, tmp_path / "run", *method(tmp_path, "wrong.py")))
    assert newest_step(tmp_path / "run") is None


def test_rewards_that_the_estimator_cannot_take_end_the_run_with_one_line(task, tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "def f(prompt, rollout):\n    return 1 - rollout.token_ids[0] % 2 * max(1, rollout.weight_version)\n"
    )
    rewards = f'rewards.components=[{{name: own, function: "{tmp_path}/own.py:f"}}]'

    def run(*shapers: str) -> Config:
        method = f"algorithm={{recipe: bnpo, shapers: [{', '.join(shapers)}]}}"
        return configure(task, tmp_path / "run", method, rewards, "data.eval=null", "train.steps=3")

    assert run_with_model(lambda: fit(run())) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: step 3: algorithm.estimator=bnpo needs rewards in [0, 1], and there are some from -1 to 1: "
        "map them by `affine`; `train ... --resume` continues from step 2"
    )
    assert newest_step(tmp_path / "run") == 2
    mended = run("{name: affine, scale: 0.5, shift: 0.5}")
    fit(mended, resume=True, allow_change=["algorithm.shapers"])
    assert newest_step(tmp_path / "run") == 3


@pytest.mark.parametrize("kind", [UserFunctionError, MemoryError])
def test_a_checkpoint_that_is_being_written_is_complete_before_an_error_ends_the_run(
    task, tmp_path, monkeypatch, kind
):
    """Fails on the old code: the process ended first, although its message named that checkpoint."""
    write, sample, batches = Writer.write, EngineSampler.finish, []

    def write_slowly(*arguments):
        time.sleep(2)
        write(*arguments)

    def fail_in_the_third_step(*arguments):
        batches.append(sample(*arguments))
        if len(batches) == 3:
            raise kind("from the sampler")
        return batches[-1]

    monkeypatch.setattr(Writer, "write", write_slowly)
    monkeypatch.setattr(EngineSampler, "finish", fail_in_the_third_step)
    settings = ("data.eval=null", "checkpoint.every=2", "checkpoint.asynchronous=true")
    with pytest.raises(kind, match="from the sampler"):
        fit(configure(task, tmp_path / "run", *settings))
    assert newest_step(tmp_path / "run") == 2


def test_all_ranks_hear_of_a_loss_that_fails_on_one(task, tmp_path, monkeypatch):
    fails_on(monkeypatch, 1, 5)
    arguments = (str(task), str(tmp_path), *method(tmp_path, "wrong.py"))
    launch("helpers.workers.trainer_worker:a_loss_that_fails", [2], *arguments)
    messages = {(tmp_path / f"{rank}.txt").read_text() for rank in range(2)}
    assert len(messages) == 1
    assert messages.pop().endswith(
        "KeyError: 'x' (wrong.py, line 10) (on rank 1); `train ... --resume` continues from step 2"
    )
    assert newest_step(tmp_path / "run") == 2


@pytest.mark.parametrize("has_weights", [False, True])
def test_a_rank_whose_loss_fails_takes_part_in_the_backward(tmp_path, monkeypatch, has_weights):
    """Fails on the old code: with known weights, as in a replay, the scalar had no graph to go back on."""
    fails_on(monkeypatch, 0, 1)
    (tmp_path / "wrong.py").write_text(LOSS)
    rows = make_rows([[1.0, 0.0]])
    tokens = int(rows.length_n.sum())
    hidden_rh, weight_vh = torch.randn(tokens, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    output = linear_logprob(
        hidden_rh, weight_vh, torch.arange(tokens) % 7, weight_r=torch.ones(tokens) if has_weights else None
    )
    loss_pass = LossInForward(CustomLoss(function=f"{tmp_path}/wrong.py:loss"), BatchTotals.of(rows))
    scalar, result = loss_pass(rows, tuple(output))
    scalar.backward()
    assert hidden_rh.grad is not None and result.metrics["loss"] == 0
    with pytest.raises(UserFunctionError, match="KeyError: 'x'"):
        loss_pass.raise_problem()


def test_a_rank_that_fails_alone_is_not_waited_for_long(tmp_path):
    launch("helpers.workers.trainer_worker:one_rank_fails", [2], str(tmp_path))
    assert (tmp_path / "alone.txt").read_text() == "[False, True]"

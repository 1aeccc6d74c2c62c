"""The user's own blocks that raise, or return what cannot be used: one line with the key, file and line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.inputs.rows import make_group, make_logp, make_rows

from megatron_gvpo.algorithms.curriculum.tracker import FunctionPrior
from megatron_gvpo.algorithms.custom import CustomEstimator, CustomLoss, CustomMember, CustomShaper
from megatron_gvpo.algorithms.shapers.judged import WinRate
from megatron_gvpo.cli.with_model import run_with_model
from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.core.user_functions import (
    UserFunctionError,
    call_function,
    described,
    forget_functions,
    load_function,
)
from megatron_gvpo.groups import Group, Rollout
from megatron_gvpo.sampling.batch_sampler import ComposedSampler, PendingBatch
from megatron_gvpo.sampling.shaping import run_shaper
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch


def write_function(directory: Path, arguments: str, body: str) -> str:
    file = directory / "mine.py"
    file.write_text(f"import json\nimport torch\n\ndef f({arguments}):\n    {body}\n")
    return f"{file}:f"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return inputs.rows.no_such_column", r"AttributeError: .*no_such_column.* \(mine\.py, line 5\)"),
        ("return json.loads('{')", r"JSONDecodeError: .* \(mine\.py, line 5\)"),
        ("return inputs.logp_r", r"expected a scalar tensor, it returned one of shape \(\d+,\) \(mine\.py"),
        ("return 1.0", r"expected a scalar tensor, it returned float \(mine\.py, line 4\)"),
        ("return torch.tensor(1)", "expected a scalar tensor"),
        ("return inputs.logp_r.sum().to('meta')", "it returned a tensor on meta, expected cpu"),
        ("return torch.tensor(1.0)", r"it does not depend on inputs\.logp_r"),
        ("return inputs.logp_r.sum(), {'a': 'b'}", r"expected metrics as \{name: number\}"),
        ("return inputs.logp_r.sum(), {'a': inputs.logp_r}", r"expected metrics as \{name: number\}"),
        (
            "return inputs.logp_r.sum(), {'loss': 1.0}",
            "a metric with the name 'loss' is that of another metric",
        ),
        ("return inputs.logp_r.sum(), {'grad_norm': 1.0}", "a metric with the name 'grad_norm' is that of"),
        ("return inputs.logp_r.sum(), {'head/known': 1.0}", "a metric with the name 'head/known' is that of"),
        ("import os; os._exit(0)", r"SystemExit: os\._exit\(0\) \(mine\.py, line 5\)"),
        (r"return inputs.logp_r.sum(), {'a\nb': 1.0}", "expected 1 to 64 characters that can be printed"),
        ("return inputs.logp_r.sum(), None", r"expected metrics as \{name: number\}, it returned NoneType"),
    ],
)
def test_a_loss(tmp_path, body, problem):
    loss = CustomLoss(function=write_function(tmp_path, "inputs", body), reads=("reward",))
    rows = make_rows([[1.0, 0.0]])
    inputs = LossInputs(rows, make_logp(rows).requires_grad_(), BatchTotals.of(rows))
    with pytest.raises(
        UserFunctionError, match=rf"^loss\.function={tmp_path}/mine\.py:f: .*{problem}"
    ) as error:
        loss(inputs)
    assert "\n" not in str(error.value)


def test_a_loss_is_not_called_without_rows(tmp_path):
    """One of two ranks has no rows of a mini-batch of one group, and a maximum of nothing is an error."""
    loss = CustomLoss(function=write_function(tmp_path, "inputs", "return inputs.logp_r.max()"))
    rows = make_rows([[1.0, 0.0]])
    none = rows.select([])
    logp_r = make_logp(none).requires_grad_()
    share, metrics = loss(LossInputs(none, logp_r, BatchTotals.of(rows)))
    share.backward()
    assert share == 0 and metrics == {} and logp_r.grad is not None


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            "return rows.reward_n / 0 * 0",
            r"it returned nan for response 0 of the batch, and no finite number",
        ),
        ("return torch.ones(3)", r"expected a tensor of shape \(2,\).*; it returned one of shape \(3,\)"),
        ("return [1.0, 0.0]", r"expected a tensor of shape \(2,\).*; it returned list"),
        ("return rows.reward_n + 1j", r"expected a tensor of shape \(2,\)"),
        ("return 1 / 0", r"ZeroDivisionError: division by zero \(mine\.py, line 5\)"),
        (
            "raise type('PanicException', (BaseException,), {})('oh')",
            r"PanicException: oh \(mine\.py, line 5\)",
        ),
    ],
)
def test_an_estimator(tmp_path, body, problem):
    estimator = CustomEstimator(function=write_function(tmp_path, "rows", body))
    with pytest.raises(UserFunctionError, match=rf"^estimator\.function={tmp_path}/mine\.py:f: .*{problem}"):
        estimator(make_rows([[1.0, 0.0]]))


def test_a_file_whose_import_raises_an_error_without_a_text(tmp_path):
    function = write_function(tmp_path, "rows", "pass")
    lines = "class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute\n"
    (tmp_path / "mine.py").write_text(lines)
    with pytest.raises(ValueError, match=r"mine\.py failed: Mute: \(its message cannot be shown\)"):
        load_function(function)


def test_os_exit_in_a_file_that_is_imported(tmp_path):
    """The command ended there, and its exit code said that it had done its work."""
    function = write_function(tmp_path, "rows", "pass")
    (tmp_path / "mine.py").write_text("import os\nos._exit(0)\n")
    with pytest.raises(ValueError, match=r"program \(SystemExit: os\._exit\(0\) \(mine\.py, line 2"):
        load_function(function)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("import ctypes; ctypes.CDLL(None)._exit(0)", r"SystemExit: _exit of C \(mine\.py, line 5\)"),
        ("import ctypes; ctypes.CDLL(None).exit(0)", r"SystemExit: exit of C \(mine\.py, line 5\)"),
        ("import ctypes; ctypes.CDLL(None)['quick_exit'](0)", r"SystemExit: quick_exit of C"),
        (
            "import os; os.execv('/bin/true', ['true'])",
            r"SystemExit: os\.exec of /bin/true \(mine\.py, line 5\)",
        ),
        ("import os; os.execlp('true', 'true')", r"SystemExit: os\.exec of .*true"),
    ],
)
def test_other_ways_to_end_the_process(tmp_path, body, problem):
    """Each ended the command with exit code 0, and without a word."""
    with pytest.raises(UserFunctionError, match=problem):
        call_function("key", write_function(tmp_path, "", body))


def test_a_program_in_place_of_a_fork_is_users_own_business(tmp_path):
    body = (
        "import ctypes, os; ctypes.CDLL(None).getpid(); pid = os.fork()\n"
        "    if not pid: os.execv('/bin/sh', ['sh', '-c', 'exit 7'])\n"
        "    return os.waitpid(pid, 0)[1]"
    )
    assert call_function("key", write_function(tmp_path, "", body)) == 7 << 8


def test_os_exit_is_the_systems_own_outside_of_users_code_and_in_a_fork(tmp_path):
    body = "import os; pid = os.fork(); pid or os._exit(7); return os.waitpid(pid, 0)[1]"
    assert call_function("key", write_function(tmp_path, "", body)) == 7 << 8
    done = subprocess.run([sys.executable, "-c", OUTSIDE, write_function(tmp_path, "", "pass")], check=False)
    assert done.returncode == 3


OUTSIDE = """
import os, sys
from megatron_gvpo.core.user_functions import call_function

call_function("key", sys.argv[1])
os._exit(3)
"""


def test_a_member_and_what_passes_through_it(tmp_path):
    member = CustomMember(function=write_function(tmp_path, "groups, sampling", "return sampling.ask()"))

    class Engine:
        def ask(self) -> None:
            raise RolloutError("no server is left")

    with pytest.raises(UserFunctionError, match=r"^member function=.*AttributeError.*\(mine\.py, line 5\)"):
        member([make_group([1.0])], None)
    with pytest.raises(RolloutError, match="no server is left"):
        member([make_group([1.0])], Engine())


@pytest.mark.parametrize("is_new_group", [False, True])
def test_a_member_does_not_switch_the_engines_log_probs_off(tmp_path, is_new_group):
    """One response of the source policy without log-probs hides those of its mini-batch."""

    def joined(logprobs: list[float], source: str) -> list[Group]:
        made = f"Rollout([7, 8], [], 'x', 'stop', source='{source}')"
        body = f"groups[0].rollouts.append({made}); return groups"
        if is_new_group:
            body = f"return [*groups, Group(groups[0].prompt, [{made}])]"
        function = write_function(
            tmp_path, "groups, sampling", f"from megatron_gvpo.groups import Group, Rollout; {body}"
        )
        forget_functions()
        rollouts = [Rollout([5, 6], logprobs, "y", "stop"), Rollout([], [], "", "stop")]
        return CustomMember(function=function)([Group(make_group([1.0]).prompt, rollouts)], None)

    problem = r'^member function=.*source="policy".*source="demonstration" \(mine\.py, line 4\)$'
    with pytest.raises(UserFunctionError, match=problem):
        joined([-1.0, -2.0], "policy")
    engine_logp_r = TrainBatch.from_groups(joined([-1.0, -2.0], "demonstration")).engine_logp_r
    assert engine_logp_r is not None and engine_logp_r.tolist()[:2] == [-1.0, -2.0]
    # The engine gave none, so nothing is hidden.
    assert TrainBatch.from_groups(joined([], "policy")).engine_logp_r is None


def test_a_member_whose_solution_lacks_the_components_that_are_read(tmp_path):
    """It counted 0 in each component, so that GDPO trained the policy away from it."""

    class Sampler:
        def finish(self, groups: list[Group]) -> list[Group]:
            return groups

    def trained(rewards: str, components: set[str]) -> list[Group]:
        body = f"groups[0].rollouts.append(Rollout([7], [], 'gold', 'stop', reward=1.0, {rewards}"
        function = write_function(
            tmp_path,
            "groups, sampling",
            f"from megatron_gvpo.groups import Rollout; {body}source='demonstration')); return groups",
        )
        forget_functions()
        members = [CustomMember(function=function)]
        sampler = ComposedSampler(Sampler(), None, members, (0,), components=components)
        group = make_group([1.0, 0.0])
        for rollout in group.rollouts:
            rollout.rewards = {"math": rollout.reward, "format": 1.0}
        return sampler.complete(PendingBatch([group], None, 0), 1)

    problem = (
        r"^member function=.* without format in its `rewards`, .*sampling\.score.* \(mine\.py, line 4\)$"
    )
    with pytest.raises(UserFunctionError, match=problem):
        trained("rewards={'math': 1.0}, ", {"math", "format"})
    for rewards, components in (("", set()), ("rewards={'math': 1, 'format': 1}, ", {"math", "format"})):
        assert len(trained(rewards, components)[0].rollouts) == 3


@pytest.mark.parametrize("body", ["return 'high'", "return float('nan')", "raise KeyError('x')"])
def test_a_prior(tmp_path, body):
    prior = FunctionPrior(function=write_function(tmp_path, "prompt", body))
    with pytest.raises(UserFunctionError, match=r"^prior\.function=.*\(mine\.py, line [45]\)$"):
        prior.expected(make_group([1.0]).prompt)


@pytest.mark.parametrize("body", ["return None", "return ['a', 'b']", "return [10 ** 400, 1.0]", "return 3"])
def test_a_shaper(tmp_path, body):
    shaper = CustomShaper(function=write_function(tmp_path, "group", body))
    with pytest.raises(
        RolloutError, match=r"^step 7: algorithm\.shapers: custom: .*expected a list of numbers"
    ):
        run_shaper(shaper, [make_group([1, 0])], 7)


def test_a_judge_without_a_finite_verdict(tmp_path):
    judge = WinRate(function=write_function(tmp_path, "prompt, a, b", "return float('nan')"))
    with pytest.raises(
        RolloutError, match=r"algorithm\.shapers: win_rate: .*expected a number, it returned nan"
    ):
        run_shaper(judge, [make_group([1, 0])], 7)


def test_a_command_ends_with_the_line(capsys):
    def work() -> None:
        raise UserFunctionError("step 5: loss.function=mine.py:f: KeyError: 'x' (mine.py, line 5)")

    assert run_with_model(work) == 1
    assert capsys.readouterr().err == (
        "error: step 5: loss.function=mine.py:f: KeyError: 'x' (mine.py, line 5)\n"
    )


def test_an_error_is_one_short_line_whatever_it_says():
    class MuteError(Exception):
        def __str__(self) -> str:
            raise torch.OutOfMemoryError

    assert described(MuteError()) == "MuteError: (its message cannot be shown)"
    assert described(ValueError("a\n\n  b\x00" + "c" * 10**6)).startswith("ValueError: a b")
    assert len(described(ValueError("c" * 10**6))) < 600

"""Numbers from outside: integers beyond any float, and what reads them."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.inputs.chat_tokenizer import tokenizer
from helpers.inputs.rows import make_group

from megatron_gvpo.algorithms.curriculum.prompts import SuccessRate
from megatron_gvpo.algorithms.curriculum.tracker import Tracker
from megatron_gvpo.algorithms.custom import CustomMember, CustomShaper
from megatron_gvpo.algorithms.members.base import MemberContext
from megatron_gvpo.algorithms.members.masa import pass_rate_reward
from megatron_gvpo.algorithms.shapers.judged import GroupSimilarity, WinRate
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.core.json_files import read_metrics
from megatron_gvpo.core.plain_values import LARGEST, NoNumberError, finite_number, real_number
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.data.order import SuccessTracker, WeightedOrder
from megatron_gvpo.data.prompts import load_prompts
from megatron_gvpo.groups import Prompt
from megatron_gvpo.observe.alerts import alerts_of
from megatron_gvpo.observe.report.page import Reporter, page_text
from megatron_gvpo.runs.listing import find_runs
from megatron_gvpo.servers.server import log_probs
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig
from megatron_gvpo.workers.environment import Reply, WrongValue, checked_reply

HUGE = 10**400
NO_NUMBERS = [HUGE, -HUGE, True, None, "1", [0.5], {}, math.nan, math.inf]


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_what_is_no_finite_number(value: Any):
    assert finite_number(value) is None


def test_finite_numbers():
    assert [finite_number(value) for value in (3, -0.5, 10**300, np.float64(2.5))] == [3.0, -0.5, 1e300, 2.5]
    assert type(finite_number(3)) is float
    assert finite_number(10**39, LARGEST) is None and finite_number(-LARGEST, LARGEST) == -LARGEST


@pytest.mark.parametrize("value", [HUGE, Fraction(HUGE), Decimal("1e400"), 1e39, np.float64(1e39)])
def test_the_users_code_returned_no_reward(value: Any):
    with pytest.raises(NoNumberError):
        real_number(value)


@pytest.mark.parametrize("reward", [*NO_NUMBERS, 1e39])
def test_scored_responses_of_data(tmp_path: Path, reward: Any):
    record = {
        "prompt": "a",
        "responses": [{"response": "he", "reward": 1}, {"response": "he", "reward": reward}],
    }
    (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
    dataset = DatasetConfig(path=str(tmp_path / "data.jsonl"), responses_key="responses", answer_key=None)
    words = r"line 1: .*(response 1: expected a number up to 3.4e\+38 as its reward|NaN|Infinity)"
    with pytest.raises(DataError, match=words):
        load_prompts(dataset, DataConfig(train=dataset), tokenizer(), longest=99, end_token_ids=(1,))


@pytest.mark.parametrize("rate", [HUGE, [0.5], {"a": 1}, True, "0.5", 50, math.nan])
def test_success_rates_of_data(rate: Any):
    prompts = [Prompt("p", (1,), "p", record={"rate": rate})]
    with pytest.raises(DataError, match=r"prompt p: field 'rate' .* want a success rate from 0 to 1"):
        WeightedOrder(prompts, 0, SuccessRate(field="rate"), SuccessTracker(Tracker()))


def test_log_probs_of_servers():
    assert log_probs([-1, -0.5]) == [-1.0, -0.5]
    for value in NO_NUMBERS:
        with pytest.raises(ValueError, match="is not a log-prob"):
            log_probs([-0.5, value])


def test_a_run_with_a_metric_that_no_float_holds(tmp_path: Path):
    """The page, the list of runs and the alerts leave the value out."""
    lines = [f'{{"step": {step}, "reward/mean": {HUGE}, "response/length": 4}}\n' for step in (1, 2)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    (tmp_path / "run" / "run.json").write_text('{"files": {}, "starts": []}')
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert records[1] == {"step": 2, "reward/mean": None, "response/length": 4}
    assert alerts_of([{"step": 1, "reward/mean": HUGE}]) == []
    [run] = find_runs(tmp_path, metric="reward/mean")
    assert run.step == 2 and run.best is None
    assert "<html" in page_text(Reporter([tmp_path / "run"], 10).report())
    (tmp_path / "run" / "metrics.jsonl").write_text(f'{{"step": {HUGE}}}\n')
    with pytest.raises(ValueError, match=r'line 1: expected \{"step": <integer>'):
        read_metrics(tmp_path / "run" / "metrics.jsonl")


@pytest.mark.parametrize("reply", [Reply(None, HUGE), Reply(None, 0.0, {"moves": HUGE})])
def test_rewards_and_counts_of_environments(reply: Reply):
    with pytest.raises(WrongValue, match=r"step returned int beyond 3\.4e\+38, the largest reward as"):
        checked_reply(reply)


@pytest.mark.parametrize("make", [CustomShaper, WinRate, GroupSimilarity, CustomMember])
def test_the_users_blocks(tmp_path: Path, make: Any):
    body = (
        "groups[0].rollouts[1].reward = 10 ** 400\n    return groups"
        if make is CustomMember
        else "return 10 ** 400"
    )
    body = "return [10 ** 400] * len(arguments[0].rollouts)" if make is CustomShaper else body
    first = "groups, " if make is CustomMember else ""
    (tmp_path / "mine.py").write_text(f"def f({first}*arguments):\n    {body}\n")
    block, groups = make(function=f"{tmp_path}/mine.py:f"), [make_group([1, 0])]
    with pytest.raises(
        UserFunctionError, match=r"int beyond 3\.4e\+38, the largest reward \(mine.py, line 1\)"
    ):
        block(groups, MemberContext) if make is CustomMember else block(groups, 1)


def test_a_prediction_of_the_policy():
    assert pass_rate_reward(HUGE, 0.5) == 0 and pass_rate_reward(0.5, 0.5) == 1

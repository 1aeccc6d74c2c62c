"""Toy blocks from outside the package, as a user adds them: one short run trains with all of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from helpers.inputs.rows import make_group
from helpers.tiny_run import configure, fit, records
from pydantic import TypeAdapter

from megatron_gvpo.algorithms.base import Loss
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.custom import CustomMember
from megatron_gvpo.algorithms.registry import choice
from megatron_gvpo.core.user_functions import UserFunctionError, forget_functions
from megatron_gvpo.megatron import parallel
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.types import BatchTotals, Rows, Totals, TrainBatch

MINE = """
import torch
from megatron_gvpo.groups import Group; from megatron_gvpo.types import LossInputs, Rows

def reward(prompt, rollout, low=0.25):
    return low + rollout.token_ids[0] % 2

def member(groups, sampling, count=1):
    found = sampling.ask([group.prompt for group in groups], count)
    return [Group(g.prompt, [*g.rollouts, *more.rollouts]) for g, more in zip(groups, found)]

def shaper(group, shift=10.0):
    return [reward + shift for reward in group.rewards]

def advantage(rows: Rows, value=2.0):
    return torch.full_like(rows.reward_n, value)

def loss(inputs: LossInputs, scale=1.0):
    rows, totals = inputs.rows, inputs.totals
    advantage_r = rows.token_advantages()
    metrics = {"responses": torch.tensor(float(len(rows))), "advantage": advantage_r.sum() / totals.tokens}
    return -scale * (advantage_r * inputs.logp_r).sum() / totals.tokens, metrics
"""

RUN = """
algorithm:
  recipe: null
  members: [{{name: custom, function: "{file}:member", options: {{count: 1}}}}]
  shapers: [{{name: custom, function: "{file}:shaper"}}]
  estimator: {{name: custom, function: "{file}:advantage", compares: false}}
  loss: {{name: custom, function: "{file}:loss", options: {{scale: {scale}}}}}
rewards: {{components: [{{name: mine, function: "{file}:reward"}}]}}
train: {{steps: 1}}
data: {{eval: null}}
optimizer: {{clip_grad: 0.0, warmup_steps: 0}}
checkpoint: {{export_hf: false}}
"""


@pytest.fixture(scope="module")
def trained(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[float, dict[str, Any]]:
    """Metrics of the only step of two runs, by the scale of their loss."""
    directory, metrics = tmp_path_factory.mktemp("own"), {}
    file = directory / "mine.py"
    file.write_text(MINE)
    for scale in (1.0, 3.0):
        (directory / f"{scale}.yaml").write_text(RUN.format(file=file, scale=scale))
        out = directory / f"out {scale}"
        try:
            fit(load_config([task / "run.yaml", directory / f"{scale}.yaml"], [f"output_dir={out}"]))
        finally:
            parallel.shut_down()
        metrics[scale] = records(out)[-1]
    return metrics


def test_a_reward_is_in_the_metrics(trained):
    assert 0.25 <= trained[1.0]["reward/mine"] <= 1.25


def test_a_shaper_changes_the_rewards_that_are_trained(trained):
    assert trained[1.0]["reward/mean"] == pytest.approx(trained[1.0]["reward/mine"] + 10)


def test_a_member_adds_a_response_to_every_group(trained):
    assert trained[1.0]["train/responses"] == 4 * (4 + 1)


def test_an_estimator_gives_the_advantages(trained):
    assert trained[1.0]["train/advantage"] == pytest.approx(2.0)


def test_a_loss_gives_the_gradient(trained):
    once, thrice = trained[1.0], trained[3.0]
    assert once["train/grad_norm"] > 0
    assert thrice["train/grad_norm"] == pytest.approx(3 * once["train/grad_norm"], rel=1e-4)
    assert thrice["reward/mine"] == once["reward/mine"]


def test_a_run_by_components_refuses_a_members_response_without_them(task, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from megatron_gvpo.groups import Rollout\n"
        "def f(groups, sampling):\n"
        "    gold = Rollout([7], [], 'gold', 'stop', reward=1.0, source='demonstration')\n"
        "    groups[0].rollouts.append(gold)\n"
        "    return groups\n"
    )
    block = f"algorithm={{recipe: gdpo, members: [{{name: custom, function: '{tmp_path}/mine.py:f'}}]}}"
    try:
        with pytest.raises(UserFunctionError, match=r"it returned a response without .* in its `rewards`"):
            fit(configure(task, tmp_path / "out", block, "train.steps=1"))
    finally:
        parallel.shut_down()


@pytest.mark.parametrize("returned", ["None", "[1]", "[Group(g.prompt, []) for g in groups]"])
def test_a_member_that_returns_no_groups_is_refused(tmp_path, returned):
    (tmp_path / "mine.py").write_text(
        f"from megatron_gvpo.groups import Group\ndef f(groups, sampling):\n    return {returned}\n"
    )
    member = CustomMember(function=f"{tmp_path}/mine.py:f")
    with pytest.raises(ValueError, match="expected a list of groups with one response or more each"):
        member.build()([make_group([1.0, 0.0])], None)


def test_a_member_that_cannot_be_called_is_refused_before_loading(task, tmp_path):
    (tmp_path / "mine.py").write_text("def f(groups):\n    return groups\n")
    block = f"algorithm.members=[{{name: custom, function: '{tmp_path}/mine.py:f'}}]"
    with pytest.raises(ValueError, match=r"called as f\(groups, sampling, \*\*options\)"):
        configure(task, tmp_path / "out", block)


def test_a_block_of_the_package_is_one_file_in_its_folder(tmp_path, monkeypatch):
    (tmp_path / "toy_losses").mkdir()
    (tmp_path / "toy_losses" / "__init__.py").touch()
    (tmp_path / "toy_losses" / "first.py").write_text(
        "from typing import ClassVar, Literal\n"
        "from megatron_gvpo.algorithms.base import Loss\n"
        "class First(Loss):\n"
        "    name: Literal['first'] = 'first'\n"
        "    signal: ClassVar[str] = 'none'\n"
    )
    text = (tmp_path / "toy_losses" / "first.py").read_text()
    text = text.replace("First", "Second").replace("first", "second")
    (tmp_path / "toy_losses" / "second.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    kind = choice(importlib.import_module("toy_losses"), kind=Loss)
    names = [type(TypeAdapter(kind).validate_python(name)).__name__ for name in ("first", "second")]
    assert names == ["First", "Second"]


def test_former_names_work_for_one_more_release():
    assert (Rows, Totals) == (TrainBatch, BatchTotals)
    forget_functions()
    former = "megatron_gvpo.algorithms.judged:unigram_overlap"
    with pytest.warns(FutureWarning, match="is now megatron_gvpo.algorithms.shapers.judged:unigram"):
        block = AlgorithmConfig.model_validate(
            {"recipe": "grpo", "shapers": [{"name": "group_similarity", "function": former}]}
        ).shapers[0]
    assert [r.reward for r in block([make_group([0.0, 0.0])], 1)[0].rollouts] == [1.0, 1.0]
    with pytest.warns(FutureWarning, match=r"is now megatron_gvpo\.api_model:repeat_best"):
        member = {"name": "teacher", "function": "megatron_gvpo.teacher:repeat_best"}
        AlgorithmConfig.model_validate({"recipe": "grpo", "members": [member]})

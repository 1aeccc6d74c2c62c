"""The methods as users meet them: the list, one recipe in full, the documentation, and methods of their
own.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.inputs.rows import make_logp, make_rows
from helpers.paths import ROOT
from helpers.tiny_run import fit, records

from megatron_gvpo.algorithms import catalog as methods
from megatron_gvpo.algorithms.base import token_weights
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.recipe import recipe_names
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.megatron import parallel
from megatron_gvpo.settings.config import load_config
from megatron_gvpo.types import BatchTotals

OWN = ROOT / "examples" / "own_method"


def command(*arguments: str, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megatron_gvpo", "recipes", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_the_page_has_every_recipe():
    text = methods.markdown()
    assert all(f"| `{name}` |" in text for name in recipe_names())


def test_the_list_for_people_and_for_programs():
    listed = command()
    assert [line.split()[0] for line in listed.stdout.splitlines()] == recipe_names()
    assert json.loads(command("--json").stdout) == methods.listing()


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_shown_with_every_effective_value(name):
    shown = yaml.safe_load(methods.show(name))
    assert AlgorithmConfig.model_validate(shown["algorithm"]) == AlgorithmConfig.model_validate(name)
    assert set(shown["algorithm"]) == set(AlgorithmConfig.model_fields)


def test_an_unknown_recipe_is_refused_by_name():
    refused = command("show", "gvpoo")
    assert refused.returncode == 2
    assert refused.stderr == "error: there is no recipe 'gvpoo'; did you mean 'gvpo'?\n"


def test_a_recipe_by_the_papers_spelling_is_found():
    with pytest.raises(ValueError, match="no recipe 'DAPO'; did you mean 'dapo'"):
        methods.show("DAPO")
    with pytest.raises(ValueError, match="did you mean 'dr_grpo'"):
        methods.show("Dr. GRPO")


def test_a_reader_that_has_seen_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        listed = command("--json", stdout=closed)
    assert listed.returncode == 0 and listed.stderr == ""


def test_one_recipe_has_no_form_of_the_list():
    refused = command("--json", "show", "gvpo")
    assert refused.returncode == 2 and "show NAME prints YAML" in refused.stderr and not refused.stdout


def own(tmp_path: Path, *overrides: str):
    (tmp_path / "run.yaml").write_text(
        (OWN / "run.yaml").read_text().replace("examples/", f"{ROOT}/examples/")
    )
    return [tmp_path / "run.yaml", *overrides]


def test_a_method_of_ones_own_trains(task, tmp_path):
    try:
        file, *overrides = own(tmp_path, f"output_dir={tmp_path / 'out'}", "train.steps=2", "data.eval=null")
        fit(load_config([task / "run.yaml", file], [*overrides, "train.mini_batches=2"]))
    finally:
        parallel.shut_down()
    steps = records(tmp_path / "out")[1:]
    assert len(steps) == 2
    assert all(math.isfinite(value) for line in steps for value in line.values())
    assert any(line["train/grad_norm"] > 0 for line in steps)


def test_the_example_is_the_loss_that_it_says():
    loss = AlgorithmConfig.model_validate(
        {
            "recipe": None,
            "estimator": "group",
            "loss": {
                "name": "custom",
                "function": f"{OWN}/method.py:clipped",
                "reads": ["advantage", "old"],
            },
        }
    ).loss
    rows = make_rows([[1, 0, 0], [1, 0]])
    logp_r = make_logp(rows)
    weight_r, _ = token_weights(loss, rows, logp_r, BatchTotals.of(rows))
    ratio_r, advantage_r = (logp_r - rows.old_logp_r).exp(), rows.advantage_n[rows.seq_r]
    is_cut_r = ((ratio_r > 1.2) & (advantage_r > 0)) | ((ratio_r < 0.8) & (advantage_r < 0))
    assert 0 < is_cut_r.sum() < len(logp_r)
    torch.testing.assert_close(weight_r, (-ratio_r * advantage_r / len(logp_r)).where(~is_cut_r, 0))
    assert loss.signal == "advantage" and set(loss.reference_policies) == {"old"} and not loss.couples_groups
    assert len((OWN / "method.py").read_text().splitlines()) <= 23


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("algorithm.loss.function=nowhere:loss", "algorithm.loss: importing nowhere failed"),
        (f"algorithm.loss.function={OWN}/method.py:los", "has no function 'los'; it has: best_only"),
        ("algorithm.loss.options={hihgest: 1}", "it is called as f(inputs, **options) with options"),
        ("algorithm.loss.reads=[rewards]", "algorithm.loss.reads.0: Input should be 'reward'"),
        ("algorithm.loss.function=mine/loss.py:f", "there is no file mine/loss.py in /"),
        (
            "algorithm.shapers={name: keep}",
            "algorithm.shapers: expected a list, as [a, b], found {",
        ),
        ("algorithm.estimator.function=x", "algorithm.estimator: expected module:function"),
        ("algorithm.estimator=null", "algorithm: estimator is missing: the loss custom is weighed by"),
    ],
)
def test_a_method_that_cannot_be_called_is_refused_before_loading(task, tmp_path, override, problem):
    file, *_ = own(tmp_path)
    with pytest.raises(ConfigError) as refused:
        load_config([task / "run.yaml", file], [f"output_dir={tmp_path}", override])
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("block", "function", "problem"),
    [
        (
            "loss",
            "def f(inputs):\n    return inputs.logp_r\n",
            "expected a scalar tensor, it returned one of shape",
        ),
        (
            "loss",
            "def f(inputs):\n    return inputs.logp_r.detach().sum()\n",
            "does not depend on inputs.logp_r",
        ),
        (
            "estimator",
            "def f(rows):\n    return rows.reward_n[:1]\n",
            "one advantage a response; it returned",
        ),
    ],
)
def test_what_a_function_returns_is_checked(tmp_path, block, function, problem):
    (tmp_path / "mine.py").write_text(function)
    spec = {"name": "custom", "function": f"{tmp_path}/mine.py:f"}
    values = {"recipe": None, "estimator": "group", "loss": "pg", block: spec}
    algorithm = AlgorithmConfig.model_validate(values)
    rows = make_rows([[1, 0, 1]])
    with pytest.raises(ValueError, match=problem):
        if block == "estimator":
            algorithm.estimator(rows)
        else:
            token_weights(algorithm.loss, rows, make_logp(rows), BatchTotals.of(rows))

"""Unmodified recipes of tinker-cookbook learn from a real server, in every layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import pytest
from helpers.inputs import cookbook_task
from helpers.servers.tinker_clients import recipe, run_client, serving

SERVER = f"""
model: {{path: {cookbook_task.MODEL}, dtype: float32, adapter: {{rank: 4, alpha: 16}}}}
output_dir: out
serve: {{key: {{env: TINKER_TEST_KEY}}}}
max_tokens_per_micro_batch: 4096
"""
SMALL = {"model_name": cookbook_task.MODEL, "lora_rank": 4}
LAYOUTS = {
    "one rank": (1, "seed=0"),
    "tp2": (2, "parallel.tp=2"),
    "pp2": (2, "parallel.pp=2"),
    "cp2": (2, "parallel.cp=2"),
    "dp2": (2, "seed=0"),
}


def learn(folder: Path, url: str, name: str, metric: str, **options: object) -> list[float]:
    """The metric of each step of a recipe, which has saved its last state."""
    log = folder / name
    run_client(folder, *recipe(name, url, log_path=log, **SMALL, **options), seconds=1200)
    assert last_checkpoint(log)["state_path"].endswith("/weights/final")
    records = map(json.loads, (log / "metrics.jsonl").read_text().splitlines())
    return [record[metric] for record in records if metric in record]


def last_checkpoint(log: Path) -> dict[str, str]:
    return json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])


def supervised(folder: Path, url: str) -> list[float]:
    """The mean negative log-likelihood of each step of sl_loop."""
    options = {"batch_size": 8, "max_length": 256, "learning_rate": 5e-3}
    return learn(folder, url, "sl_loop", "train_mean_nll", **options)


def reinforced(folder: Path, url: str, steps: int) -> list[float]:
    """The mean reward of each step of rl_loop."""
    options = {"batch_size": 4, "group_size": 16, "max_tokens": 20, "learning_rate": 2e-3}
    # The default of loss_fn, stable_reinforce, is not published.
    more = {"max_steps": steps, "loss_fn": "importance_sampling"}
    return learn(folder, url, "rl_loop", "reward/total", **options, **more)


def distilled(folder: Path, url: str) -> list[float]:
    """The KL of each step to the model that rl_loop has trained."""
    options = {"groups_per_batch": 6, "group_size": 16, "max_tokens": 20, "learning_rate": 2e-3}
    options |= {"eval_every": 0, "save_every": 8}
    return learn(
        folder,
        url,
        "distillation.on_policy_distillation",
        "teacher_kl",
        teacher_model=cookbook_task.MODEL,
        teacher_checkpoint=last_checkpoint(folder / "rl_loop")["sampler_path"],
        behavior_if_log_dir_exists="delete",
        **options,
    )


@contextmanager
def served(folder: Path, layout: str) -> Iterator[str]:
    (folder / "server.yaml").write_text(SERVER)
    ranks, override = LAYOUTS[layout]
    with serving(folder, override, ranks=ranks) as url:
        yield url


def test_recipes_run_and_one_learns(tmp_path: Path) -> None:
    """Under pipeline parallelism, from a model that has learned nothing; two steps of rl_loop."""
    cookbook_task.make(tmp_path, steps=0)
    with served(tmp_path, "pp2") as url:
        nll = supervised(tmp_path, url)
        assert len(reinforced(tmp_path, url, steps=2)) == 2
    assert nll[-1] < 0.85 * nll[0], nll  # the rows are equal: without learning it stays where it was


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recipes_learn(tmp_path: Path, layout: str) -> None:
    cookbook_task.make(tmp_path)
    with served(tmp_path, layout) as url:
        nll = supervised(tmp_path, url)
        reward = reinforced(tmp_path, url, steps=10)
        kl = distilled(tmp_path, url)
    assert nll[-1] < 0.7 * nll[0], nll
    assert fmean(reward[-3:]) > fmean(reward[:2]) + 0.15, reward
    assert fmean(kl[-3:]) < 0.5 * fmean(kl[:2]), kl

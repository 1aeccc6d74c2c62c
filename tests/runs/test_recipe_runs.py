"""Recipes run real steps on a tiny model: Megatron, the embedded engine, reward workers.

`make test` runs two steps of a few recipes that have every block between them, `make proof` three steps of
every recipe. Rewards differ between responses, so that every method has a gradient.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from helpers.servers.teacher_servers import teaching
from helpers.tiny_run import StopAfter, configure, fit, make_task, records

from megatron_gvpo.algorithms.recipe import read_recipe, recipe_names

REWARD = """
def right(prompt, rollout):  # about half of the responses of a model that knows nothing
    return float(sum(rollout.token_ids) % 2)

def hard(prompt, rollout):  # every second prompt is beyond it
    return right(prompt, rollout) * (sum(prompt.token_ids) % 2)

def part(prompt, rollout, modulus=3):
    return (sum(rollout.token_ids) % modulus) / (modulus - 1)

def better(prompt, a, b):
    return float(len(a.token_ids) > len(b.token_ids)) if len(a.token_ids) != len(b.token_ids) else 0.5
"""
pytestmark = pytest.mark.usefixtures("leave_the_process_group")
TAUGHT = "teacher={path: INPUTS/teacher, server: {urls: [TEACHER]}}"
# Beside what a recipe says it goes with: what its rewards are here, and what users must name themselves.
EXTRA = {
    "gdpo": ["algorithm.estimator={weights: {right: 1, rubric: 0.5}}"],
    "rank_grpo": ["algorithm.estimator={items: 2, separator_ids: [1, 2, 3, 4, 5]}"],
    "scaf_grpo": [
        "algorithm.members=[{name: hinted, fields: [hint_1, hint_2], n: 1, place: replace, keep: right}]"
    ],
    "gvpo_teacher": ["algorithm.members=[{name: teacher, function: 'megatron_gvpo.api_model:repeat_best'}]"],
    "s_grpo": ["data.max_prompt_tokens=64"],
    "hill": ["data.max_prompt_tokens=96", 'algorithm.members.0.template="{failed}"'],
    "xrpo": [
        "data.max_prompt_tokens=192",
        'algorithm.members.0.template="{problem}{solution}"',
        "algorithm.members.1.extra=2",
    ],
    "masa": ["data.max_prompt_tokens=192", 'algorithm.members.0.template="{}"'],
    "arise": [
        'algorithm.members=[{name: skills, n: 2, after_step: 0, gate: 0, template: "{skill}", '
        'summary_template: "{best}"}]'
    ],
    "m_grpo": ["algorithm.estimator={open_ids: [1, 2, 3, 4], close_ids: [5, 6, 7, 8], local: rubric}"],
    "grpo_care": ["algorithm.estimator={marker_ids: [1, 2, 3], accuracy: right}"],
    "opd": [TAUGHT],
    "opd_rewards": [TAUGHT],
    "gvpo_plus_plus": [TAUGHT],
    "gvpo_teacher_logprobs": [TAUGHT],
    "opd_full": ["teacher={path: INPUTS/teacher}"],
    "igrpo": ['algorithm.members.0.template="{hint}"'],
}


@pytest.fixture(scope="module")
def inputs(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data set with hints and scored responses beside the solutions, rewards, and a teacher."""
    directory = tmp_path_factory.mktemp("recipes")
    (directory / "rewards.py").write_text(REWARD)
    lines = (task / "data" / "train.jsonl").read_text().splitlines()
    with (directory / "train.jsonl").open("w") as file:
        for number, line in enumerate(lines):
            record = json.loads(line)
            scored = [
                {"response": record["solution"][:9], "reward": 1.0},
                {"response": record["prompt"][:5], "reward": 0.2},
                {"response": "1", "reward": 0.0},
            ]
            hints = {"hint": "1", "hint_1": "1", "hint_2": "2", "hint_3": "3"}
            record |= {"responses": scored, "topic": number % 3, **hints}
            file.write(json.dumps(record) + "\n")
    make_task.make_model(directory / "teacher", seed=1)
    with teaching(directory / "teacher") as (url, _):
        (directory / "teacher_url").write_text(url)
        yield directory


def blocks_of(name: str) -> set[tuple[str, str]]:
    """The blocks of a recipe: (section, name of the block)."""
    blocks = set()
    for section, value in read_recipe(name)[0].items():
        for block in value if isinstance(value, (list, tuple)) else [value]:
            blocks.add((section, str(block.get("name") if isinstance(block, Mapping) else block)))
    return blocks


def covering() -> list[str]:
    """A small set of recipes that has every block of all recipes (greedy set cover)."""
    blocks = {name: blocks_of(name) for name in recipe_names()}
    uncovered, chosen = set[tuple[str, str]]().union(*blocks.values()), []
    while uncovered:
        chosen.append(max(blocks, key=lambda name: len(blocks[name] & uncovered)))
        uncovered -= blocks[chosen[-1]]
    return chosen


def overrides(name: str, inputs: Path) -> list[str]:
    rewards = [
        {"name": "right", "function": f"{inputs}/rewards.py:right"},
        *(
            {"name": part, "function": f"{inputs}/rewards.py:part", "weight": 0.0, "options": {"modulus": m}}
            for part, m in {"format": 2, "rubric": 3, "stratum": 4, "rank_1": 5, "rank_2": 3}.items()
        ),
    ]
    settings = {key: value for key, value in read_recipe(name)[1].settings.items()}
    settings["rollout.n"] = min(settings.get("rollout.n", 4), 4)
    settings["train.mini_batches"] = min(settings.get("train.mini_batches", 2), 2)
    return [
        f"algorithm.recipe={name}",
        f"data.train={{path: {inputs}/train.jsonl, demonstration_key: solution, responses_key: responses}}",
        "data.eval=null",
        f"rewards.components={json.dumps(rewards)}",
        "train.steps=3",
        "data.max_prompt_tokens=48",
        "checkpoint.export_hf=false",
        *(f"{key}={json.dumps(value)}" for key, value in settings.items()),
        *(
            text.replace("INPUTS", str(inputs)).replace("TEACHER", (inputs / "teacher_url").read_text())
            for text in EXTRA.get(name, [])
        ),
    ]


@pytest.mark.parametrize(
    ("name", "count"),
    [(name, 2) for name in covering()]
    + [pytest.param(name, 3, marks=pytest.mark.proof) for name in recipe_names()],
)
def test_a_recipe_runs_with_a_gradient(task, inputs, tmp_path, name, count):
    fit(configure(task, tmp_path, *overrides(name, inputs), f"train.steps={count}"))
    steps = records(tmp_path)[1:]
    assert [line["step"] for line in steps] == list(range(1, count + 1))
    for line in steps:
        assert all(math.isfinite(value) for value in line.values())
        assert line["train/skipped"] == 0
    assert any(line["train/grad_norm"] > 0 for line in steps)


@pytest.mark.parametrize(
    "name",
    ["ppo", "grpo_care"] + [pytest.param(name, marks=pytest.mark.proof) for name in recipe_names()],
)
def test_a_recipe_trains_adapters(task, inputs, tmp_path, name):
    """PPO's critic trains all of its own weights; GRPO-CARE keeps a moving average, of adapters alone."""
    fit(configure(task, tmp_path, *overrides(name, inputs), "train.steps=2", "model.adapter={rank: 4}"))
    steps = records(tmp_path)[1:]
    assert len(steps) == 2 and any(line["train/grad_norm"] > 0 for line in steps)
    assert all(math.isfinite(value) for line in steps for value in line.values())


def test_hill_runs_with_the_hints_of_another(task, inputs, tmp_path):
    """Every second prompt fails; a stand-in for a second model gives its best response as a hint."""
    hard = f'rewards.components=[{{name: hard, function: "{inputs}/rewards.py:hard"}}]'
    asks = "algorithm.members.0.template="  # of the policy, which this run does not ask
    options = [each for each in overrides("hill", inputs) if not each.startswith(asks)]
    options += [hard, "data.max_prompt_tokens=96"]
    hints = "algorithm.members.0.function=megatron_gvpo.api_model:repeat_best"
    fit(configure(task, tmp_path, *options, hints, "algorithm.members.0.hint_template='{hint}'"))
    steps = records(tmp_path)[1:]
    assert len(steps) == 3 and any(line["train/grad_norm"] > 0 for line in steps)
    assert all(line["response/from_policy"] == 1 for line in steps), "the hints are not responses"


def test_xrpo_shows_solved_problems_to_those_who_all_failed(task, inputs, tmp_path):
    hard = f'rewards.components=[{{name: hard, function: "{inputs}/rewards.py:hard"}}]'
    fit(configure(task, tmp_path, *overrides("xrpo", inputs), hard))
    shares = [line["response/from_policy"] for line in records(tmp_path)[1:]]
    assert min(shares) < 1 and all(share > 0.5 for share in shares)


def test_a_resumed_run_remembers_its_responses_and_its_prompts(task, inputs, tmp_path):
    """Checkpoints hold history and success rates: interrupted after step 1, the run continues unchanged."""
    name = "gvpo_history"
    extra = ["algorithm.prompts={name: success_rate, favour: hard}", "train.prompts_per_step=24"]
    options = [*overrides(name, inputs), "algorithm.members.0.count=2", *extra]
    fit(configure(task, tmp_path / "whole", *options))
    stopped = fit(configure(task, tmp_path / "parts", *options), [StopAfter(1)])
    assert stopped.step == 1
    fit(configure(task, tmp_path / "parts", *options), resume=True)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert records(tmp_path / "whole")[-1]["response/from_policy"] < 1, "some responses are replayed"

"""Every option of a method changes what a run computes; an option that never does is a defect.

The blocks and their options are found by walking the settings, and other values follow from an option's type,
so a new option is tested here without being named. The runs are the real trainer's, with a small policy in
Megatron's place (helpers/options/small_policy.py). An option is changed alone, and if that changes nothing,
beside other values of its block's options. `NOT_SEEN` lists the options whose effect such a run cannot show.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.options import small_run
from helpers.options.homes import Slot, home, slots
from helpers.options.other_values import Option, options_of
from helpers.options.search import Trial, base_of, configured, has_effect, search

NO_VALUE = "helpers/options/other_values.py has no other value of its type"
NOT_SEEN = {
    "BNPO.components": "goes with components of weight 1, whose sum is not in [0, 1] here",
    "CustomEstimator.compares": "decides only whether rollout.n=1 is refused",
    "CustomLoss.groups": "decides which rows one call gets, and the small run gives all of them to each",
    "Exits.end": "responses of the small run have no thinking that could end",
    "Knapsack.low": "the small run visits too few prompts twice",
    "GAE.values": "goes with algorithm.critic: each of its values without the other is refused",
    "Reference.name": "goes with decay: each without the other is refused",
    "TrainConfig.max_hours": "ends a run by the clock",
    "TrainConfig.stop_early": "ends a run by its evaluations",
    "TrainConfig.max_tokens_per_micro_batch": "memory: no gradient depends on it",
    "TrainConfig.max_empty_batches": "ends a run that learns nothing",
    "TrainConfig.share_prompts": "speed",
    "TrainConfig.head_stash_mb": "memory and speed",
    "TrainConfig.head_backend": "speed",
    "TrainConfig.deterministic": "rounding on a GPU",
    "RolloutConfig.engine": "needs servers",
    "RolloutConfig.batch_size": "memory and speed",
    "RolloutConfig.async_steps": "needs servers",
    "RolloutConfig.over_sampling_prompts": "needs servers",
    "RolloutConfig.router_replay": "needs servers",
    "RolloutConfig.conversation": "needs an environment, tools or a program",
    "RolloutConfig.servers": "needs servers",
    "RolloutConfig.weights": "needs servers",
    "RolloutConfig.speculation": "needs servers",
    "RolloutConfig.mismatch_threshold": "decides only when a run warns",
    "DataConfig.train": "a section, tested by itself",
    "DataConfig.eval": "held-out prompts, which nothing is trained on",
    "DatasetConfig.path": "the data themselves",
    "DatasetConfig.subset": "of data sets of the hub; refused for files",
    "DatasetConfig.split": "of data sets of the hub; refused for files",
    "DatasetConfig.images_key": "of models that take images; refused for others",
    "DatasetConfig.tools_key": "of records with tools, which the small run's do not have; refused for others",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("options")
    small_run.make(path)
    with pytest.MonkeyPatch.context() as patch:
        small_run.patched(path, patch)
        yield path


def inside(settings: Any, path: tuple[str | int, ...]) -> Any:
    for name in path:
        settings = getattr(settings, name) if isinstance(name, str) else settings[name]
    return settings


def own_options(slot: Slot) -> list[str]:
    return [name for name in slot.blocks[-1].model_fields if name not in ("name", "recipe")]


def each_slot() -> list[Any]:
    """Every block that has options, but members, which ask a sampler for more: test_members.py has those."""
    return [
        pytest.param(slot, id=slot.label)
        for slot in slots()
        if own_options(slot) and slot.path[0] != "members"
    ]


@pytest.mark.parametrize("slot", each_slot())
def test_the_options_of_a_block_have_an_effect(slot: Slot, directory: Path) -> None:
    values, path = home(slot, directory)
    base = base_of(values)
    assert base.seen is not None, "the block's own configuration does not run"
    around = list(options_of(inside(configured(values).algorithm, path)))
    own = [option for option in around if option.owner is slot.blocks[-1] and len(option.path) == 1]
    idle = {}
    for option in own:
        if option.label in NOT_SEEN or is_section(option):
            continue
        assert option.others, f"{option.label}: {NO_VALUE}"
        of_option = search(base, option, around, ("algorithm", *path))
        if not has_effect(of_option):
            idle[option.label] = summary(of_option)
    assert not idle, f"options without an effect: {idle}"


# The methods with which the keys of a section are tried; one of them must show an effect.
SECTIONS = {
    ("train",): ["grpo"],
    ("rollout",): ["grpo"],
    ("data",): ["grpo"],
    ("data", "train"): ["grpo", "sft", "dpo"],
}


@pytest.mark.parametrize("section", SECTIONS, ids=".".join)
def test_the_keys_of_a_section_have_an_effect(section: tuple[str, ...], directory: Path) -> None:
    idle: dict[str, list[str]] = {}
    for number, method in enumerate(SECTIONS[section]):
        base = base_of(small_run.values_of({"recipe": method}, directory))
        around = [
            option for option in options_of(inside(configured(base.values), section)) if len(option.path) == 1
        ]
        for option in around:
            if option.label in NOT_SEEN or (number and option.label not in idle):
                continue
            assert option.others, f"{option.label}: {NO_VALUE}"
            trials = search(base, option, around, section)
            idle[option.label] = summary(trials)
            if has_effect(trials):
                del idle[option.label]
    assert not idle, f"keys without an effect: {idle}"


def is_section(option: Option) -> bool:
    """True for an option that holds a block, whose own options are tested by themselves."""
    return hasattr(option.value, "model_fields") and not option.others


def summary(of_option: list[Trial]) -> list[str]:
    return [f"{trial.value!r}: {trial.effect} {trial.text[:200]}" for trial in of_option[:4]]

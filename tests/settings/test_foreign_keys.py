"""Every key of four other trainers' configurations, typed here, is answered with ours or "not supported"."""

import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.inputs.good_config import GOOD, message
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from megatron_gvpo.algorithms.catalog import _block_keys, _blocks
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.losses.aggregation import Aggregation
from megatron_gvpo.algorithms.recipe import recipe_names
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.config import build_config
from megatron_gvpo.settings.explain import foreign

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "docs"))
import configuration

LISTS = {file.stem: file for file in (Path(__file__).parent / "foreign_keys").glob("*.txt")}
SHARED = {"data.shuffle", "data.train.split", "output_dir"}  # keys of ours with the same name and meaning
TABLE = yaml.safe_load(resources.files("megatron_gvpo.settings").joinpath("foreign_keys.yaml").read_text())


def keys_of(trainer: str) -> list[str]:
    return [line for line in LISTS[trainer].read_text().splitlines() if not line.startswith("#")]


def typed(key: str) -> str:
    """The error for a configuration with this key."""
    values = yaml.safe_load(GOOD)
    *sections, name = key.split(".")
    inner = values
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = 1
    try:
        build_config(values)
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_there_are_four_lists():
    assert {name: len(keys_of(name)) > 200 for name in LISTS} == dict.fromkeys(
        ("trl", "verl", "slime", "nemo_rl"), True
    )


@pytest.mark.parametrize("trainer", ["trl", "verl", "slime", "nemo_rl"])
def test_every_key_of_another_trainer_is_answered(trainer):
    unanswered = []
    for key in keys_of(trainer):
        if key in SHARED:
            continue
        line = next((line for line in typed(key).splitlines() if line.startswith(f"{key}: ")), "")
        if not re.match(r"\S+: no such key; (here it is|not supported:) ", line):
            unanswered.append((key, line))
    assert unanswered == []


@pytest.mark.parametrize("section", ["train", "rollout", "algorithm.loss", "optimizer", "data", "logging"])
def test_the_answer_is_the_same_in_a_section_of_ours(section):
    """A name that the section has itself is ours there, such as `beta` of a loss."""
    own = {name for path, part in configuration.sections() if path == section for name in part.model_fields}
    own |= {name for block in _blocks(_block_keys()["loss"]) for name in block.model_fields}
    for key in keys_of("trl"):
        if key not in own:
            assert foreign(f"{section}.{key}") is not None, key


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("rollout.num_generations", "here it is rollout.n"),
        ("num_generations", "here it is rollout.n"),
        ("rollout.rollout_top_k", "here it is rollout.top_k"),
        ("train.num_epochs", "here it is train.steps, as a number of steps"),
        ("train.learning_rate", "here it is optimizer.lr"),
        ("reward_model.megatron.tensor_model_parallel_size", "here it is rewards.components[].model"),
        ("policy.megatron_cfg.scheduler.lr_warmup_iters", "here it is optimizer.warmup_steps"),
        ("policy.sequence_packing.train_mb_tokens", "here it is train.max_tokens_per_micro_batch"),
        ("policy.dtensor_cfg.tensor_parallel_size", "here it is parallel.tp"),
        ("--n-samples-per-prompt", "here it is rollout.n"),
        ("optimizer.epsilon", "here it is optimizer.eps"),
        (
            "algorithm.gvpo.beta",
            "here it is algorithm.loss.kl_coef; with the recipes gvpo and dpo algorithm.loss.b",
        ),
        (
            "actor_rollout_ref.actor.kl_loss_type",
            "here it is algorithm.loss.kl_coef, whose estimate is always k3",
        ),
        ("warmup_ratio", "here it is optimizer.warmup_steps, in updates: the ratio x train.steps"),
        ("epochs", "here it is train.steps, as a number of steps"),
        ("train.batch_size", "here it is train.prompts_per_step"),
        (
            "num_layers_per_virtual_pipeline_stage",
            "here it is parallel.vpp, which counts the stages of a",
        ),
        ("train_iters", "here it is train.steps x train.mini_batches x train.batch_epochs, as it counts upd"),
        ("trainer.critic_warmup", "not supported: steps that train the critic alone; the policy trains from"),
        ("--num-critic-only-steps", "not supported: steps that train the critic alone"),
        ("critic.optim.lr_warmup_steps", "here it is algorithm.critic.warmup_steps, in updates"),
        ("attention_backend", "not supported: a choice of the attention kernel"),
    ],
)
def test_answers(key, answer):
    assert foreign(key).startswith(answer)


def test_a_whole_section_of_another_trainer_is_answered_key_by_key(good):
    text = message(
        good, "actor_rollout_ref={rollout: {n: 8, top_k: 5}, actor: {optim: {lr: 1}, nonsense: 1}}"
    )
    assert text.splitlines() == [
        "actor_rollout_ref.rollout.n: no such key; here it is rollout.n",
        "actor_rollout_ref.rollout.top_k: no such key; here it is rollout.top_k",
        "actor_rollout_ref.actor.optim.lr: no such key; here it is optimizer.lr",
    ]


def exists(key: str) -> bool:
    sections = {path: part.model_fields.keys() for path, part in configuration.sections()}
    key = key.removesuffix("[]")
    section, _, name = key.rpartition(".")
    if section.startswith("algorithm."):
        block_key = section.removeprefix("algorithm.")
        block_keys = _block_keys() | {"loss.aggregation": Aggregation}
        blocks = _blocks(block_keys[block_key]) if block_key in block_keys else []
        return name in {field for block in blocks for field in block.model_fields}
    return name in sections.get(section, ()) or key in sections or f"{key}[]" in sections


def test_the_keys_and_recipes_that_answers_name_exist():
    first = {path.split(".")[0] for path, _ in configuration.sections() if path}
    for answer in (*TABLE["ours"], *TABLE["not_supported"]):
        plain = re.sub(r"`[^`]*`", "", answer)
        for key in re.findall(r"[a-z_]+(?:\[\])?(?:\.[a-z_0-9]+(?:\[\])?)+", plain):
            if key.split(".")[0] in first:
                assert exists(key), f"{answer}: {key}"
        for recipes in re.findall(r"the recipes? ((?:\w+(?:, | and )?)+)", plain):
            named = re.split(r", | and ", recipes)
            assert named[0] in recipe_names(), answer


SECTIONS = dict(configuration.sections())
KEY_AND_VALUES = re.compile(
    r"(?P<key>[a-z_0-9]+(?:\.[a-z_0-9]+)+)"
    r"(?:: (?P<values>\[.*?\]|\{.*?\}|\w+(?:(?:, | or )\w+)*(?=,|$)))?"
    r"(?:, (?:with|as in|or) the recipes? (?P<recipes>\w+(?: and \w+)*))?"
)


def field_of(key: str, recipe: str) -> FieldInfo:
    """The field that a dotted key names; in the method's blocks, that of this recipe's block."""
    section, _, name = key.rpartition(".")
    part: Any = SECTIONS.get(section)
    if part is None:
        part = AlgorithmConfig(recipe=recipe)
        for block in section.split(".")[1:]:
            part = getattr(part, block)
    return (part if isinstance(part, type) else type(part)).model_fields[name]


@pytest.mark.parametrize("answer", [answer for answer in TABLE["ours"] if KEY_AND_VALUES.match(answer)])
def test_the_key_of_an_answer_takes_its_values_in_the_recipes_that_it_names(answer):
    """DisCO's loss has max_tokens, which the recipe dr_grpo refuses; and a baseline is called `loo`."""
    key, values, recipes = KEY_AND_VALUES.match(answer).groups()
    words = [values] if values and values[0] in "[{" else re.split(", | or ", values or "")
    for recipe in (recipes or "gvpo").split(" and ") if recipes or values else []:
        adapter = TypeAdapter(field_of(key, recipe).rebuild_annotation())
        for word in filter(None, words):
            adapter.validate_python(yaml.safe_load(word.replace("...", "0.5")))


def test_no_name_has_two_answers():
    names = [name for group in TABLE.values() for entry in group.values() for name in entry]
    assert len(names) == len(set(names)) > 900

"""The recipes of the package."""

from __future__ import annotations

import math

import pytest
from helpers.inputs.rows import make_group

from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.advantages.normalised import BNPO
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.curriculum.batch_policy import Accumulate
from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.algorithms.losses.supervised import NLL
from megatron_gvpo.algorithms.recipe import About, read_recipe, recipe_names
from megatron_gvpo.algorithms.shapers.filters import Keep
from megatron_gvpo.algorithms.shapers.length import Overlong
from megatron_gvpo.types import TrainBatch


@pytest.mark.parametrize("recipe", recipe_names())
def test_recipes_load_name_their_source_and_survive_a_round_trip(recipe):
    algorithm = AlgorithmConfig.model_validate(recipe)
    assert AlgorithmConfig.model_validate(algorithm.model_dump(mode="json")) == algorithm
    _, about = read_recipe(recipe)
    assert about.title and about.paper and about.summary
    assert about.provenance != "inspired by" or about.chosen, "what was chosen where the source is silent"


@pytest.mark.parametrize("key", ["provenance", "sure"])
def test_the_provenance_of_formulas_has_a_former_key(key):
    about = About.model_validate({"title": "T", "paper": "P", "summary": "S", key: "textbook"})
    assert about.provenance == "textbook"


def test_one_item_of_a_recipes_list_can_be_changed():
    values = {"recipe": "dapo", "shapers": {"0": {"buffer": 100}}}
    assert AlgorithmConfig.model_validate(values).shapers == (Overlong(buffer=100, weight=0.5),)
    replaced = {"recipe": "dapo", "shapers": {0: {"name": "keep", "right": 0.9}}}
    assert AlgorithmConfig.model_validate(replaced).shapers == (Keep(right=0.9),)
    with pytest.raises(ValueError, match="shapers"):
        AlgorithmConfig.model_validate({"recipe": "dapo", "shapers": {"1": {"buffer": 100}}})


def test_an_estimator_under_another_name_replaces_the_recipes():
    bnpo = AlgorithmConfig.model_validate({"recipe": "grpo", "estimator": "bnpo"})
    assert bnpo.estimator == BNPO()
    plain = AlgorithmConfig.model_validate({"recipe": "grpo", "estimator": {"ddof": 0}})
    assert plain.estimator == Estimator(scale="group_std", ddof=0)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"recipe": "remax", "prior": "none"}, "needs an expected reward: prior=greedy, tracker or function"),
        ({"recipe": "grpo", "members": ["one_more"]}, "members: one_more needs an expected reward"),
        ({"recipe": "grpo", "prior": "greedy"}, "prior=greedy: nothing reads it"),
        (
            {"recipe": "reg_grpo", "estimator": "prefix_tree"},
            "gives every token an advantage",
        ),
        ({"recipe": "grpo", "loss": {"ratio": "item"}}, "ratio=item needs the estimator rank"),
        ({"recipe": "sft", "shapers": ["affine"]}, "sampler=dataset has none"),
        ({"recipe": "dpo", "members": ["replay"]}, "replay has nobody to ask, or to join"),
        ({"recipe": "dpo", "shapers": ["overlong"]}, "shapers: overlong: max_tokens is missing"),
        (
            {"recipe": "gpg", "sampler": "file", "loss": {"importance": {"cap": 2}}},
            "loss.importance=truncate reads the engine's log-probs",
        ),
        ({"recipe": "xrpo", "sampler": "file"}, "estimator=novelty reads the engine's log-probs"),
        ({"recipe": "dpo", "allocation": "knapsack"}, "allocation ask the engine"),
        ({"recipe": "gvpo_history", "reference_logprobs": "engine"}, "the present engine did not sample"),
    ],
)
def test_compositions_that_mean_nothing_are_refused(values, problem):
    with pytest.raises(ValueError, match=problem):
        AlgorithmConfig.model_validate(values)


def test_a_member_may_be_all_that_reads_the_prior():
    values = {"recipe": "grpo", "members": ["one_more"], "prior": "tracker"}
    assert AlgorithmConfig.model_validate(values).needs_tracker


def test_weighted_grpo_weighs_what_is_wrong_after_the_normalisation():
    """One of 8 right and seven of 8 right have std sqrt(1/8). As a reward, -lambda would be normalised
    away.
    """
    recipe = AlgorithmConfig.model_validate("weighted_grpo")
    groups = [make_group([1] + [0] * 7, "hard"), make_group([1] * 7 + [0], "easy")]
    for shaper in recipe.shapers:
        groups = shaper(groups, 1)
    rare, common = 7 / math.sqrt(8), 1 / math.sqrt(8)
    expected = [rare] + [-0.3 * common] * 7 + [common] * 7 + [-0.3 * rare]
    assert recipe.estimator(TrainBatch.from_groups(groups))[0].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["disco_b", "disco_ratio", "drpo"])
def test_what_is_like_disco_goes_with_its_settings(name):
    assert read_recipe(name)[1].settings == read_recipe("disco")[1].settings


def test_recipes_say_what_the_papers_say():
    recipes = {name: AlgorithmConfig.model_validate(name) for name in ("gvpo", "gpg", "grpo", "sft")}
    assert AlgorithmConfig() == recipes["gvpo"]
    assert recipes["gvpo"].loss == GVPO(beta=0.1, norm="k-1", reference="step_start", terms=("var", "cov"))
    assert recipes["gpg"].estimator == Estimator(baseline="mean", scale="none", age="sample")
    assert recipes["gpg"].batch_policy == Accumulate(threshold=0.6)
    assert recipes["grpo"].estimator == Estimator(baseline="mean", scale="group_std", ddof=1)
    assert recipes["sft"].sampler == "dataset" and recipes["sft"].loss == NLL()
    assert [r.needs_group for r in recipes.values()] == [True, True, True, False]

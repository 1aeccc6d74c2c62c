"""The recipes that come with the package."""

from __future__ import annotations

import pytest

from megatron_gvpo.algorithms.batch_policy import Accumulate
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.estimators import Estimator
from megatron_gvpo.algorithms.gvpo import GVPO
from megatron_gvpo.algorithms.nll import NLL
from megatron_gvpo.algorithms.recipe import read_recipe, recipe_names


@pytest.mark.parametrize("recipe", recipe_names())
def test_recipes_load_name_their_source_and_survive_a_round_trip(recipe):
    algorithm = AlgorithmConfig.model_validate(recipe)
    assert AlgorithmConfig.model_validate(algorithm.model_dump(mode="json")) == algorithm
    _, about = read_recipe(recipe)
    assert about.title and about.paper and about.summary
    assert about.sure != "inspired by" or about.chosen, "what was chosen where the source is silent"


def test_recipes_say_what_the_papers_say():
    recipes = {name: AlgorithmConfig.model_validate(name) for name in ("gvpo", "gpg", "grpo", "sft")}
    assert AlgorithmConfig() == recipes["gvpo"]
    assert recipes["gvpo"].loss == GVPO(beta=0.1, norm="k-1", reference="step_start", terms=("var", "cov"))
    assert recipes["gpg"].estimator == Estimator(baseline="mean", scale="none", age="sample")
    assert recipes["gpg"].batch_policy == Accumulate(threshold=0.6)
    assert recipes["grpo"].estimator == Estimator(baseline="mean", scale="group_std", ddof=1)
    assert recipes["sft"].sampler == "dataset" and recipes["sft"].loss == NLL()
    assert [r.needs_group for r in recipes.values()] == [True, True, True, False]

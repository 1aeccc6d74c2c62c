"""A method does not depend on the order of rows: what breaks a tie between responses is not where they are.

Rows of a micro-batch come in the order of the step, but which rows it has depends on the token budget and the
ranks. Ties are the rule where rewards are 0 or 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gvpo.algorithms.base import Loss, token_weights
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.losses.dpo import DPO
from megatron_gvpo.algorithms.recipe import recipe_names
from megatron_gvpo.types import BatchTotals, TrainBatch

REWARDS = {
    "0 and 1": [[1, 0, 1, 0, 0], [1, 1, 0], [0, 0, 0, 0], [1, 1], [0, 1]],
    "ties among others": [[0.5, 0.25, 0.5, 1, 1, 0.25, 0.25], [0.5, 0.5, 0.5], [1], [0.75, 0.25, 0.75, 0.25]],
}
RELATIVE = 1e-6
COMPONENTS = ("accuracy", "format", "stratum", *(f"rank_{p}" for p in range(1, 21)))
OPEN, CLOSE, SEPARATOR = 1, 2, 198  # tokens: around a sub-agent's text, and the end of an item in rank_grpo
OPTIONS = {"m_grpo": {"estimator": {"open_ids": [OPEN], "close_ids": [CLOSE], "local": "accuracy"}}}


def make_rows(name: str) -> TrainBatch:
    """Rows with all columns that estimators and losses read, in fp64; tied responses differ in length."""
    generator = torch.Generator().manual_seed(0)
    groups = REWARDS[name]
    reward_n = torch.tensor([r for group in groups for r in group], dtype=torch.float64)
    n = len(reward_n)
    length_n = torch.randint(1, 9, (n,), generator=generator)
    tokens = int(length_n.sum())

    def draw(around: float, scale: float) -> torch.Tensor:
        return around + scale * torch.randn(tokens, generator=generator, dtype=torch.float64)

    vocabulary = torch.tensor([OPEN, CLOSE, SEPARATOR])
    responses = [vocabulary[torch.randint(3, (k,), generator=generator)].tolist() for k in length_n.tolist()]
    return TrainBatch(
        prompt_ids=[(g,) for g, group in enumerate(groups) for _ in group],
        response_ids=responses,
        group_n=torch.tensor([g for g, group in enumerate(groups) for _ in group]),
        reward_n=reward_n,
        truncated_n=torch.zeros(n, dtype=torch.bool),
        prior_n=torch.tensor([0.2 + 0.1 * g for g, group in enumerate(groups) for _ in group]).double(),
        demonstration_n=torch.arange(n) % 4 == 1,
        component_n={c: reward_n.roll(k) for k, c in enumerate(COMPONENTS)},
        old_logp_r=draw(-1, 0.2),
        ref_logp_r=draw(-1, 0.2),
        engine_logp_r=draw(-1, 0.3),
        value_r=draw(0.5, 0.1),
        version_r=torch.zeros(tokens, dtype=torch.int64),
    )


def of_tokens(rows: TrainBatch, order: list[int]) -> list[int]:
    return [token for i in order for token in range(rows.offsets[i], rows.offsets[i + 1])]


def assert_same(changed: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (changed - wanted).abs().max() <= RELATIVE * wanted.abs().max()


def assert_metrics(changed: dict[str, Any], wanted: dict[str, Any]) -> None:
    values = {name: float(value) for name, value in wanted.items()}
    assert {name: float(v) for name, v in changed.items()} == pytest.approx(values, rel=RELATIVE, abs=1e-9)


def assert_loss_ignores_order(loss: Loss, rows: TrainBatch, order: list[int]) -> None:
    """Permuted rows give the value, the metrics and, permuted, the gradient dL/dlogp."""
    totals, token_r = BatchTotals.of(rows), of_tokens(rows, order)
    generator = torch.Generator().manual_seed(1)
    logp_r = -1 + 0.2 * torch.randn(totals.tokens, generator=generator, dtype=torch.float64)
    weight_r, metrics = token_weights(loss, rows, logp_r, totals)
    permuted_r, of_permuted = token_weights(loss, rows.select(order), logp_r[token_r], totals)
    assert_metrics(of_permuted, metrics)
    assert_same(permuted_r, weight_r[token_r])


def permutations(rows: TrainBatch) -> st.SearchStrategy[list[int]]:
    return st.permutations(range(len(rows)))


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("recipe", recipe_names())
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_recipe_gives_the_same_in_every_order_of_rows(recipe: str, name: str, data: st.DataObject) -> None:
    algorithm = AlgorithmConfig.model_validate({"recipe": recipe, **OPTIONS.get(recipe, {})}).sized(20)
    rows = make_rows(name)
    order = data.draw(permutations(rows))
    if (estimator := algorithm.estimator) is not None:
        permuted, of_permuted = estimator.build().fill(rows.select(order))
        rows, metrics = estimator.build().fill(rows)
        assert_metrics(of_permuted, metrics)
        for column, indices in {"advantage_n": order, "advantage_r": of_tokens(rows, order)}.items():
            if (wanted := getattr(rows, column)) is not None:
                assert_same(getattr(permuted, column), wanted[indices])
    rows = rows.trained()  # which ones, mc_grpo chooses among equals by the order of the step
    assert_loss_ignores_order(algorithm.loss, rows, data.draw(permutations(rows)))


@pytest.mark.parametrize("name", REWARDS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_dpo_of_best_and_worst_does_not_see_the_order(name: str, data: st.DataObject) -> None:
    rows = make_rows(name)
    assert_loss_ignores_order(DPO(), rows, data.draw(permutations(rows)))
    assert_loss_ignores_order(DPO(pairs="all"), rows, data.draw(permutations(rows)))

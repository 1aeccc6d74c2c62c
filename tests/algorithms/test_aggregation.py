"""The coefficients of tokens and groups in a step's loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.inputs.rows import make_rows

from megatron_gvpo.algorithms.losses.aggregation import Aggregation, group_coefficients
from megatron_gvpo.types import BatchTotals


def test_aggregation_coefficients():
    rows = make_rows([[1, 0], [1]], lengths=[1, 3, 2])
    totals = BatchTotals(groups=4, sequences=10, tokens=20)
    assert Aggregation(name="token_mean")(rows, totals).tolist() == pytest.approx([1 / 20] * 6)
    expected = [1 / 10] + [1 / 30] * 3 + [1 / 20] * 2
    assert Aggregation(name="sequence_mean")(rows, totals).tolist() == pytest.approx(expected)
    assert Aggregation(name="sequence_sum", constant=1)(rows, totals).tolist() == pytest.approx([1 / 10] * 6)
    dr_grpo = Aggregation(name="sequence_sum", constant=50)
    assert dr_grpo(rows, totals).tolist() == pytest.approx([1 / 500] * 6)
    assert Aggregation(name="sequence_sum").sized(max_tokens=50) == dr_grpo == dr_grpo.sized(max_tokens=7)
    with pytest.raises(ValueError, match="sequence_sum"):
        Aggregation(name="token_mean", constant=50)


@pytest.mark.parametrize("name", ["token_mean", "sequence_mean", "sequence_sum"])
def test_masked_responses_may_count_in_the_denominator_as_in_trl(name):
    """TRL sums the loss times the mask and divides by the sizes before the mask: a loop of its own here."""
    rows = make_rows([[1, 0, 0], [1, 0]], lengths=[1, 3, 2, 4, 5])
    mask = [True, False, True, True, False]
    trained = replace(rows, trained_n=torch.tensor(mask)).trained()
    assert trained.left_out == (2, 8) == trained.select([1]).left_out
    constant = 7 if name == "sequence_sum" else None
    block = Aggregation(name=name, constant=constant, count_masked=True)
    expected = []
    for length, is_unmasked in zip([1, 3, 2, 4, 5], mask, strict=True):
        weight = {"token_mean": 1 / 15, "sequence_mean": 1 / (5 * length), "sequence_sum": 1 / (5 * 7)}[name]
        expected += [weight] * length * is_unmasked
    assert block(trained, BatchTotals.of(trained)).tolist() == pytest.approx(expected)
    plain = block.model_copy(update={"count_masked": False})
    assert (plain(trained, BatchTotals.of(trained)) > block(trained, BatchTotals.of(trained))).all()


def test_gpgs_normaliser_inside_the_mean_over_prompts():
    """GPG's eq. 5 as a loop: each group's sum is divided by its own tokens, and groups are averaged."""
    lengths = [1, 3, 2, 4, 5]
    rows = make_rows([[1, 0, 0], [1, 0]], lengths=lengths).with_group_tokens()
    expected = [1 / (2 * 6)] * 6 + [1 / (2 * 9)] * 9
    block = Aggregation(name="group_token_mean")
    assert block(rows, BatchTotals.of(rows)).tolist() == pytest.approx(expected)
    part = rows.select([1, 4])  # a micro-batch of parts of groups
    assert block(part, BatchTotals.of(rows)).tolist() == pytest.approx([1 / 12] * 3 + [1 / 18] * 5)
    with pytest.raises(ValueError, match="does not go with group_token_mean"):
        Aggregation(name="group_token_mean", count_masked=True)


def test_group_coefficients_with_ragged_groups():
    rows = make_rows([[1, 0, 0], [1, 0], [1]])
    totals = BatchTotals(groups=10, sequences=99, tokens=99)
    assert group_coefficients(rows, totals, "k-1").tolist() == pytest.approx([0.05] * 3 + [0.1] * 2 + [0])
    assert group_coefficients(rows, totals, "sum").tolist() == pytest.approx([0.1] * 6)
    assert group_coefficients(rows, totals, "k").tolist() == pytest.approx([1 / 30] * 3 + [0.05] * 2 + [0.1])

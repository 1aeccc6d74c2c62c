"""Advantages against the papers' formulas."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.inputs.rows import make_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.advantages.gae import GAE

GPG_BATCH = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


def advantages(rewards: list[list[float]], **options: object) -> list[float]:
    return Estimator(**options)(make_rows(rewards))[0].tolist()


@pytest.mark.parametrize(
    ("options", "rewards", "expected"),
    [
        ({"scale": "group_std"}, [1, 0, 0, 1], [0.866025, -0.866025, -0.866025, 0.866025]),
        ({"scale": "group_std", "ddof": 0}, [1, 0, 0, 1], [1, -1, -1, 1]),
        ({"scale": "group_std"}, [1, 0, 0, 0, 0], [1.788854] + [-0.447214] * 4),
        ({}, [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ({"baseline": "loo"}, [1, 0, 0, 1], [0.666667, -0.666667, -0.666667, 0.666667]),
        ({"baseline": "loo"}, [1, 0, 0, 0, 0], [1, -0.25, -0.25, -0.25, -0.25]),
        ({"baseline": "none"}, [1, 0, 3], [1, 0, 3]),
        ({"negative": 0.5}, [1, 0, 0, 1], [0.5, -0.25, -0.25, 0.5]),
        ({"negative": 0.5, "whiten": "sequence", "ddof": 0}, [1, 0, 0, 1], [1, -0.5, -0.5, 1]),
    ],
)
def test_published_advantages(options, rewards, expected):
    assert advantages([rewards], **options) == pytest.approx(expected, abs=1e-5)


def test_gpg_alpha_counts_samples_of_groups_without_signal():
    advantage_n, metrics = Estimator(age="sample")(make_rows(GPG_BATCH))
    assert advantage_n.tolist() == pytest.approx([1, -1, -1, 1] + [0] * 8 + [1.5, -0.5, -0.5, -0.5])
    assert metrics["age_alpha"] == 2.0  # not verl's B / (number of nonzero rewards) = 16 / 7
    assert metrics["valid_fraction"] == 0.5


def test_gpg_alpha_of_tokens():
    rows = make_rows(GPG_BATCH, lengths=[1, 2, 1, 2] + [7] * 8 + [3, 3, 1, 1])
    _, metrics = Estimator(age="token")(rows)
    assert metrics["age_alpha"] == pytest.approx((6 + 56 + 8) / 14)


@pytest.mark.parametrize(
    "estimator",
    [
        Estimator(baseline="none", whiten="token"),
        Estimator(baseline="none", whiten="sequence"),
        Estimator(baseline="none", scale="batch_std"),
        GAE(values="zero", lam=1.0),
    ],
    ids=lambda estimator: str(estimator),
)
def test_statistics_of_a_step_are_of_what_it_trains(estimator):
    """Masked responses, often the longest and all wrong, would leave the others too high an advantage."""
    rows = make_rows([[1], [0], [0.5], [0], [0]], lengths=[2, 3, 2, 40, 40])
    masked = rows.with_columns(trained_n=torch.tensor([True, True, True, False, False]))
    advantages, _ = estimator(masked)
    alone, _ = estimator(rows.select([0, 1, 2]))
    assert advantages[: len(alone)].tolist() == pytest.approx(alone.tolist(), rel=1e-5)


@pytest.mark.parametrize("whiten", ["sequence", "token"])
def test_a_step_without_trained_responses_has_finite_advantages(whiten):
    rows = make_rows([[1], [0]]).with_columns(trained_n=torch.tensor([False, False]))
    assert Estimator(baseline="none", whiten=whiten)(rows)[0].isfinite().all()


@pytest.mark.parametrize(("age", "alpha"), [("sample", 3 / 2), ("token", 10 / 5)])
def test_gpg_alpha_counts_only_what_is_trained(age, alpha):
    """The masked response belongs to the group without signal, and no mean of the loss counts it."""
    rows = make_rows([[1, 0], [0, 0]], lengths=[2, 3, 5, 7])
    rows = rows.with_columns(trained_n=torch.tensor([True, True, True, False]))
    _, metrics = Estimator(age=age)(rows)
    assert metrics["age_alpha"] == alpha


@pytest.mark.parametrize("age", ["none", "sample", "token"])
@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std"])
@pytest.mark.parametrize("baseline", ["mean", "loo"])
def test_no_signal_gives_exactly_zero(baseline, scale, age):
    """The advantage is 0 even where fp32 means round (0.1 x 7), for a group of one, and if no group has a
    signal.
    """
    values = advantages([[0.1] * 7, [1 / 3] * 3, [5.0], [1e6] * 3], baseline=baseline, scale=scale, age=age)
    assert values == [0.0] * 14


def test_whitening_leaves_a_group_without_signal_its_zeros():
    """The mean of all advantages is 0 up to rounding, and train/clip_fraction counted the rounding's sign."""
    rows = make_rows([[0.1] * 3, [0.7, 0.2, 0.4], [0.3, 0.9]])
    whitened, _ = Estimator(scale="group_std", whiten="sequence")(rows)
    assert whitened[:3].tolist() == [0.0] * 3
    assert whitened[3:].std() > 0.5


def test_batch_std_is_over_all_rewards():
    rewards = torch.tensor([1.0, 0, 0, 2, 0])
    expected = torch.tensor([2 / 3, -1 / 3, -1 / 3, 1, -1]) / (rewards.std() + 1e-6)
    assert advantages([[1, 0, 0], [2, 0]], scale="batch_std") == pytest.approx(expected.tolist())
    assert advantages([[3.0]], scale="batch_std") == [0.0]


GROUPS = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), min_size=1, max_size=6), min_size=1, max_size=5
)
BLOCKS = st.sampled_from(
    [
        Estimator(baseline=baseline, scale=scale, age=age)
        for baseline in ("mean", "loo")
        for scale in ("none", "group_std", "batch_std")
        for age in ("none", "sample", "token")
    ]
)


@settings(deadline=None)
@given(GROUPS, BLOCKS, st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_the_order_of_rows(groups, block, rng):
    rows = make_rows(groups)
    order = list(range(len(rows)))
    rng.shuffle(order)
    torch.testing.assert_close(block(rows.select(order))[0], block(rows)[0][order])


@settings(deadline=None)
@given(GROUPS, st.floats(0.5, 50), st.floats(-10, 10), st.sampled_from(["group_std", "batch_std"]))
def test_std_normalised_advantages_ignore_scale_and_shift(groups, scale, shift, block_scale):
    moved = [[scale * reward + shift for reward in group] for group in groups]
    block = {"scale": block_scale, "eps": 0.0, "age": "sample"}
    if block_scale == "batch_std" and len({reward for group in groups for reward in group}) == 1:
        return  # 0 / 0 without eps
    assert advantages(moved, **block) == pytest.approx(advantages(groups, **block), abs=1e-4, nan_ok=True)


@settings(deadline=None)
@given(GROUPS, BLOCKS)
def test_advantages_are_centred_finite_and_zero_without_signal(groups, block):
    rows = make_rows(groups)
    advantage_n, metrics = block(rows)
    assert torch.isfinite(advantage_n).all() and math.isfinite(metrics["age_alpha"])
    assert rows.group_mean(advantage_n).abs().max() < 1e-4
    for group, group_advantages in zip(
        groups, advantage_n.split([len(group) for group in groups]), strict=True
    ):
        if len(set(group)) == 1:
            assert (group_advantages == 0).all()


@pytest.mark.parametrize("options", [{"scale": "group_std"}, {"age": "sample"}])
def test_what_compares_needs_a_baseline(options):
    with pytest.raises(ValueError, match="baseline=mean or loo"):
        Estimator(baseline="none", **options)

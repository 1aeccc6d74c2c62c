"""The estimators of GRPO's relatives against their papers' formulas, worked out by hand or independently."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from helpers.inputs.rows import make_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta as beta_distribution

from megatron_gvpo.algorithms.advantages.baselines import MedianEstimator, ShrunkEstimator
from megatron_gvpo.algorithms.advantages.estimator import Estimator
from megatron_gvpo.algorithms.advantages.gae import GAE
from megatron_gvpo.algorithms.advantages.likelihood import ConfidenceEstimator, NoveltyEstimator
from megatron_gvpo.algorithms.advantages.m_grpo import RoleEstimator
from megatron_gvpo.algorithms.advantages.normalised import (
    BNPO,
    ComponentEstimator,
    LagrangianEstimator,
    ReferenceAnswerEstimator,
    StratifiedEstimator,
    VirtualEstimator,
)
from megatron_gvpo.algorithms.advantages.rank_grpo import RankEstimator
from megatron_gvpo.algorithms.advantages.tempo import PrefixTreeEstimator, value_changes
from megatron_gvpo.turns import Turn
from megatron_gvpo.types import TrainBatch


def advantages(block, rewards, **columns) -> list[float]:
    return block(make_rows(rewards).with_columns(**columns))[0].tolist()


def test_bnpo_weights_of_three_prompts():
    rewards = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    advantage_n = advantages(BNPO(), rewards)
    weights = [0.906900] * 4 + [0.785398] * 4 + [0.906900] * 4
    mean = [0.25] * 4 + [0.5] * 4 + [0.75] * 4
    flat = [r for group in rewards for r in group]
    expected = [(r - p) * w for r, p, w in zip(flat, mean, weights, strict=True)]
    assert advantage_n == pytest.approx(expected, abs=1e-5)


def test_bnpo_density_is_scipys_and_flat_groups_have_no_signal():
    rewards = [[1, 0, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 0], [0, 0], [1, 1, 1]]
    advantage_n, metrics = BNPO()(make_rows(rewards))
    p = torch.tensor([0.2, 0.8, 0.4, 0, 1], dtype=torch.float64)
    c = p.mean() * (1 - p.mean()) / p.var() - 1
    a, b = (max(1.0, float(1 + c * m / 3)) for m in (p.mean(), 1 - p.mean()))
    assert (metrics["beta_a"], metrics["beta_b"]) == pytest.approx((a, b))
    assert float(advantage_n[0]) == pytest.approx(0.8 / beta_distribution.pdf(0.2, a, b), rel=1e-5)
    assert advantage_n[15:].tolist() == [0.0] * 5
    with pytest.raises(ValueError, match=r"rewards in \[0, 1\].* from -1 to 1"):
        BNPO()(make_rows([[-1, 1]]))
    rows = make_rows([[0, 1]]).with_columns(component_n={"length": torch.tensor([3.0, 5.0])})
    with pytest.raises(ValueError, match=r"components of the reward in \[0, 1\].*: components=false takes"):
        BNPO(components=True)(rows)


def test_bnpo_averages_the_advantages_of_components():
    rows = make_rows([[0.5, 0.5, 0], [1, 0, 0]])
    right_n, brief_n = torch.tensor([1.0, 0, 0, 1, 0, 0]), torch.tensor([0.0, 1, 0, 1, 1, 0])
    both = BNPO(components=True)(rows.with_columns(component_n={"right": right_n, "brief": brief_n}))[0]
    alone = [BNPO()(rows.with_columns(reward_n=value_n))[0] for value_n in (right_n, brief_n)]
    torch.testing.assert_close(both, sum(alone) / 2)


def test_mc_grpo_vector():
    rows = make_rows([[0, 0.2, 0.4, 0.9, 1]])
    filled, _ = MedianEstimator(age=False).fill(rows)
    expected = [-0.997506, -0.498753, 0, 1.246883, 1.496259]
    assert filled.advantage_n.tolist() == pytest.approx(expected, abs=1e-5)
    assert filled.trained_n.tolist() == [True, True, False, True, True]
    with_age = MedianEstimator()(rows)[0].tolist()
    assert with_age == pytest.approx([x * 5 / 4 for x in expected], abs=1e-5)


def test_mc_grpo_with_a_minority_of_one_rests_on_its_floor():
    assert advantages(MedianEstimator(), [[1, 0, 0]]) == pytest.approx([3000, 0, 0])
    assert advantages(MedianEstimator(floor=0.5, age=False), [[1, 0, 0]]) == pytest.approx([2, 0, 0])


def test_mc_grpo_drops_one_pivot_a_group_and_leaves_a_lone_response():
    filled, _ = MedianEstimator().fill(make_rows([[0, 0, 0], [1, 0], [5]]))
    assert filled.trained_n.tolist() == [False, True, True, True, False, True]
    assert len(filled.trained()) == 4


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0] * 4, [-0.447213] * 4),
        ([0] * 8, [-0.333332] * 8),
        ([1, 0, 0, 1], [0.730295, -1.095443, -1.095443, 0.730295]),
        ([1] * 4, [0] * 4),
    ],
)
def test_ngrpo_vectors(rewards, expected):
    assert advantages(VirtualEstimator(), [rewards]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_ngrpo_leaves_a_group_alone_that_has_the_virtual_reward_already(eps):
    """Fails on the old code: 0.7 is another number in fp32, and rounding was divided by rounding."""
    for reward in (0.7, 1.0):
        group = [float(torch.tensor(reward, dtype=torch.float32))] * 3
        assert advantages(VirtualEstimator(reward=reward, eps=eps), [group]) == [0, 0, 0]


@pytest.mark.parametrize(
    ("first", "second", "gdpo", "grpo"),
    [
        ([1, 0, 0, 0], [1, 0, 0, 0], [3, -1, -1, -1], [1.5, -0.5, -0.5, -0.5]),
        ([1, 0, 0, 0], [0, 0, 0, 0], [1.5, -0.5, -0.5, -0.5], [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_gdpo_tells_apart_what_grpo_does_not(first, second, gdpo, grpo):
    components = {
        "a": torch.tensor(first, dtype=torch.float32),
        "b": torch.tensor(second, dtype=torch.float32),
    }
    total = [a + b for a, b in zip(first, second, strict=True)]
    block = ComponentEstimator(whiten="none", eps=0.0)
    assert advantages(block, [total], component_n=components) == pytest.approx(gdpo)
    assert advantages(Estimator(scale="group_std"), [total]) == pytest.approx(grpo, abs=1e-4)


def test_gdpo_weights_act_after_normalisation_and_the_whole_is_whitened():
    rows = make_rows([[0] * 4, [0] * 3])
    rows = rows.with_columns(component_n={"a": rows.advantage_n, "b": rows.advantage_n.flip(0)})
    weighted = ComponentEstimator(weights={"a": 100.0, "b": 0.0}, whiten="none")(rows)[0]
    torch.testing.assert_close(weighted, 100 * ComponentEstimator(weights={"a": 1.0}, whiten="none")(rows)[0])
    white = ComponentEstimator()(rows)[0]
    assert float(white.mean()) == pytest.approx(0, abs=1e-6)
    assert float(white.std()) == pytest.approx(1, abs=1e-3)
    with pytest.raises(ValueError, match=r"no reward component 'c'; there are: a, b"):
        ComponentEstimator(weights={"c": 1.0})(rows)


def test_stratified_vector_and_its_lone_responses():
    strata = {"calls": torch.tensor([0.0, 0, 0, 1, 1, 1])}
    san = [0.577350, -1.154701, 0.577350, -0.577350, -0.577350, 1.154701]
    blend = [0.644454, -1.106335, 0.644454, -0.644454, -0.644454, 1.106335]
    for share, expected in ((1.0, san), (0.8, blend)):
        block = StratifiedEstimator(stratum="calls", blend=share)
        advantage_n = advantages(block, [[1, 0, 1, 0, 0, 1]], component_n=strata)
        assert advantage_n == pytest.approx(expected, abs=1e-5)
    lone = {"calls": torch.tensor([0.0, 1, 1])}
    assert advantages(StratifiedEstimator(stratum="calls", blend=1), [[1, 0, 0]], component_n=lone) == [0] * 3


def test_stratum_of_different_prompts_are_different():
    strata = {"calls": torch.tensor([0.0, 0, 0, 0])}
    advantage_n = advantages(
        StratifiedEstimator(stratum="calls", blend=1), [[1, 0], [5, 5]], component_n=strata
    )
    assert advantage_n == pytest.approx([0.707106, -0.707106, 0, 0], abs=1e-5)


def test_tempo_vector():
    responses = [(1, 2, 9), (1, 3, 9), (1, 4), (5, 6)]
    changes = value_changes(responses, [1, 1, 0, 0])
    third = 1 / 3
    assert [change[0] for change in changes] == pytest.approx([third / 2] * 3 + [-0.5])
    assert [change[1:] for change in changes] == [
        [pytest.approx(third)],
        [pytest.approx(third)],
        [pytest.approx(-2 * third)],
        [],
    ]
    rows = make_rows([[1, 1, 0, 0]], lengths=[3, 3, 2, 2])
    rows.response_ids = list(responses)
    filled, _ = PrefixTreeEstimator(eps=0.0).fill(rows)
    std = math.sqrt(1 / 3)
    first = [(r - 0.5 + change[0]) / std for r, change in zip([1, 1, 0, 0], changes, strict=True)]
    starts = torch.tensor(rows.offsets[:-1])
    assert filled.advantage_r[starts].tolist() == pytest.approx(first, abs=1e-6)
    assert float(filled.advantage_r[2]) == pytest.approx(0.5 / std), "no branch there: the response's own"


def test_tempo_changes_add_up_to_what_a_response_is_worth():
    """Changes go from the root's mean to the reward of a response that ends alone, or to a mean for one
    inside another.
    """
    responses = [(1, 2, 3), (1, 2, 4), (1, 2), (7,)]
    rewards = [1.0, 0.0, 0.5, 3.0]
    changes = value_changes(responses, rewards)
    reached = [sum(rewards) / 4 + sum(change) for change in changes]
    assert reached == pytest.approx([1.0, 0.0, 0.5, 3.0])


def test_tempo_tells_conversations_apart_by_what_the_environment_said():
    """The same tokens after other observations are another branch."""
    rows = make_rows([[1, 0]], lengths=[2, 2])
    rows.response_ids = [(5, 6), (5, 6)]
    plain, _ = PrefixTreeEstimator(eps=0.0).fill(rows)
    assert plain.advantage_r.tolist() == pytest.approx([0.707106, 0.707106, -0.707106, -0.707106], abs=1e-5)
    rows.turns = [[Turn(0), Turn(1, 0, None, (7,))], [Turn(0), Turn(1, 0, None, (8,))]]
    parted, _ = PrefixTreeEstimator(eps=0.0).fill(rows)
    wanted = [0.707106, 2 * 0.707106, -0.707106, -2 * 0.707106]
    assert parted.advantage_r.tolist() == pytest.approx(wanted, abs=1e-5)


def test_xrpo_vector():
    rows = make_rows([[1, 1, 0, 0]], lengths=[2] * 4)
    scores = torch.tensor([-0.2, -0.6, -0.4, -0.4])[rows.seq_r]
    advantage_n, _ = NoveltyEstimator()(rows.with_columns(engine_logp_r=scores))
    assert advantage_n.tolist() == pytest.approx([0.866025, 1.047295, -0.866025, -0.866025], abs=1e-5)
    capped, _ = NoveltyEstimator(cap=0.1)(rows.with_columns(engine_logp_r=scores))
    assert float(capped[1]) == pytest.approx(1.1 * 0.866025, abs=1e-5)


def test_a_response_that_no_engine_sampled_is_not_novel_and_spoils_nobody_elses_bonus():
    rows = make_rows([[1, 1, 0, 1]], lengths=[1] * 4)
    scores = torch.tensor([-0.2, -0.6, -0.4, math.nan])
    advantage_n = NoveltyEstimator()(rows.with_columns(engine_logp_r=scores))[0].tolist()
    plain = Estimator(scale="group_std")(rows)[0].tolist()
    assert advantage_n == pytest.approx(
        [plain[0], plain[1] + 1 - math.exp(-0.2), plain[2], plain[3]], abs=1e-6
    )


@pytest.mark.parametrize(
    ("prior", "rewards", "trust", "baseline"),
    [(0.5, [-1, -1, -1, 1], 0.75, -0.25), (0.25, [1, 1, -1, -1], 0.0, 0.25)],
)
def test_v05_vectors(prior, rewards, trust, baseline):
    rows = make_rows([rewards]).with_columns(prior_n=torch.full((4,), prior))
    advantage_n, metrics = ShrunkEstimator()(rows)
    assert advantage_n.tolist() == pytest.approx([r - baseline for r in rewards])
    assert metrics["trust_in_group"] == pytest.approx(trust)


def test_a_prior_that_nobody_gave_is_an_error():
    for block in (ShrunkEstimator(), Estimator(baseline="prior")):
        with pytest.raises(ValueError, match=r"set algorithm\.prior"):
            block(make_rows([[1, 0]]))


def test_remax_takes_the_greedy_reward_off():
    rows = make_rows([[1], [0, 1]]).with_columns(prior_n=torch.tensor([0.5, 1, 1]))
    assert Estimator(baseline="prior")(rows)[0].tolist() == pytest.approx([0.5, -1, 0])


@pytest.mark.parametrize("over", ["sequence", "token"])
def test_whitening(over):
    rows = make_rows([[1, 0, 3], [2]], lengths=[1, 4, 2, 3])
    whitened, _ = Estimator(baseline="none", whiten=over)(rows)
    repeated = rows.reward_n if over == "sequence" else rows.reward_n[rows.seq_r]
    expected = (rows.reward_n - repeated.mean()) / (repeated.std() + 1e-6)
    torch.testing.assert_close(whitened, expected)


def test_grao_weights_are_the_derivatives_of_its_objective():
    rows = make_rows([[1, 0, 0, 1]])
    demonstration_n = torch.tensor([False, False, False, True])
    imitate, align = 0.7, 0.3
    weight_n, _ = ReferenceAnswerEstimator(imitate=imitate, align=align, eps=0.0)(
        rows.with_columns(demonstration_n=demonstration_n)
    )
    advantage = torch.tensor([1.0, -1, -1, 1])
    mean_logp = torch.zeros(4, requires_grad=True)
    own, reference = mean_logp[:3], mean_logp[3]
    objective = (advantage[:3] * own).mean() + imitate * advantage[3] * reference
    objective = objective + align * (advantage[:3] * (own - reference)).mean()
    torch.testing.assert_close(weight_n / 3, torch.autograd.grad(objective, mean_logp)[0])


def test_rank_grpo_gives_every_item_its_own_advantage():
    rows = make_rows([[0, 0]], lengths=[5, 4])
    rows.response_ids = [(8, 0, 8, 0, 8), (0, 8, 8, 0)]  # 0 ends an item
    components = {"rank_1": torch.tensor([1.0, 0]), "rank_2": torch.tensor([0.0, 2])}
    rows = rows.with_columns(component_n=components, truncated_n=torch.ones(2, dtype=torch.bool))
    filled, metrics = RankEstimator(items=2, separator_ids=(0,), overflow=-3.0, eps=0.0).fill(rows)
    half = math.sqrt(0.5)
    assert filled.item_r.tolist() == [0, 0, 1, 1, 2, 0, 1, 1, 1]
    assert filled.advantage_r.tolist() == pytest.approx(
        [half, half, -half, -half, -3, -half, half, half, half]
    )
    assert metrics["overflow"] == pytest.approx(1 / 9)


def test_rank_grpo_judges_the_end_of_a_list_by_its_length():
    """Lists of 3 items: 3 with the end in the last, 2, 3 and a line too many, and a truncated one."""
    rows = make_rows([[0, 0, 0, 0, 0]], lengths=[6, 4, 7, 3, 0])
    rows.response_ids = [(8, 0, 8, 0, 8, 9), (8, 0, 8, 9), (8, 0, 8, 0, 8, 0, 9), (8, 0, 8), ()]
    flat = dict.fromkeys(("rank_1", "rank_2", "rank_3"), torch.zeros(5))
    truncated_n = torch.tensor([False, False, False, True, False])
    rows = rows.with_columns(component_n=flat, truncated_n=truncated_n)
    filled, _ = RankEstimator(items=3, separator_ids=(0,)).fill(rows)
    expected = [0, 0, 0, 0, 0, 0.1, 0, 0, 0, -0.1, 0, 0, 0, 0, 0, 0, -0.1, 0, 0, 0]
    assert filled.advantage_r.tolist() == pytest.approx(expected)
    own = RankEstimator(items=3, separator_ids=(0,), complete=5, early=-7, overflow=-3)(rows)[0]
    assert own[own != 0].tolist() == [5, -7, -3]


GROUPS = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=6), min_size=1, max_size=5
)
BLOCKS = {
    "bnpo": BNPO(),
    "median": MedianEstimator(floor=0.1),
    "virtual": VirtualEstimator(),
    "components": ComponentEstimator(whiten="none"),
    "stratified": StratifiedEstimator(stratum="a"),
    "prefix tree": PrefixTreeEstimator(),
    "novelty": NoveltyEstimator(),
    "shrunk": ShrunkEstimator(),
    "reference answer": ReferenceAnswerEstimator(),
    "rank": RankEstimator(items=2, separator_ids=(2,), component="c"),
    "lagrangian": LagrangianEstimator(constraints={"a": 0.5}, start=2.0),
    "confidence": ConfidenceEstimator(),
    "roles": RoleEstimator(open_ids=(2,), close_ids=(3,), local="c_1"),
    "gae": GAE(kl_coef=0.1, lam=0.5),
    "gae without values": GAE(values="zero"),
}
CENTRED = ("bnpo", "components", "stratified", "lagrangian", "confidence")


def filled_rows(groups: list[list[float]]) -> TrainBatch:
    rows = make_rows(groups)
    column_n = rows.reward_n
    return rows.with_columns(
        component_n={"a": (column_n > 0).float(), "c_1": column_n, "c_2": -column_n},
        prior_n=torch.full((len(rows),), 0.3),
        value_r=rows.old_logp_r + 1,
    )


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@settings(deadline=None, max_examples=30)
@given(groups=GROUPS, rng=st.randoms(use_true_random=False))
def test_estimators_are_finite_and_do_not_know_the_order_of_rows(block, groups, rng):
    """Groups are ragged, of one row, or without differences in reward."""
    rows = filled_rows(groups)
    advantage, _ = block(rows)
    assert torch.isfinite(advantage).all()
    order = list(range(len(rows)))
    rng.shuffle(order)
    expected = advantage
    if block.per_token:
        spans = [torch.arange(a, b) for a, b in pairwise(rows.offsets)]
        expected = torch.cat([advantage[spans[i]] for i in order])
    else:
        expected = advantage[order]
    torch.testing.assert_close(block(rows.select(order))[0], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("block", [BLOCKS[name] for name in CENTRED], ids=CENTRED)
@settings(deadline=None, max_examples=30)
@given(groups=GROUPS)
def test_centred_estimators_sum_to_zero_in_a_group(block, groups):
    rows = filled_rows(groups)
    advantage_n, _ = block(rows)
    scale = 1 + float(advantage_n.abs().max())
    assert float(rows.group_mean(advantage_n).abs().max()) < 1e-4 * scale

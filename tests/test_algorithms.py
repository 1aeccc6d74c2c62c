"""Estimators, losses, aggregation and batch policies against the papers' formulas, without a model.

A policy is here the table of its token log-probs, so gradients are dL/dlogp. What is not covered: the
same on real ranks (test_gradient_invariance.py) and the minimiser of GVPO (test_gvpo_theorem.py).
"""

import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gvpo.algorithms.aggregation import Aggregation, group_coefficients
from megatron_gvpo.algorithms.base import Loss, token_weights
from megatron_gvpo.algorithms.batch_policy import Accumulate, KeepAll, is_valid
from megatron_gvpo.algorithms.config import RECIPES, AlgorithmConfig
from megatron_gvpo.algorithms.estimators import Estimator
from megatron_gvpo.algorithms.gvpo import GVPO
from megatron_gvpo.algorithms.nll import NLL
from megatron_gvpo.algorithms.pg import PolicyGradient
from megatron_gvpo.algorithms.ppo import PPO
from megatron_gvpo.types import Group, LossInputs, Prompt, Rollout, Rows, Totals

GPG_BATCH = [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
EMA = {"name": "ema", "decay": 0.9}
LOSSES = {
    "gvpo": GVPO(),
    "gvpo sum": GVPO(norm="sum", form="nll"),
    "gvpo k": GVPO(norm="k", form="variance"),
    "gvpo -cov": GVPO(terms=("var",)),
    "gvpo -var": GVPO(terms=("cov",)),
    "gvpo -var -cov": GVPO(terms=()),
    "gvpo fixed": GVPO(reference="fixed"),
    "pg": PolicyGradient(),
    "ppo": PPO(),
    "ppo + kl": PPO(kl_coef=0.1, reference="step_start"),
    "ppo + kl ema": PPO(kl_coef=0.1, reference=EMA),
    "nll": NLL(),
}


def make_rows(rewards: list[list[float]], lengths: list[int] | None = None, seed: int = 0) -> Rows:
    """Rows of the given groups with random lengths, advantages and log-probs of other policies."""
    rng = random.Random(seed)
    n = sum(map(len, rewards))
    lengths = lengths or [rng.randint(1, 5) for _ in range(n)]
    generator = torch.Generator().manual_seed(seed)
    column_r = torch.randn(3, sum(lengths), generator=generator) * 0.2 - 1
    return Rows(
        prompt_ids=[(1,)] * n,
        response_ids=[(2,) * length for length in lengths],
        group_n=torch.tensor([g for g, group in enumerate(rewards) for _ in group]),
        reward_n=torch.tensor([r for group in rewards for r in group], dtype=torch.float32),
        truncated_n=torch.zeros(n, dtype=torch.bool),
        advantage_n=torch.randn(n, generator=generator),
        old_logp_r=column_r[0],
        ref_logp_r=column_r[1],
    )


def make_logp(rows: Rows, seed: int = 1) -> torch.Tensor:
    count = int(rows.length_n.sum())
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.2 - 1


def sequence_weights(loss: Loss, rows: Rows, logp_r: torch.Tensor) -> torch.Tensor:
    """dL/dl_i of a loss that sees only sequence sums, [n]."""
    weight_r, _ = token_weights(loss, rows, logp_r, Totals.of(rows))
    first = torch.tensor(rows.offsets[:-1])
    torch.testing.assert_close(weight_r, weight_r[first][rows.seq_r], msg="weights differ inside a sequence")
    return weight_r[first]


def advantages(rewards: list[list[float]], **options: object) -> list[float]:
    return Estimator(**options)(make_rows(rewards))[0].tolist()


# --- estimators ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("age", ["none", "sample", "token"])
@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std"])
@pytest.mark.parametrize("baseline", ["mean", "loo"])
def test_no_signal_gives_exactly_zero(baseline, scale, age):
    """Also where fp32 means round (0.1 x 7), for a group of one, and where no group at all has a signal."""
    values = advantages([[0.1] * 7, [1 / 3] * 3, [5.0], [1e6] * 3], baseline=baseline, scale=scale, age=age)
    assert values == [0.0] * 14


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
    for group, mine in zip(groups, advantage_n.split([len(group) for group in groups]), strict=True):
        if len(set(group)) == 1:
            assert (mine == 0).all()


@pytest.mark.parametrize("options", [{"scale": "group_std"}, {"age": "sample"}])
def test_what_compares_needs_a_baseline(options):
    with pytest.raises(ValueError, match="baseline=mean or loo"):
        Estimator(baseline="none", **options)


# --- aggregation --------------------------------------------------------------------------------------


def test_aggregation_coefficients():
    rows = make_rows([[1, 0], [1]], lengths=[1, 3, 2])
    totals = Totals(groups=4, sequences=10, tokens=20)
    assert Aggregation(name="token_mean")(rows, totals).tolist() == pytest.approx([1 / 20] * 6)
    expected = [1 / 10] + [1 / 30] * 3 + [1 / 20] * 2
    assert Aggregation(name="sequence_mean")(rows, totals).tolist() == pytest.approx(expected)
    assert Aggregation(name="sequence_sum")(rows, totals).tolist() == pytest.approx([1 / 10] * 6)
    dr_grpo = Aggregation(name="sequence_sum", constant=50)
    assert dr_grpo(rows, totals).tolist() == pytest.approx([1 / 500] * 6)
    with pytest.raises(ValueError, match="sequence_sum"):
        Aggregation(name="token_mean", constant=50)


def test_group_coefficients_with_ragged_groups():
    rows = make_rows([[1, 0, 0], [1, 0], [1]])
    totals = Totals(groups=10, sequences=99, tokens=99)
    assert group_coefficients(rows, totals, "k-1").tolist() == pytest.approx([0.05] * 3 + [0.1] * 2 + [0])
    assert group_coefficients(rows, totals, "sum").tolist() == pytest.approx([0.1] * 6)
    assert group_coefficients(rows, totals, "k").tolist() == pytest.approx([1 / 30] * 3 + [0.05] * 2 + [0.1])


# --- GVPO ---------------------------------------------------------------------------------------------


def gvpo_vector() -> tuple[Rows, torch.Tensor]:
    """R, l and l' of the worked example, each sequence of one token."""
    rows = make_rows([[1, 0, 0, 1]], lengths=[1] * 4)
    rows = rows.with_columns(ref_logp_r=torch.tensor([-10.5, -11.5, -11.0, -9.5]))
    return rows, torch.tensor([-10.0, -12.0, -11.0, -9.0])


@pytest.mark.parametrize(("norm", "divisor"), [("k-1", 3), ("sum", 1), ("k", 4)])
@pytest.mark.parametrize("form", ["mse", "variance", "nll"])
def test_gvpo_worked_example(form, norm, divisor):
    rows, logp_r = gvpo_vector()
    weight_r, metrics = token_weights(GVPO(form=form, norm=norm), rows, logp_r, Totals.of(rows))
    e = torch.tensor([0.4625, -0.4375, -0.4875, 0.4625])
    torch.testing.assert_close(weight_r, -0.1 * e / divisor)
    if form != "nll":
        assert metrics["loss"] == pytest.approx(0.4284375 / divisor)
    d = torch.tensor([0.5, -0.5, 0.0, 0.5])
    assert metrics["kl"] == pytest.approx(float((d.exp() - 1 - d).mean()))
    assert metrics["residual_variance"] == pytest.approx(2 * 0.1428125)
    assert metrics["reward_variance"] == pytest.approx(1 / 3)


def ablation_weights(rows: Rows, logp_r: torch.Tensor, beta: float, terms: tuple[str, ...]) -> list[float]:
    """dL/dl_i of Table 2's ablations in plain fp64 Python, with the norm k-1."""
    lengths = rows.length_n.tolist()
    l = [float(part.double().sum()) for part in logp_r.split(lengths)]  # noqa: E741
    ref = [float(part.double().sum()) for part in rows.ref_logp_r.split(lengths)]
    reward, group = rows.reward_n.tolist(), rows.group_n.tolist()
    weights = []
    for i in range(len(rows)):
        members = [j for j in range(len(rows)) if group[j] == group[i]]

        def centred(value: list[float], i: int = i, members: list[int] = members) -> float:
            return value[i] - sum(value[j] for j in members) / len(members)

        e = centred(reward)
        e -= beta * centred(l) if "var" in terms else 0
        e += beta * centred(ref) if "cov" in terms else 0
        weights.append(-beta * e / max(len(members) - 1, 1) / len(set(group)))
    return weights


@pytest.mark.parametrize("terms", [("var", "cov"), ("var",), ("cov",), ()])
@pytest.mark.parametrize("form", ["mse", "variance", "nll"])
def test_gvpo_forms_and_ablations_on_ragged_groups(form, terms):
    rows = make_rows([[1, 0, 0, 1], [0.5, 0.5, 0.5], [2.0], [1, -3]])
    logp_r = make_logp(rows)
    weight_n = sequence_weights(GVPO(beta=0.3, form=form, terms=terms), rows, logp_r)
    assert weight_n.tolist() == pytest.approx(ablation_weights(rows, logp_r, 0.3, terms), abs=1e-6)
    assert rows.group_mean(weight_n).abs().max() < 1e-7
    if terms:  # a group with equal rewards still pulls where its drifts differ
        assert weight_n[4:7].abs().min() > 1e-4


def test_gvpo_group_mean_may_be_detached():
    rows, logp_r = gvpo_vector()
    logp_r.requires_grad_()
    d = logp_r - rows.ref_logp_r
    gradients = []
    for mean in (d.mean(), d.mean().detach()):
        loss = 0.5 * ((0.1 * (d - mean) - (rows.reward_n - rows.reward_n.mean())) ** 2).sum() / 3
        gradients.append(torch.autograd.grad(loss, logp_r, retain_graph=True)[0])
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], sequence_weights(GVPO(), rows, logp_r))


def test_gvpo_without_drift_is_reinforce_with_group_baseline():
    rows = make_rows([[1, 0, 0, 1], [0, 3, 0]])
    rows = rows.with_columns(ref_logp_r=make_logp(rows))
    advantage_n = Estimator()(rows)[0]
    k_minus_1 = torch.tensor([3.0] * 4 + [2.0] * 3)
    expected = -0.1 * advantage_n / k_minus_1 / 2
    torch.testing.assert_close(sequence_weights(GVPO(), rows, make_logp(rows)), expected)


def test_gvpo_keeps_precision_on_long_sequences():
    """l and l' are sums over 30,000 tokens, their difference is small: difference first, then the sum.

    The other way round, these fp32 sums would give a drift of 0.24 for 3.0.
    """
    rows = make_rows([[0, 0]], lengths=[30_000, 30_000])
    ref_r = torch.full((60_000,), -1.0)
    logp_r = ref_r + torch.tensor([1e-4, -1e-4])[rows.seq_r]
    exact = (logp_r.double() - ref_r.double()).view(2, -1).sum(1)
    weight_n = sequence_weights(GVPO(beta=1.0), rows.with_columns(ref_logp_r=ref_r), logp_r)
    expected = exact - exact.mean()
    assert weight_n.tolist() == pytest.approx(expected.tolist(), rel=1e-3)


# --- policy gradient, PPO, NLL ------------------------------------------------------------------------


@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
def test_grpo_objective(kl_coef):
    """Eq. 3 of arXiv 2402.03300 written out in fp64 with torch.std, one term at a time."""
    rewards = [[1, 0, 0, 1], [0, 1, 0]]
    rows = make_rows(rewards)
    logp_r = make_logp(rows)
    rows = rows.with_columns(advantage_n=Estimator(scale="group_std")(rows)[0])
    weight_r, metrics = token_weights(PPO(kl_coef=kl_coef), rows, logp_r, Totals.of(rows))

    x = logp_r.double().requires_grad_()
    old, ref = rows.old_logp_r.double(), rows.ref_logp_r.double()
    loss, clipped, row = torch.zeros((), dtype=torch.float64), 0, 0
    for group in rewards:
        group = torch.tensor(group, dtype=torch.float64)
        for reward in group:
            advantage = float((reward - group.mean()) / (group.std() + 1e-6))
            tokens = range(rows.offsets[row], rows.offsets[row + 1])
            for t in tokens:
                ratio = (x[t] - old[t]).exp()
                bounded = min(max(float(ratio), 0.8), 1.2)
                outside = bounded != float(ratio) and bounded * advantage < float(ratio) * advantage
                clipped += outside
                surrogate = torch.tensor(bounded * advantage) if outside else ratio * advantage
                kl = (ref[t] - x[t]).exp() - 1 - (ref[t] - x[t])
                loss = loss - (surrogate - kl_coef * kl) / len(tokens) / len(rows)
            row += 1
    assert 0 < clipped < len(x)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(clipped / len(x))
    assert ("kl_ref" in metrics) == (kl_coef > 0)
    torch.testing.assert_close(weight_r.double(), torch.autograd.grad(loss, x)[0], atol=1e-6, rtol=1e-5)


def test_k3_estimate():
    rows = make_rows([[1, 0]], lengths=[1, 1])
    rows = rows.with_columns(ref_logp_r=torch.tensor([0.1, -0.1]), old_logp_r=torch.zeros(2))
    _, metrics = token_weights(PPO(kl_coef=1.0), rows, torch.zeros(2), Totals.of(rows))
    assert metrics["kl_ref"] == pytest.approx((0.005171 + 0.004837) / 2, abs=1e-6)


def test_dr_grpo_first_update_is_the_centred_reward_over_a_constant():
    algorithm = AlgorithmConfig.model_validate("dr_grpo")
    rows = make_rows([[1, 0, 0, 1]])
    logp_r = make_logp(rows)
    rows = rows.with_columns(old_logp_r=logp_r, advantage_n=algorithm.estimator(rows)[0])
    weight_n = sequence_weights(algorithm.loss, rows, logp_r)
    assert weight_n.tolist() == pytest.approx(
        [-0.5 / 4 / 1024, 0.5 / 4 / 1024] * 1 + [0.5 / 4 / 1024, -0.5 / 4 / 1024]
    )


def test_nll_weighs_every_token_alike():
    rows = make_rows([[0], [0]], lengths=[1, 3])
    weight_r, metrics = token_weights(NLL(), rows, make_logp(rows), Totals.of(rows))
    assert weight_r.tolist() == pytest.approx([-0.25] * 4)
    assert metrics["loss"] == pytest.approx(-float(make_logp(rows).mean()))


# --- GPG's correction over ranks ----------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("age", "aggregation"), [("sample", "sequence_mean"), ("token", "token_mean")])
def test_gpg_correction_is_the_mean_over_valid_samples(age, aggregation, ranks, accumulation):
    """Appendix A: whatever the ranks and micro-batches hold, the step's gradient is that of valid samples.

    Rank 0 has no valid group of its four ranks' 8, the others unequally many. The expected value is the
    plain mean over valid samples (tokens) alone. The paper's identity, alpha times the average of the
    ranks' own means, is checked beside it where it holds: for means over samples.
    """
    rewards = [[0, 0], [1, 1], [1, 0], [0.5, 0.5], [1, 0], [0, 2], [1, 3], [0, 0]]
    rows = make_rows(rewards)
    advantage_n, metrics = Estimator(age=age)(rows)
    rows = rows.with_columns(advantage_n=advantage_n)
    loss, totals = PolicyGradient(aggregation=aggregation), Totals.of(rows)

    gradient_r = torch.zeros(totals.tokens)
    of_rank = torch.arange(len(rows)).chunk(ranks)
    for mine in of_rank:
        for micro_batch in mine.chunk(accumulation):
            tokens = torch.isin(rows.seq_r, micro_batch)
            weight_r, _ = token_weights(
                loss, rows.select(micro_batch.tolist()), make_logp(rows)[tokens], totals
            )
            gradient_r[tokens] += weight_r

    plain_n = Estimator()(rows)[0]
    valid_n = plain_n != 0
    length_r = rows.length_n[rows.seq_r]
    valid_r = valid_n[rows.seq_r]
    size_r = valid_n.sum() * length_r if age == "sample" else valid_r.sum()
    expected_r = -(plain_n[rows.seq_r] / size_r) * valid_r
    torch.testing.assert_close(gradient_r, expected_r)

    if age == "sample":
        ddp_r = torch.zeros(totals.tokens)
        for mine in of_rank:
            tokens = torch.isin(rows.seq_r, mine)
            ddp_r[tokens] = -plain_n[rows.seq_r][tokens] / (len(mine) * length_r[tokens]) / ranks
        torch.testing.assert_close(metrics["age_alpha"].float() * ddp_r, gradient_r)


# --- every loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_shares_add_up_over_any_split_by_groups(loss):
    rows = make_rows([[1, 0, 0, 1], [0.5, 0.5, 0.5], [2.0], [1, -3], [0, 1]])
    logp_r, totals = make_logp(rows), Totals.of(rows)
    whole_r, whole = token_weights(loss, rows, logp_r, totals)
    for parts in ([[0], [1], [2], [3], [4]], [[4, 1], [], [0, 3, 2]], [[2], [0, 1, 3, 4]]):
        summed = dict.fromkeys(whole, 0.0)
        for part in parts:
            index = [i for g in part for i in range(len(rows)) if rows.group_n[i] == g]
            mine = rows.select(index)
            tokens = [t for i in index for t in range(rows.offsets[i], rows.offsets[i + 1])]
            weight_r, metrics = token_weights(loss, mine, logp_r[tokens], totals)
            torch.testing.assert_close(weight_r, whole_r[tokens])
            summed = {name: summed[name] + float(value) for name, value in metrics.items()}
        assert summed == pytest.approx({name: float(value) for name, value in whole.items()}, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_surrogate_of_fixed_weights_has_the_gradient_of_the_loss(loss):
    """sum(w * logp) over single sequences, groups split, against the loss on whole groups: for parameters
    behind the log-probs, not only for the log-probs."""
    rows = make_rows([[1, 0, 0, 1], [0.5, 0.5, 0.5], [1, -3]])
    totals = Totals.of(rows)
    theta = torch.randn(7, requires_grad=True, generator=torch.Generator().manual_seed(3))
    features = torch.randn(totals.tokens, 7, generator=torch.Generator().manual_seed(4))

    def policy() -> torch.Tensor:
        return -torch.nn.functional.softplus(features @ theta)

    share, _ = loss(LossInputs(rows, policy(), totals))
    (expected,) = torch.autograd.grad(share, theta)
    weight_r, _ = token_weights(loss, rows, policy(), totals)
    theta.grad = None
    for i in range(len(rows)):
        span = slice(rows.offsets[i], rows.offsets[i + 1])
        (weight_r[span] * policy()[span]).sum().backward()
    torch.testing.assert_close(theta.grad, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_linear_means_that_weights_depend_on_no_log_probs(loss):
    rows = make_rows([[1, 0, 0, 1], [0.5, 0.5, 0.5]])
    zeros_r = torch.zeros_like(make_logp(rows))
    others = rows.with_columns(old_logp_r=zeros_r, ref_logp_r=zeros_r)
    weights = [
        token_weights(loss, rows, make_logp(rows, 1), Totals.of(rows))[0],
        token_weights(loss, rows, make_logp(rows, 2), Totals.of(rows))[0],
        token_weights(loss, others, make_logp(rows, 1), Totals.of(rows))[0],
    ]
    assert loss.linear == all(torch.allclose(weight_r, weights[0]) for weight_r in weights)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_known_at_step_start_means_that_zeros_serve_for_all_log_probs(loss):
    rows = make_rows([[1, 0, 0, 1], [0.5, 0.5, 0.5]])
    totals = Totals.of(rows)
    zeros_r = torch.zeros(totals.tokens)
    frozen = rows.with_columns(old_logp_r=zeros_r, ref_logp_r=zeros_r)
    shortcut, _ = token_weights(loss, frozen, zeros_r, totals)
    logp_r = make_logp(rows)
    at_start = {"old_logp_r": logp_r}  # what a step's first mini-batch really has
    if loss.anchors.get("ref", None) == PPO(kl_coef=1, reference="step_start").reference:
        at_start["ref_logp_r"] = logp_r
    exact, _ = token_weights(loss, rows.with_columns(**at_start), logp_r, totals)
    assert loss.known_at_step_start == torch.allclose(shortcut, exact, atol=1e-7)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_read_only_the_anchors_that_they_declare(loss):
    rows = make_rows([[1, 0, 0, 1]])
    expected, _ = token_weights(loss, rows, make_logp(rows), Totals.of(rows))
    bare = rows.with_columns(
        old_logp_r=rows.old_logp_r if "old" in loss.anchors else None,
        ref_logp_r=rows.ref_logp_r if "ref" in loss.anchors else None,
        advantage_n=rows.advantage_n if loss.signal == "advantage" else None,
    )
    torch.testing.assert_close(token_weights(loss, bare, make_logp(rows), Totals.of(rows))[0], expected)


# --- batch policies -----------------------------------------------------------------------------------


def make_group(rewards: list[float], name: str = "p") -> Group:
    prompt = Prompt(name, (1, 2), "1+1=", "2", demonstration=(3, 4), record={"level": 1})
    return Group(prompt, [Rollout([5, 6], [-0.1, -0.2], "2", "stop", reward=r) for r in rewards])


VALID, RIGHT, WRONG = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]


def test_keep_all_passes_every_batch_unchanged():
    policy = KeepAll().build(2)
    batch = [make_group(WRONG), make_group(VALID), make_group(RIGHT)]
    assert policy.offer(batch) == batch


def test_enough_valid_groups_train_at_once():
    batch = [make_group(WRONG), make_group(VALID), make_group(VALID), make_group(VALID), make_group(RIGHT)]
    policy = Accumulate(threshold=0.6).build(5)
    assert policy.offer(batch) == batch
    assert policy.metrics == {"rounds": 1, "valid_groups": 3, "dropped_groups": 0, "gave_up": 0}


def test_too_few_valid_groups_wait_for_another_batch():
    first = [make_group(VALID, "a"), *[make_group(WRONG)] * 4]
    second = [make_group(RIGHT, "b"), make_group(VALID, "c"), make_group(WRONG, "d"), make_group(VALID, "e")]
    policy = Accumulate(threshold=0.6).build(5)
    assert policy.offer(first) is None
    batch = policy.offer([*second, make_group(RIGHT, "f")])
    assert [group.prompt.id for group in batch] == ["a", "b", "c", "d", "e"]  # filled up to 5, in order
    assert policy.metrics == {"rounds": 2, "valid_groups": 3, "dropped_groups": 5, "gave_up": 0}
    assert policy.offer([make_group(WRONG)] * 5) is None  # a new batch begins with nothing pending


def test_no_valid_group_is_thrown_away():
    policy = Accumulate(threshold=1.0).build(3)
    assert policy.offer([make_group(VALID), make_group(VALID), make_group(WRONG)]) is None
    batch = policy.offer([make_group(VALID), make_group(VALID), make_group(RIGHT)])
    assert len(batch) == 4 and all(map(is_valid, batch))


def test_accumulation_gives_up_after_max_rounds_and_says_so():
    policy = Accumulate(max_rounds=3).build(2)
    assert policy.offer([make_group(WRONG)] * 2) is None
    assert policy.offer([make_group(WRONG)] * 2) is None
    assert len(policy.offer([make_group(WRONG)] * 2)) == 2
    assert policy.metrics == {"rounds": 3, "valid_groups": 0, "dropped_groups": 4, "gave_up": 1}


def test_pending_groups_survive_a_checkpoint():
    interrupted, whole = Accumulate().build(3), Accumulate().build(3)
    for policy in (interrupted, whole):
        assert policy.offer([make_group(VALID, "a"), make_group(WRONG), make_group([0.5])]) is None
    resumed = Accumulate().build(3)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    last = [make_group(VALID, "b"), make_group(RIGHT, "c"), make_group(RIGHT, "d")]
    assert resumed.offer(last) == whole.offer(last)
    assert resumed.metrics == whole.metrics


def test_validity_is_decided_in_fp32_as_in_training():
    assert not is_valid(make_group([0.1 + 0.2, 0.3]))
    assert not is_valid(make_group([1.0]))
    assert is_valid(make_group([0.1, 0.2]))


def test_alpha_of_an_accumulated_batch():
    policy = Accumulate(threshold=0.6).build(5)
    assert policy.offer([make_group(VALID), *[make_group(WRONG)] * 4]) is None
    batch = policy.offer([make_group(VALID), make_group(VALID), *[make_group(RIGHT)] * 3])
    _, metrics = Estimator(age="sample")(Rows.from_groups(batch))
    assert metrics["age_alpha"] == pytest.approx(5 / 3)


# --- recipes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", sorted(file.stem for file in RECIPES.glob("*.yaml")))
def test_recipes_load_name_their_source_and_survive_a_round_trip(recipe):
    algorithm = AlgorithmConfig.model_validate(recipe)
    assert AlgorithmConfig.model_validate(algorithm.model_dump(mode="json")) == algorithm
    assert "arXiv" in (RECIPES / f"{recipe}.yaml").read_text().split("\n\n")[0]


def test_recipes_say_what_the_papers_say():
    recipes = {name: AlgorithmConfig.model_validate(name) for name in ("gvpo", "gpg", "grpo", "sft")}
    assert AlgorithmConfig() == recipes["gvpo"]
    assert recipes["gvpo"].loss == GVPO(beta=0.1, norm="k-1", reference="step_start", terms=("var", "cov"))
    assert recipes["gpg"].estimator == Estimator(baseline="mean", scale="none", age="sample")
    assert recipes["gpg"].batch_policy == Accumulate(threshold=0.6)
    assert recipes["grpo"].estimator == Estimator(baseline="mean", scale="group_std", ddof=1)
    assert recipes["sft"].sampler == "dataset" and recipes["sft"].loss == NLL()
    assert [r.needs_group for r in recipes.values()] == [True, True, True, False]

"""GVPO++: the teacher is the only optimum for every weight, by the formula's gradient; both terms matter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_gvpo_theorem import distribution, kl, minimise
from torch import Tensor

from megatron_gvpo.algorithms.base import TEACHER
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.algorithms.losses.gvpo_plus_plus import GVPOPlusPlus
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch

V = 6
TEACHER_COUNTS = [7, 1, 4, 2, 3, 5]
LENGTHS = [1, 2, 3, 5, 8, 13]  # tokens of each response, so that weights differ
SAMPLERS = {"the teacher": TEACHER_COUNTS, "uniform": [1] * V, "stale": [20, 1, 1, 2, 1, 9]}
WEIGHT = """
import torch
def by_first_token(rows, power=1.0):
    return torch.tensor([1.0 + ids[0] for ids in rows.response_ids], dtype=torch.float64) ** power
def zero(rows): return torch.zeros(len(rows))
def short(rows): return torch.ones(1)
"""


def rows_of(responses: list[int], teacher: Tensor) -> TrainBatch:
    """One group; response v has LENGTHS[v] tokens, and the first carries all of its log-prob."""
    return TrainBatch(
        prompt_ids=[(0,)] * len(responses),
        response_ids=[(v,) * LENGTHS[v] for v in responses],
        group_n=torch.zeros(len(responses), dtype=torch.int64),
        reward_n=torch.zeros(len(responses), dtype=torch.float64),
        truncated_n=torch.zeros(len(responses), dtype=torch.bool),
        ref_logp_r=on_first_token(responses, teacher.log()),
    )


def on_first_token(responses: list[int], logp_v: Tensor) -> Tensor:
    parts = []
    for v in responses:
        parts += [logp_v[v : v + 1], logp_v.new_zeros(LENGTHS[v] - 1)]
    return torch.cat(parts)


def minimiser(loss: GVPOPlusPlus, counts: list[int], seed: int = 0) -> Tensor:
    responses = [v for v in range(V) for _ in range(counts[v])]
    rows = rows_of(responses, distribution(TEACHER_COUNTS))
    totals = BatchTotals.of(rows)
    return minimise(lambda logp: loss(LossInputs(rows, on_first_token(responses, logp), totals))[0], seed)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    (tmp_path / "weights.py").write_text(WEIGHT)
    return tmp_path / "weights.py"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("counts", SAMPLERS.values(), ids=SAMPLERS)
def test_the_teacher_is_the_only_optimum_for_every_weight(
    counts: list[int], seed: int, weights: Path
) -> None:
    own = GVPOPlusPlus(function=f"{weights}:by_first_token", options={"power": 0.5})
    for loss in (*(GVPOPlusPlus(alpha=alpha) for alpha in (-0.5, 0, 0.5, 1)), own):
        assert kl(minimiser(loss, counts, seed), distribution(TEACHER_COUNTS)) < 1e-6, loss


def on_policy_minimiser(loss: GVPOPlusPlus, seed: int, size: int = 40, steps: int = 160) -> Tensor:
    """Where Adam ends if a step's group has every response in the share that the present policy gives it.

    The shares are constants of the step: no gradient goes through them. A response with less than half a
    share keeps one, because the theorem wants full support.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(V, dtype=torch.float64, generator=generator)).requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.15)
    for _ in range(steps):
        policy = logits.detach().softmax(0)
        counts = (size * policy).round().clamp(min=1).to(torch.int64)
        responses = torch.arange(V).repeat_interleave(counts).tolist()
        rows = rows_of(responses, distribution(TEACHER_COUNTS))
        optimizer.zero_grad()
        logp_r = on_first_token(responses, logits.log_softmax(0))
        loss(LossInputs(rows, logp_r, BatchTotals.of(rows)))[0].backward()
        optimizer.step()
    return logits.detach().softmax(0)


@pytest.mark.parametrize("seed", range(2))
def test_the_teacher_is_the_optimum_of_the_present_policys_own_samples(seed: int, weights: Path) -> None:
    own = GVPOPlusPlus(function=f"{weights}:by_first_token", options={"power": 0.5})
    for loss in (*(GVPOPlusPlus(alpha=alpha) for alpha in (-0.5, 0, 0.5, 1)), own):
        assert kl(on_policy_minimiser(loss, seed), distribution(TEACHER_COUNTS)) < 1e-6, loss


def test_without_the_teachers_part_the_policy_becomes_uniform() -> None:
    policy = minimiser(GVPOPlusPlus(terms=("var",)), [1] * V)
    assert kl(policy, distribution([1] * V)) < 1e-6
    assert kl(policy, distribution(TEACHER_COUNTS)) > 1e-2


def test_without_the_policys_part_nothing_holds_it_back() -> None:
    """The rest is linear: gradient descent ends at the teacher's likeliest response alone."""
    loss, responses = GVPOPlusPlus(terms=("cov",)), list(range(V))
    rows = rows_of(responses, distribution(TEACHER_COUNTS))
    logits = torch.zeros(V, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=5.0)
    for _ in range(500):
        optimizer.zero_grad()
        logp_r = on_first_token(responses, logits.log_softmax(0))
        loss(LossInputs(rows, logp_r, BatchTotals.of(rows)))[0].backward()
        optimizer.step()
    assert logits.softmax(0).argmax() == 0
    assert logits.softmax(0).max() > 0.999


def ragged(seed: int) -> tuple[TrainBatch, Tensor]:
    """Groups of 2, 3 and 1 responses with random log-probs."""
    torch.manual_seed(seed)
    lengths = [3, 1, 7, 2, 5, 4]
    tokens = sum(lengths)
    rows = TrainBatch(
        prompt_ids=[(0,)] * 6,
        response_ids=[(1,) * length for length in lengths],
        group_n=torch.tensor([0, 0, 1, 1, 1, 2]),
        reward_n=torch.zeros(6, dtype=torch.float64),
        truncated_n=torch.zeros(6, dtype=torch.bool),
        ref_logp_r=-torch.rand(tokens, dtype=torch.float64),
    )
    return rows, -torch.rand(tokens, dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("norm", ["k-1", "k", "sum"])
def test_the_gradient_is_that_of_the_formula(alpha: float, norm: str) -> None:
    rows, logp_r = ragged(seed=1)
    logp_r.requires_grad_()
    share, _ = GVPOPlusPlus(alpha=alpha, norm=norm)(LossInputs(rows, logp_r, BatchTotals.of(rows)))
    (gradient_r,) = torch.autograd.grad(share, logp_r)
    assert rows.ref_logp_r is not None
    expected = []
    ratios = (logp_r.detach() - rows.ref_logp_r).split(rows.length_n.tolist())
    for members in ([0, 1], [2, 3, 4], [5]):
        k = len(members)
        f = [len(ratios[i]) ** -alpha for i in members]
        z = [weight * float(ratios[i].sum()) for weight, i in zip(f, members, strict=True)]
        scale = {"k-1": 1 / (k - 1) if k > 1 else 0.0, "k": 1 / k, "sum": 1.0}[norm] / 3
        for weight, value, i in zip(f, z, members, strict=True):
            expected += [scale * weight * (value - sum(z) / k)] * len(ratios[i])
    torch.testing.assert_close(gradient_r, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)


def test_with_equal_weights_it_is_gvpo_with_the_teacher_as_its_reference() -> None:
    rows, logp_r = ragged(seed=2)
    inputs = LossInputs(rows, logp_r, BatchTotals.of(rows))
    same = GVPO(beta=1.0, reference=TEACHER)(inputs)[0]
    torch.testing.assert_close(GVPOPlusPlus()(inputs)[0], same, rtol=1e-6, atol=1e-9)


def test_the_recipe_compares_with_the_teacher_and_needs_whole_groups() -> None:
    loss = AlgorithmConfig.model_validate("gvpo_plus_plus").loss
    assert loss.reference_policies == {"ref": TEACHER}
    assert loss.couples_groups and not loss.linear and not loss.known_at_step_start


@pytest.mark.parametrize(("name", "words"), [("zero", "above 0"), ("short", "shape")])
def test_wrong_weights_of_a_users_function_are_refused(weights: Path, name: str, words: str) -> None:
    rows, logp_r = ragged(seed=3)
    loss = GVPOPlusPlus(function=f"{weights}:{name}")
    with pytest.raises(UserFunctionError, match=words):
        loss(LossInputs(rows, logp_r, BatchTotals.of(rows)))


def test_a_users_weight_is_not_called_on_a_rank_without_rows(weights: Path) -> None:
    rows, _ = ragged(seed=3)
    inputs = LossInputs(rows.select([]), torch.zeros(0, dtype=torch.float64), BatchTotals.of(rows))
    share, _ = GVPOPlusPlus(function=f"{weights}:short")(inputs)
    assert share == 0


def test_options_without_an_effect_are_refused(weights: Path) -> None:
    for options in ({"alpha": 1.0, "function": f"{weights}:by_first_token"}, {"options": {"power": 2}}):
        with pytest.raises(ValueError, match="no effect"):
            GVPOPlusPlus(**options)  # type: ignore[arg-type]

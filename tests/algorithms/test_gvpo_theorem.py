"""GVPO's theorem on a tabular softmax policy: the minimiser is pi_ref * exp(R / beta) / Z.

The problem has one prompt and V responses of one token. Under a sampler pi_s with rational probabilities c_v
/ k, the population loss of eq. 9 equals the loss (norm "k") of one group of k rows that holds response v
exactly c_v times, because its group means are expectations under pi_s. So the tests minimise the same class
that trains models.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_gvpo.algorithms.base import TEACHER
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch

V, BETA = 6, 0.5
REWARD = torch.tensor([1.0, 0.0, 0.3, -0.5, 0.8, 0.1], dtype=torch.float64)
REFERENCE = [7, 1, 4, 2, 3, 5]  # counts: probabilities times their sum
SAMPLERS = {"reference": REFERENCE, "uniform": [1] * V, "skewed": [20, 1, 1, 2, 1, 9]}


def distribution(counts: list[int]) -> Tensor:
    return torch.tensor(counts, dtype=torch.float64) / sum(counts)


def make_rows(responses: list[list[int]], reward: Tensor, reference: Tensor) -> TrainBatch:
    """Rows with one group for each list of responses."""
    flat = torch.tensor([v for group in responses for v in group])
    return TrainBatch(
        prompt_ids=[(0,)] * len(flat),
        response_ids=[(int(v),) for v in flat],
        group_n=torch.tensor([g for g, group in enumerate(responses) for _ in group]),
        reward_n=reward[flat],
        truncated_n=torch.zeros(len(flat), dtype=torch.bool),
        ref_logp_r=reference.log()[flat],
    )


def minimise(loss: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    """The policy that minimises a function of its log-probs [V], from random logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(V, dtype=torch.float64, generator=generator)).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(logits.log_softmax(0))
        value.backward()
        return value

    optimizer.step(closure)
    return logits.detach().softmax(0)


def population_loss(
    loss: GVPO, counts: list[int], reference: list[int] = REFERENCE
) -> Callable[[Tensor], Tensor]:
    responses = [v for v in range(V) for _ in range(counts[v])]
    rows = make_rows([responses], REWARD, distribution(reference))
    return lambda logp_v: loss(LossInputs(rows, logp_v[responses], BatchTotals.of(rows)))[0]


def test_with_a_teacher_as_the_reference_the_optimum_is_the_teacher_reweighted_by_rewards():
    """The recipe gvpo_teacher_logprobs: pi_teacher exp(R / beta) / Z, whoever samples."""
    teacher = [1, 6, 2, 8, 1, 3]
    own = {"recipe": "gvpo_teacher_logprobs", "loss": {"beta": BETA, "norm": "k"}}
    loss = AlgorithmConfig.model_validate(own).loss
    assert loss.reference_policies == {"ref": TEACHER}
    optimum = (distribution(teacher).log() + REWARD / BETA).softmax(0)
    assert kl(optimum, OPTIMUM) > 0.1, "another teacher has another optimum"
    for counts in (REFERENCE, [1] * V):
        assert kl(minimise(population_loss(loss, counts, teacher), 0), optimum) < 1e-6


def kl(p: Tensor, q: Tensor) -> float:
    return float((p * (p / q).log()).sum())


OPTIMUM = (distribution(REFERENCE).log() + REWARD / BETA).softmax(0)
FORGETFUL = (REWARD / BETA).softmax(0)  # the optimum under a uniform reference


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("counts", SAMPLERS.values(), ids=SAMPLERS)
def test_minimiser_is_the_kl_constrained_optimum_under_any_sampler(counts, seed):
    """Theorems 3.1 and 3.2 of the paper."""
    for form in ("mse", "variance"):
        policy = minimise(population_loss(GVPO(beta=BETA, norm="k", form=form), counts), seed)
        assert kl(policy, OPTIMUM) < 1e-6
    assert kl(policy, FORGETFUL) > 1e-2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("counts", SAMPLERS.values(), ids=SAMPLERS)
def test_without_cov_the_reference_is_forgotten(counts, seed):
    policy = minimise(population_loss(GVPO(beta=BETA, norm="k", terms=("var",)), counts), seed)
    assert kl(policy, FORGETFUL) < 1e-6
    assert kl(policy, OPTIMUM) > 1e-2


def test_without_var_nothing_holds_the_policy_back():
    """The weights no longer depend on the policy, so gradient descent goes on to a single response."""
    loss = population_loss(GVPO(beta=BETA, norm="k", terms=("cov",)), REFERENCE)
    logits = torch.zeros(V, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=20.0)
    for _ in range(500):
        optimizer.zero_grad()
        loss(logits.log_softmax(0)).backward()
        optimizer.step()
    assert logits.softmax(0).max() > 0.999


@pytest.mark.parametrize("counts", SAMPLERS.values(), ids=SAMPLERS)
def test_uncentred_regression_finds_neither(counts):
    """The loss (beta d - R)^2 without group means would need log Z (section 3.4)."""
    weights, reference = distribution(counts), distribution(REFERENCE)
    policy = minimise(
        lambda logp_v: (weights * (BETA * (logp_v - reference.log()) - REWARD) ** 2).sum(), seed=0
    )
    assert kl(policy, OPTIMUM) > 1e-2
    assert kl(policy, FORGETFUL) > 1e-2


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize(
    ("form", "terms"),
    [*product(["mse", "nll", "variance"], [("var", "cov"), ("var",)]), ("mse", ("cov",))],
)
def test_sampled_groups_give_the_population_gradient_without_bias(form, terms, k):
    """Expectation over all k-tuples of three responses, norm k-1, against half of eq. 9's gradient."""
    sampler = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    reward = torch.tensor([1.0, 0.0, 0.4], dtype=torch.float64)
    logits = torch.tensor([0.1, -0.7, 0.4], dtype=torch.float64, requires_grad=True)

    # eq. 9 with the terms of eq. 10 written as products of centred factors, so that each can be dropped
    def centred(value: Tensor) -> Tensor:
        return value - (sampler * value).sum()

    logp = logits.log_softmax(0)
    advantage, own, other = centred(reward), centred(logp), centred(reference.log())
    terms_of_loss = -2 * BETA * advantage * own
    if "var" in terms:
        terms_of_loss = terms_of_loss + BETA**2 * own**2
    if "cov" in terms:
        terms_of_loss = terms_of_loss - 2 * BETA**2 * own * other
    (expected,) = torch.autograd.grad(0.5 * (sampler * terms_of_loss).sum(), logits)

    tuples = [list(group) for group in product(range(3), repeat=k)]
    rows = make_rows(tuples, reward, reference)
    probability = torch.stack([sampler[group].prod() for group in tuples])
    flat = torch.tensor(tuples).flatten()
    logp_r = logits.log_softmax(0).detach()[flat].requires_grad_()
    share, _ = GVPO(beta=BETA, form=form, terms=terms)(LossInputs(rows, logp_r, BatchTotals.of(rows)))
    (weight_r,) = torch.autograd.grad(share * len(tuples), logp_r)  # of every group's own loss
    weight_r = weight_r * probability.repeat_interleave(k)
    (sampled,) = torch.autograd.grad((weight_r * logits.log_softmax(0)[flat]).sum(), logits)
    torch.testing.assert_close(sampled, expected, atol=1e-7, rtol=1e-6)

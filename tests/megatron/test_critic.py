"""PPO's critic: advantages from their definition, and a value model whose gradient does not know the machine.

The reference is fp64: the last hidden states of `transformers` with a linear head and plain autograd,
sequence by sequence, and GAE as the double sum of its definition.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.distributed import launch
from helpers.inputs.rows import make_rows
from helpers.references import gradient_reference as reference
from helpers.references.bf16_errors import round_weights
from helpers.suite.selected import selected
from helpers.workers.critic_worker import CriticResult
from helpers.workers.gradient_worker import Case, Layout
from hypothesis import given, settings
from hypothesis import strategies as st
from test_conversations import contexts, with_turns

from megatron_gvpo.algorithms.advantages.gae import GAE, CriticOptions
from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.algorithms.recipe import read_recipe
from megatron_gvpo.megatron.microbatch import RowSegments
from megatron_gvpo.turns import Turn
from megatron_gvpo.types import BatchTotals, TrainBatch

TOLERANCE = 1e-5
SPLIT = 24  # tokens: rows are divided between micro-batches
QUICK = [
    (Layout(1), "untied"),
    (Layout(2, tp=2, sequence_parallel=True), "untied"),
    (Layout(2, cp=2), "untied"),
    (Layout(4, pp=2, vpp=2, overlap=True), "untied"),
    (Layout(2, pp=2), "tied"),
]
ALL = [
    *QUICK,
    (Layout(2), "untied"),
    (Layout(2, tp=2), "untied"),
    (Layout(2, pp=2), "untied"),
    (Layout(4, tp=2, pp=2), "untied"),
    (Layout(1), "tied"),
    (Layout(2, overlap=True, small=True), "untied"),
    (Layout(4, pp=2, overlap=True, small=True), "untied"),
    (Layout(4, pp=2, overlap=True, small=True), "tied"),
]
CLIP = 0.2


def by_definition(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """arXiv 1506.02438, eq. 16, for one response; its last token has no successor."""
    after = [*values[1:], 0.0]
    delta = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** (later - t) * delta[later] for later in range(t, len(delta)))
        for t in range(len(delta))
    ]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    kl_coef=st.sampled_from([0.0, 0.3]),
)
def test_gae_is_its_definition(lengths, gamma, lam, kl_coef):
    rows = make_rows([[float(i)] for i in range(len(lengths))], lengths)
    value_r = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(3))
    rows = rows.with_columns(value_r=value_r)
    filled, _ = GAE(gamma=gamma, lam=lam, kl_coef=kl_coef, whiten="none").fill(rows)
    for i, reward in enumerate(rows.reward_n.tolist()):
        span = slice(rows.offsets[i], rows.offsets[i + 1])
        if not lengths[i]:
            continue
        kl = (rows.old_logp_r[span].double() - rows.ref_logp_r[span].double()).tolist()
        rewards = [-kl_coef * x for x in kl]
        rewards[-1] += reward
        values = value_r[span].double().tolist()
        wanted = by_definition(rewards, values, gamma, lam)
        assert filled.advantage_r[span].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        returns = [a + v for a, v in zip(wanted, values, strict=True)]
        assert filled.return_r[span].tolist() == pytest.approx(returns, rel=1e-5, abs=1e-6)


def test_the_ends_of_lambda():
    """lambda 1 gives the return less the value, lambda 0 the one-step error."""
    rows = make_rows([[2.0]], [3]).with_columns(value_r=torch.tensor([1.0, 3.0, 5.0]))
    filled, _ = GAE(lam=1.0, whiten="none").fill(rows)
    assert filled.advantage_r.tolist() == [1.0, -1.0, -3.0] and filled.return_r.tolist() == [2.0, 2.0, 2.0]
    step, metrics = GAE(lam=0.0, whiten="none").fill(rows)
    assert step.advantage_r.tolist() == [2.0, 2.0, -3.0]
    assert metrics["explained_variance"] == pytest.approx(1 - 50 / 9 / (14 / 9))


def test_whitening_leaves_the_returns_alone():
    rows = make_rows([[1.0], [0.0]], [3, 4]).with_columns(value_r=torch.arange(7) / 7)
    plain, _ = GAE(whiten="none").fill(rows)
    white, _ = GAE().fill(rows)
    a = plain.advantage_r.double()
    torch.testing.assert_close(white.advantage_r.double(), (a - a.mean()) / a.std())
    assert torch.equal(white.return_r, plain.return_r)


def test_without_values_it_is_reinforce_plus_plus():
    """Every token gets the response's reward less the KL of the tokens from it on, whitened over tokens."""
    rows = make_rows([[1.0], [-1.0]], [2, 3])
    filled, _ = GAE(values="zero", lam=1.0, kl_coef=0.1).fill(rows)
    kl = rows.old_logp_r.double() - rows.ref_logp_r.double()
    to_go = torch.tensor([1 - 0.1 * kl[t:2].sum() for t in range(2)]).tolist()
    to_go += torch.tensor([-1 - 0.1 * kl[t:5].sum() for t in range(2, 5)]).tolist()
    wanted = torch.tensor(to_go)
    torch.testing.assert_close(filled.advantage_r, (wanted - wanted.mean()) / wanted.std())
    assert filled.return_r is None


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (1.0, 1.1, 2.0, 0.5, -1.0),  # near the old value: the plain square
        (1.5, 1.0, 2.0, 0.5 * 0.8**2, 0.0),  # moved too far towards the target: clipped, no gradient
        (0.5, 1.0, 2.0, 0.5 * 1.5**2, -1.5),  # moved away from it: what is larger counts
    ],
)
def test_value_clipping(value, old, target, loss, gradient):
    rows = make_rows([[0.0]], [1]).with_columns(value_r=torch.tensor([old]), return_r=torch.tensor([target]))
    value_r = torch.tensor([value], requires_grad=True)
    share, metrics = CriticOptions(clip=CLIP).loss(rows, value_r, BatchTotals.of(rows))
    assert share.item() == pytest.approx(loss) and metrics["value_loss"] == pytest.approx(loss)
    share.backward()
    assert value_r.grad.item() == pytest.approx(gradient)
    plain, _ = CriticOptions(clip=None).loss(rows, value_r.detach(), BatchTotals.of(rows))
    assert plain.item() == pytest.approx(0.5 * (value - target) ** 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipe": "ppo", "critic": None}, "critic is missing: the estimator gae reads its values"),
        ({"recipe": "ppo", "estimator": {"values": "zero"}}, "critic has no effect"),
        ({"recipe": "grpo", "critic": {}}, "critic has no effect"),
        (
            {"recipe": "ppo", "loss": {"kl_coef": 0.1, "reference": {"name": "ema", "decay": 0.9}}},
            "one reference policy is kept",
        ),
    ],
)
def test_a_critic_that_nobody_reads_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate(values)


def test_the_recipe_says_what_the_papers_say():
    ppo = AlgorithmConfig.model_validate("ppo")
    assert ppo.estimator == GAE(gamma=1.0, lam=0.95, kl_coef=0.001)
    assert ppo.critic == CriticOptions(lr=1e-5, clip=CLIP) and not ppo.needs_group
    assert read_recipe("ppo")[1].provenance == "textbook"


def step_rows() -> TrainBatch:
    """Ragged rows with returns, and old values that are sometimes far from the head's.

    Two are conversations: one with a branch, which the budget divides by segment.
    """
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(reference.VOCABULARY, (count,), generator=generator).tolist()

    shapes = [(3, 4), (1, 1), (7, 9), (2, 20), (5, 6), (1, 5)]
    rows = TrainBatch(
        prompt_ids=[tokens(prompt) for prompt, _ in shapes],
        response_ids=[tokens(response) for _, response in shapes],
        group_n=torch.arange(len(shapes)),
        reward_n=torch.rand(len(shapes), generator=generator),
        truncated_n=torch.zeros(len(shapes), dtype=torch.bool),
        turns=[[] for _ in shapes],
    )
    rows.turns[2] = [Turn(0), Turn(3, 0, None, (5, 6, 7)), Turn(6, -1, 4, (9, 9))]
    rows.turns[4] = [Turn(0), Turn(2, 0, None, (3,))]
    total = sum(response for _, response in shapes)
    return rows.with_columns(
        value_r=torch.randn(total, generator=generator), return_r=torch.rand(total, generator=generator)
    )


def plain(
    directory: Path, model: str, head_h: torch.Tensor, bias: float, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, float, dict]:
    """Values, loss and gradients of one update, by transformers and autograd; the loss is in fp64."""
    rows, policy = step_rows(), reference.load(directory / model).to(dtype)
    weight, offset = head_h.to(dtype).requires_grad_(), torch.tensor([bias]).to(dtype).requires_grad_()
    values = []
    for talk in map(with_turns, zip(rows.prompt_ids, rows.response_ids, rows.turns, strict=True)):
        for context, response in contexts(talk):
            hidden = policy.model(input_ids=torch.tensor([[*context, *response]])).last_hidden_state[0]
            values.append(hidden[len(context) - 1 : -1] @ weight + offset)
    value_r = torch.cat(values).double()
    old, target = rows.value_r.double(), rows.return_r.double()
    terms = [
        max((v - r) ** 2, (min(max(v, o - CLIP), o + CLIP) - r) ** 2)
        for v, o, r in zip(value_r, old, target, strict=True)
    ]
    loss = 0.5 * torch.stack(terms).mean()
    loss.backward()
    named = {
        name: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for name, parameter in policy.named_parameters()
        if not name.startswith("lm_head")
    }
    return value_r.detach(), loss.item(), named | {"head.weight": weight.grad[None], "head.bias": offset.grad}


# Numbers that bf16 has.
HEAD = (torch.randn(32, generator=torch.Generator().manual_seed(5)) * 0.3).bfloat16().float()
BIAS = 0.125


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the selected tests' layouts, and of one rank, with which they are compared."""
    path = tmp_path_factory.mktemp("critic")
    wanted = {*selected(request, "layout", "model"), ALL[0]}
    run_layouts(path, [run for run in ALL if run in wanted])
    return path


def run_layouts(
    path: Path, runs: list[tuple[Layout, str]], emulated: bool = False, dtype: str = "float32"
) -> None:
    """In bf16 the weights are those that bf16 has."""
    reference.save_models(path, ("untied", "tied"))
    if dtype == "bfloat16":
        round_weights(path)
    algorithm = {"recipe": "ppo", "critic": {"lr": 1e-2}}
    work = [
        (layout, Case("", algorithm, step_rows(), SPLIT, model=model, dtype=dtype)) for layout, model in runs
    ]
    assert RowSegments.divide(step_rows(), SPLIT) is not None, "a conversation is divided by segment"
    torch.save((work, HEAD, BIAS), path / "work.pt")
    ranks = [layout.ranks for layout, _ in runs]
    launch("helpers.workers.critic_worker:run", ranks, str(path), timeout=1800, emulated=emulated)


@pytest.fixture(scope="module")
def wanted(directory: Path) -> dict[str, tuple]:
    return {model: plain(directory, model, HEAD, BIAS) for model in ("untied", "tied")}


@pytest.mark.parametrize(
    ("layout", "model"),
    [pytest.param(*run, marks=() if run in QUICK else pytest.mark.proof) for run in ALL],
    ids=str,
)
def test_values_gradients_and_checkpoints_do_not_know_the_machine(directory, wanted, layout, model):
    result: CriticResult = torch.load(directory / f"{layout}-{model}.pt", weights_only=False)
    value_r, loss, gradients = wanted[model]
    assert result.at_first_r.abs().max() == 0, "a new head expects nothing"
    torch.testing.assert_close(result.value_r.double(), value_r, rtol=0, atol=1e-5)
    assert result.metrics["value_loss"] == pytest.approx(loss, rel=TOLERANCE)
    assert result.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        difference = (result.gradients[name] - gradient).abs().max()
        assert difference <= TOLERANCE * gradient.abs().max(), name

    assert result.resumed_metrics == result.next_metrics
    for name, weight in result.weights.items():
        assert torch.equal(result.resumed_weights[name], weight), name
    single: CriticResult = torch.load(directory / "single-untied.pt", weights_only=False)
    if model == "untied":
        norms, alone = ([m["value_grad_norm"] for m in f.next_metrics] for f in (result, single))
        assert norms == pytest.approx(alone, rel=1e-4)
    assert result.next_metrics[1]["value_loss"] < result.metrics["value_loss"]

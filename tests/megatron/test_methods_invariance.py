"""The gradient of every loss does not know the machine: real megatron-core against plain transformers.

test_gradient_invariance.py proves it for the main methods, with independent formulas and in every layout.
This file has all losses and aggregations, on one rank, two data-parallel and two context-parallel ranks, in
packs that split groups, packs that keep them whole, and one response a pack: three of these nine pairs in
`make test`, all of them in `make proof`. The reference is the loss
itself, called once with all rows on log-probs of `transformers` in fp64, with plain autograd: no split over
micro-batches and ranks changes it. test_relatives and test_trl prove the formulas.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.distributed import launch
from helpers.paths import ROOT
from helpers.references import gradient_reference as reference
from helpers.suite.selected import selected
from helpers.workers.gradient_worker import TEMPERATURE, Case, Layout, Outcome

from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch

TOLERANCE = 2e-5  # of the largest entry of a parameter's gradient
LAYOUTS = [Layout(1), Layout(2), Layout(2, cp=2)]
ONE_BY_ONE, SPLIT, ALL = 1, 24, 10_000  # budgets in tokens

GRPO = {"recipe": "grpo", "loss": {"kl_coef": 0.0}}
REJECTED = {"name": "reject", "level": "geometric", "low": 0.9, "high": 1.2, "veto": 0.3}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "gvpo with entropy": {"recipe": "gvpo_entropy", "loss": {"entropy_coef": 0.3}},
    "gvpo, norm sum": {"recipe": "gvpo", "loss": {"norm": "sum"}},
    "gvpo, norm k": {"recipe": "gvpo", "loss": {"norm": "k"}},
    "gvpo, fixed reference": {"recipe": "gvpo", "loss": {"reference": "fixed"}},
    "pg, constant": {"recipe": "rloo"},
    "ppo, token mean, entropy": {"recipe": "dapo", "shapers": [], "loss": {"entropy_coef": 0.1}},
    "ppo, constant": {"recipe": "dr_grpo", "loss": {"aggregation": {"constant": 30}}},
    "ppo, dual clip": {"recipe": "bnpo"},
    "gspo": {"recipe": "gspo", "loss": {"clip_low": 0.05, "clip_high": 0.05}},
    "ppo of items": {**GRPO, "estimator": {"name": "rank", "items": 2, "separator_ids": [0]}},
    "cispo": {"recipe": "cispo", "loss": {"clip_high": 0.1}},
    "dpo": {"recipe": "dpo", "sampler": "engine"},
    "dpo, all pairs": {"recipe": "dpo", "sampler": "engine", "loss": {"pairs": "all"}},
    "disco": {"recipe": "disco", "loss": {"kl_limit": 0.0, "kl_coef": 10.0}},
    "disco of ratios": {"recipe": "disco_ratio", "loss": {"kl_limit": 0.0, "kl_coef": 10.0}},
    "drpo": {"recipe": "drpo", "loss": {"max_tokens": 20}},
    "reg_grpo": {"recipe": "reg_grpo", "loss": {"kl_coef": 0.2, "eps": 1.0}},
    "whitened": {"recipe": "reinforce_pp_baseline"},
    "returns less kl": {"recipe": "reinforce_pp", "estimator": {"kl_coef": 0.3}},
    "batch std": {"recipe": "gpg_batch_std"},
    "ppo, sequence truncation": {
        **GRPO,
        "loss": {"kl_coef": 0.0, "importance": {"level": "sequence", "cap": 1.2}},
    },
    "ppo, geometric rejection": {**GRPO, "loss": {"kl_coef": 0.0, "importance": REJECTED}},
    "pg, sequence mask": {
        "recipe": "gpg",
        "loss": {"importance": {"name": "mask", "level": "sequence", "low": 0.3}},
    },
    "cispo, token mask": {"recipe": "cispo", "loss": {"importance": {"name": "mask", "low": 0.8}}},
    "one's own, by the order of rows": {
        "recipe": None,
        "loss": {
            "name": "custom",
            "function": f"{ROOT}/tests/helpers/references/ordered_loss.py:later_counts_more",
            "reads": ["reward"],
            "groups": True,
        },
    },
}
ALGORITHMS["ppo of items"]["loss"] = {"kl_coef": 0.0, "ratio": "item", "aggregation": "token_mean"}
POLICIES = ("old", "ref", "engine")
BUDGETS = (ONE_BY_ONE, SPLIT, ALL)
QUICK = list(zip(LAYOUTS, BUDGETS, strict=True))  # on one rank one by one, and so on
DIVISIONS = [
    pytest.param(
        layout, budget, id=f"{layout}, {budget}", marks=() if (layout, budget) in QUICK else pytest.mark.proof
    )
    for layout in LAYOUTS
    for budget in BUDGETS
]


def make_rows() -> TrainBatch:
    """Ragged groups, in mixed order: one has a single response, one has equal rewards, two have ties."""
    generator = torch.Generator().manual_seed(0)
    groups = [
        (3, [(4, 1.0), (1, 0.0), (9, 0.5)]),
        (1, [(20, 1.0), (6, 0.0)]),
        (7, [(5, 1.0)]),
        (5, [(8, 0.75), (3, 0.75), (6, 0.75), (2, 0.75)]),
        (2, [(1, 0.0), (12, 1.0), (7, 0.0)]),
        (1, [(2, 1.0), (8, 1.0), (5, 0.0), (3, 0.0)]),
    ]

    def tokens(count: int) -> list[int]:
        return torch.randint(reference.VOCABULARY, (count,), generator=generator).tolist()

    flat = [(g, tokens(prompt), *row) for g, (prompt, rows) in enumerate(groups) for row in rows]
    reward_n = torch.tensor([reward for *_, reward in flat])
    rows = TrainBatch(
        prompt_ids=[prompt for _, prompt, *_ in flat],
        response_ids=[tokens(length) for *_, length, _ in flat],
        group_n=torch.tensor([3 * g + 1 for g, *_ in flat]),
        reward_n=reward_n,
        truncated_n=torch.zeros(len(flat), dtype=torch.bool),
        component_n={"rank_1": reward_n, "rank_2": reward_n.flip(0)},
    )
    rows = rows.select(torch.randperm(len(rows), generator=generator).tolist())
    return rows.with_columns(item_r=torch.arange(len(rows.seq_r)) % 3)


class Plain:
    """The rows as in a later mini-batch of a step, and transformers' log-probs and entropies of them."""

    def __init__(self, directory: Path) -> None:
        model, rows = reference.load(directory / "untied"), make_rows()
        self.parameters = dict(model.named_parameters())
        logp, entropy = [], []
        for prompt, response in zip(rows.prompt_ids, rows.response_ids, strict=True):
            logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            of_all = torch.log_softmax(logits / TEMPERATURE, -1)
            logp.append(of_all.gather(1, torch.tensor(response)[:, None])[:, 0])
            entropy.append(-(of_all.exp() * of_all).sum(-1))
        self.logp_r, self.entropy = torch.cat(logp), torch.cat(entropy).mean()
        generator = torch.Generator().manual_seed(1)
        base_r = self.logp_r.detach().float()
        old_r, ref_r = (
            base_r + scale * torch.randn(base_r.shape, generator=generator) for scale in (0.2, 0.5)
        )
        engine_r = base_r + 0.4 * torch.randn(base_r.shape, generator=generator)
        self.rows = rows.with_columns(old_logp_r=old_r, ref_logp_r=ref_r, engine_logp_r=engine_r)

    def gradients(self, algorithm: AlgorithmConfig) -> tuple[float, dict[str, torch.Tensor]]:
        rows = self.rows
        if algorithm.estimator is not None:
            rows, _ = algorithm.estimator.fill(rows)
        double = {
            name: column.double()
            if isinstance(column, torch.Tensor) and column.is_floating_point()
            else column
            for name in (*("reward_n", "advantage_n", "advantage_r"), *(f"{p}_logp_r" for p in POLICIES))
            if (column := getattr(rows, name)) is not None
        }
        rows = rows.with_columns(**double)
        share, _ = algorithm.loss(LossInputs(rows, self.logp_r, BatchTotals.of(rows)))
        loss = share - algorithm.loss.entropy_coef * self.entropy
        gradients = torch.autograd.grad(loss, list(self.parameters.values()), retain_graph=True)
        return loss.item(), dict(zip(self.parameters, gradients, strict=True))


@pytest.fixture(scope="module")
def plain(directory: Path) -> Plain:
    return Plain(directory)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, directory: Path, plain: Plain) -> dict[tuple[str, str], Outcome]:
    """{(layout, algorithm and budget): Outcome} in the divisions of the selected tests."""
    divisions = selected(request, "layout", "budget")
    work = [
        (layout, Case(f"{name} {budget}", algorithm, plain.rows, budget))
        for layout in LAYOUTS
        for budget in BUDGETS
        for name, algorithm in ALGORITHMS.items()
        if (layout, budget) in divisions
    ]
    torch.save((work, {"untied": work[0][1]}), directory / "work.pt")
    ranks = [layout.ranks for layout in dict.fromkeys(layout for layout, _ in work)]
    launch("helpers.workers.gradient_worker:run", ranks, str(directory))
    parts = [torch.load(file, weights_only=False) for file in directory.glob("results-*.pt")]
    return {key: value for part in parts for key, value in part.items()}


def test_the_first_of_equal_responses_is_not_the_first_of_a_pack() -> None:
    """Packs have the shortest first: a loss that takes the first best or worst one must not see that."""
    rows = make_rows()
    for reward in (0.0, 1.0):
        first, second = ((rows.group_n == 16) & (rows.reward_n == reward)).nonzero().flatten().tolist()
        assert rows.length_n[first] > rows.length_n[second]


@pytest.mark.parametrize(("layout", "budget"), DIVISIONS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradients_do_not_know_the_machine(outcomes, plain, name, layout, budget):
    loss, gradients = plain.gradients(AlgorithmConfig.model_validate(ALGORITHMS[name]))
    assert max(float(g.abs().max()) for g in gradients.values()) > 1e-4
    outcome = outcomes[str(layout), f"{name} {budget}"]
    assert outcome.metrics["loss"] == pytest.approx(loss, rel=TOLERANCE, abs=2e-6)
    for key, wanted in gradients.items():
        difference = (outcome.gradients[key] - wanted).abs().max() / wanted.abs().max()
        assert difference < TOLERANCE, key
    norm = torch.stack([wanted.norm() for wanted in gradients.values()]).norm().item()
    assert outcome.grad_norm == pytest.approx(norm, rel=TOLERANCE)

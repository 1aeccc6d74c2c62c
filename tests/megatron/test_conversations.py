"""The gradient of a conversation is that of its own tokens in the contexts in which they were sampled.

The reference is transformers in fp64 with plain autograd: every turn is scored in its own context, a forward
a turn, and the loss is called once with all rows. Megatron gets the same conversations in three forms: as
they were held, with every turn as a segment of its own, and with the prompt moved into what the environment
gave. The loss must not know the form, the packing or the layout (test_gradient_invariance.py says what would
break it), nor that a budget divides a conversation by segment.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases.gradient_cases import COMBINED, FAMILIES, FAMILY_LAYOUTS, OTHERS
from helpers.cases.gradient_rows import supports_of
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.suite.selected import selected
from helpers.workers.gradient_worker import TEMPERATURE, Case, Layout, Outcome
from hypothesis import given
from hypothesis import strategies as st
from test_methods_invariance import ALGORITHMS as SINGLE

from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.megatron.microbatch import RowSegments
from megatron_gvpo.turns import Turn, ends_of, segments
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch

TOLERANCE = 2e-5  # of the largest entry of a parameter's gradient
ONE_BY_ONE, SPLIT, ALL = 1, 40, 10_000  # budgets in tokens: the first two divide conversations by segment
POLICIES = ("old", "ref", "engine")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "gvpo": {"recipe": "gvpo", "loss": {"beta": 0.3}},
    "grpo with kl": {"recipe": "grpo", "loss": {"kl_coef": 0.5}},
    "gspo": {"recipe": "gspo", "loss": {"clip_low": 0.05, "clip_high": 0.05}},
    "dapo with entropy": {"recipe": "dapo", "shapers": [], "loss": {"entropy_coef": 0.1}},
    "gpg": {"recipe": "gpg", "estimator": {"age": "token"}},
    "disco": {"recipe": "disco", "loss": {"kl_limit": 0.0, "kl_coef": 10.0}},
    "rewards of turns": {"recipe": "reinforce_pp", "estimator": {"kl_coef": 0.3, "gamma": 0.9}},
    "mask of trajectories": {
        "recipe": "grpo",
        "loss": {"kl_coef": 0.0, "importance": {"name": "mask", "level": "sequence", "low": 0.3, "high": 3}},
    },
    "ratios of turns": {"recipe": "grpo", "loss": {"ratio": "turn", "clip_low": 0.05, "clip_high": 0.05}},
}
TRUNCATED = "gvpo of truncated samples"
ALGORITHMS[TRUNCATED] = ALGORITHMS["gvpo"]
OWN = tuple(ALGORITHMS)
# Other architectures have one method: their layouts change the model, not the loss.
ALGORITHMS |= {f"{family}, gvpo": ALGORITHMS["gvpo"] for family in FAMILIES}
# Methods that test_methods_invariance.py has for single responses; a comma would name another architecture.
# Ranked items have rewards of their own, which turns stand for here.
METHODS = {
    f"method {name.replace(',', ';')}": method for name, method in SINGLE.items() if name != "ppo of items"
}
ALGORITHMS |= METHODS
METHOD_LAYOUTS = (Layout(1), Layout(2), Layout(2, tp=2, sequence_parallel=True))
FORMS = ("held", "segment a turn", "prompt as given")
QUICK = [(Layout(1), SPLIT), (Layout(2, cp=2), ALL)]
MORE = [
    *((Layout(1), budget) for budget in (ONE_BY_ONE, ALL)),
    *((Layout(2), budget) for budget in (ONE_BY_ONE, SPLIT, ALL)),
    *((Layout(2, cp=2), budget) for budget in (ONE_BY_ONE, SPLIT)),
    *((Layout(2, tp=2, sequence_parallel=True), budget) for budget in (SPLIT, ALL)),
    *((Layout(2, pp=2, vpp=2), budget) for budget in (SPLIT, ALL)),
    *((Layout(4, cp=2, tp=2, sequence_parallel=True), budget) for budget in (SPLIT, ALL)),
]
# In `make test`; all of EVERY is a proof, in every layout of the gradients' matrix.
FEW = [
    (layout, budget, name)
    for layout, budget in QUICK
    for name in (
        "gvpo",
        "grpo with kl",
        "gspo",
        "rewards of turns",
        "ratios of turns",
        "mask of trajectories",
        TRUNCATED,
    )
]
FEW += [(Layout(2, ep=2), SPLIT, "qwen3_moe, gvpo")]
EVERY = [
    *FEW,
    *((layout, SPLIT, name) for layout in METHOD_LAYOUTS for name in METHODS),
    *((*division, name) for division in (*QUICK, *MORE) for name in OWN),
    *((layout, SPLIT, name) for layout in (*OTHERS, *COMBINED) for name in ("gvpo", "grpo with kl")),
    *((layout, SPLIT, f"{family}, gvpo") for family in FAMILIES for layout in FAMILY_LAYOUTS[family]),
]
RUNS = [
    pytest.param(
        *(layout, budget, name),
        id=f"{layout}, {budget}, {name}",
        marks=() if (layout, budget, name) in FEW else pytest.mark.proof,
    )
    for layout, budget, name in dict.fromkeys(EVERY)
]

Talk = tuple[list[int], list[int], list[Turn]]  # prompt, own tokens, turns


def conversation(seed: int, most_turns: int = 6) -> Talk:
    """A random conversation: turns follow each other, or branch from an earlier one, or drop a part of it."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(reference.VOCABULARY) for _ in range(count)]

    prompt, own, turns, ends = tokens(rng.randint(1, 6)), list[int](), list[Turn](), list[list[int]]()
    for k in range(rng.randint(1, most_turns)):
        after = -1 if k == 0 else rng.choice([k - 1] * 4 + list(range(-1, k)))
        context = prompt if after < 0 else ends[after]
        keep = None if rng.random() < 0.7 else rng.randint(1, len(context))
        environment, response = tokens(rng.randint(0, 5)), tokens(rng.randint(1, 5))
        turns.append(Turn(len(own), after, keep, tuple(environment)))
        ends.append([*context[:keep], *environment, *response])
        own += response
    return prompt, own, turns


def contexts(talk: Talk) -> list[tuple[list[int], list[int]]]:
    """(context, own tokens) of every turn, by the definition of a turn."""
    prompt, own, turns = talk
    ends, pairs = [], []
    for i, turn in enumerate(turns):
        before = prompt if turn.after < 0 else ends[turn.after]
        context = [*before[: turn.keep], *turn.given]
        response = own[turn.begin : turns[i + 1].begin if i + 1 < len(turns) else len(own)]
        ends.append(context + response)
        pairs.append((context, response))
    return pairs


def in_form(talk: Talk, form: str) -> Talk:
    prompt, own, turns = talk
    if form == "segment a turn":
        pairs = zip(turns, contexts(talk), strict=True)
        return prompt, own, [Turn(turn.begin, -1, 0, tuple(context)) for turn, (context, _) in pairs]
    if form == "prompt as given":
        moved = [
            turn if turn.after >= 0 else Turn(turn.begin, -1, None, (*prompt[1 : turn.keep], *turn.given))
            for turn in turns or [Turn(0)]
        ]
        return prompt[:1], own, moved
    return talk


def rows_of(talks: list[Talk]) -> TrainBatch:
    """Groups of three; every other group has two different prompts, as after a hint."""
    return TrainBatch(
        prompt_ids=[prompt for prompt, _, _ in talks],
        response_ids=[own for _, own, _ in talks],
        group_n=torch.arange(len(talks)) // 3,
        reward_n=torch.tensor([0.25 * (i * i % 5) for i in range(len(talks))]),
        truncated_n=torch.zeros(len(talks), dtype=torch.bool),
        turns=[turns for _, _, turns in talks],
    )


TALKS = [conversation(seed) for seed in range(9)]
# A response without turns among the conversations.
TALKS[4] = (TALKS[4][0], TALKS[4][1], [])


def model_of(name: str) -> str:
    """The reference model of a method in ALGORITHMS."""
    return name.split(", ")[0] if "," in name else "untied"


def with_turns(talk: Talk) -> Talk:
    return talk if talk[2] else (talk[0], talk[1], [Turn(0)])


class Plain:
    """transformers' log-probs of every turn in its own context; the rows as in a later mini-batch."""

    def __init__(self, directory: Path, name: str, truncated: bool) -> None:
        model = reference.load(directory / name)
        self.support = supports_of(rows_of(TALKS)) if truncated else None
        self.parameters = dict(model.named_parameters())
        logp, entropy = [], []
        for talk, support in zip(TALKS, self.support or [None] * len(TALKS), strict=True):
            begin = 0
            for context, response in contexts(with_turns(talk)):
                logits = model(input_ids=torch.tensor([context + response])).logits[0, len(context) - 1 : -1]
                of_all = torch.log_softmax(logits / TEMPERATURE, -1)
                if support is not None:
                    is_outside = reference.outside(support.parts([(begin, begin + len(response))]), of_all)
                    of_all = torch.log_softmax(of_all.masked_fill(is_outside, -torch.inf), -1)
                    begin += len(response)
                logp.append(of_all.gather(1, torch.tensor(response)[:, None])[:, 0])
                entropy.append(-(of_all.exp() * of_all.masked_fill(of_all.isneginf(), 0)).sum(-1))
        self.logp_r, self.entropy = torch.cat(logp), torch.cat(entropy).mean()
        generator = torch.Generator().manual_seed(1)
        base_r = self.logp_r.detach().float()
        self.old_r, self.ref_r = (
            base_r + scale * torch.randn(base_r.shape, generator=generator) for scale in (0.1, 0.3)
        )
        self.engine_r = base_r + 0.2 * torch.randn(base_r.shape, generator=generator)
        self.rows = {form: self._rows([in_form(talk, form) for talk in TALKS]) for form in FORMS}

    def _rows(self, talks: list[Talk]) -> TrainBatch:
        paid_r = torch.zeros_like(self.old_r)
        begin = 0
        for talk in map(with_turns, TALKS):
            for number, end in enumerate(ends_of(talk[2], len(talk[1]))):
                paid_r[begin + end - 1] = 0.3 * (number + 1)
            begin += len(talk[1])
        policies = {"old_logp_r": self.old_r, "ref_logp_r": self.ref_r, "engine_logp_r": self.engine_r}
        return rows_of(talks).with_columns(**policies, turn_reward_r=paid_r, support=self.support)

    def gradients(self, algorithm: AlgorithmConfig) -> tuple[float, dict[str, torch.Tensor]]:
        rows = self.rows["held"]
        if algorithm.estimator is not None:
            rows, _ = algorithm.estimator.fill(rows)
        double = {
            name: column.double()
            for name in (*("reward_n", "advantage_n", "advantage_r"), *(f"{p}_logp_r" for p in POLICIES))
            if (column := getattr(rows, name)) is not None
        }
        share, _ = algorithm.loss(LossInputs(rows.with_columns(**double), self.logp_r, BatchTotals.of(rows)))
        loss = share - algorithm.loss.entropy_coef * self.entropy
        by_autograd = torch.autograd.grad(
            loss, list(self.parameters.values()), retain_graph=True, allow_unused=True
        )
        gradients = {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for (name, parameter), gradient in zip(self.parameters.items(), by_autograd, strict=True)
        }
        return loss.item(), reference.as_in_file(gradients)


def environment_tokens_in_the_sums(rows: TrainBatch) -> TrainBatch:
    """The mistake of a missing mask: what the environment said is trained as if the policy had said it."""
    responses, own_indices = [], list[int]()
    next_own = count()
    for talk in map(with_turns, TALKS):
        ids: list[int] = []
        for turn, (_, response) in zip(talk[2], contexts(talk), strict=True):
            ids += [*turn.given, *response]
            own_indices += [-1] * len(turn.given) + [next(next_own) for _ in response]
        responses.append(ids)
    old, ref = (
        [0.0 if p < 0 else float(c[p]) for p in own_indices] for c in (rows.old_logp_r, rows.ref_logp_r)
    )
    return TrainBatch(
        *(rows.prompt_ids, responses, rows.group_n, rows.reward_n, rows.truncated_n),
        old_logp_r=torch.tensor(old),
        ref_logp_r=torch.tensor(ref),
    )


Plains = Callable[..., Plain]


@pytest.fixture(scope="module")
def plains(directory: Path) -> Plains:
    """The reference by its model's name, and whether its samples are truncated."""
    return cache(lambda name, truncated=False: Plain(directory, name, truncated))


@pytest.fixture(scope="module")
def plain(plains: Plains) -> Plain:
    return plains("untied")


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, directory: Path, plains: Plains
) -> dict[tuple[str, str], Outcome]:
    """{(layout, "method, budget, form"): Outcome} of the selected tests."""
    wanted = {*selected(request, "layout", "budget", "name"), (Layout(1), ALL, "gvpo")}
    work = [
        (layout, Case(f"{name}, {budget}, {form}", ALGORITHMS[name], rows, budget, model=model_of(name)))
        for layout, budget, name in sorted(wanted, key=lambda run: (run[0].ranks, str(run[0]), *run[1:]))
        for form, rows in plains(model_of(name), name == TRUNCATED).rows.items()
    ]
    wrong = environment_tokens_in_the_sums(plains("untied").rows["held"])
    work.append((Layout(1), Case("wrong", ALGORITHMS["gvpo"], wrong, ALL)))
    probes = {
        model: Case("probe", ALGORITHMS["gvpo"], plains(model).rows["held"], ALL, model=model)
        for model in {case.model for _, case in work}
    }
    torch.save((work, probes), directory / "work.pt")
    ranks = [layout.ranks for layout in dict.fromkeys(layout for layout, _ in work)]
    launch("helpers.workers.gradient_worker:run", ranks, str(directory), timeout=1800)
    parts = [torch.load(file, weights_only=False) for file in directory.glob("results-*.pt")]
    return {key: value for part in parts for key, value in part.items()}


@pytest.mark.parametrize(("layout", "budget", "name"), RUNS)
def test_loss_and_gradients_are_those_of_every_turn_in_its_own_context(
    outcomes: dict[tuple[str, str], Outcome], plains: Plains, layout: Layout, budget: int, name: str
) -> None:
    plain = plains(model_of(name), name == TRUNCATED)
    loss, gradients = plain.gradients(AlgorithmConfig.model_validate(ALGORITHMS[name]))
    largest = max(float(g.abs().max()) for g in gradients.values())
    assert largest > 1e-4
    norm = torch.stack([wanted.norm() for wanted in gradients.values()]).norm().item()
    for form in FORMS:
        outcome = outcomes[str(layout), f"{name}, {budget}, {form}"]
        assert outcome.metrics["loss"] == pytest.approx(loss, rel=TOLERANCE, abs=2e-6), form
        assert outcome.gradients.keys() == gradients.keys()
        nothing = 1e-8 * largest  # to an expert may come no token
        for key, wanted in gradients.items():
            difference = (outcome.gradients[key] - wanted).abs().max()
            assert difference <= TOLERANCE * wanted.abs().max() + nothing, (form, key)
        assert outcome.grad_norm == pytest.approx(norm, rel=TOLERANCE), (form, "the norm that clips")


def test_environment_tokens_in_the_sums_would_be_seen(
    outcomes: dict[tuple[str, str], Outcome], plain: Plain
) -> None:
    [wrong] = [outcome for (_, name), outcome in outcomes.items() if name == "wrong"]
    _, gradients = plain.gradients(AlgorithmConfig.model_validate(ALGORITHMS["gvpo"]))
    for key, wanted in gradients.items():
        difference = (wrong.gradients[key] - wanted).abs().max() / wanted.abs().max()
        assert difference > 1000 * TOLERANCE, key


def test_the_small_budgets_divide_conversations_by_segment(plain: Plain) -> None:
    for form in ("held", "segment a turn"):
        for budget in (ONE_BY_ONE, SPLIT):
            parts = RowSegments.divide(plain.rows[form], budget)
            assert parts is not None and len(parts.row_n) > len(TALKS)
            assert sorted(parts.token_r.tolist()) == list(range(len(plain.logp_r))), "every token once"
        assert RowSegments.divide(plain.rows[form], ALL) is None
    assert len({len(segments(*talk)) for talk in TALKS}) > 1


@given(st.integers(0, 10**6))
def test_every_own_token_is_predicted_from_exactly_its_context(seed: int) -> None:
    talk = conversation(seed)
    pack = PackedBatch.pack(rows_of([talk]))
    begins = [i for i, position in enumerate(pack.position_t.tolist()) if position == 0]
    before = [
        pack.token_t[max(b for b in begins if b <= index) : index + 1].tolist()
        for index in pack.response_r.tolist()
    ]
    wanted = [context + response[:j] for context, response in contexts(talk) for j in range(len(response))]
    assert before == wanted
    assert pack.label_r.tolist() == talk[1]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([Turn(1)], "the first turn begins with own token 1: want 0"),
        ([Turn(0), Turn(3), Turn(2, 1)], "turn 1 has the own tokens 3 to 2"),
        ([Turn(0), Turn(2, 1)], "continues turn 1"),
        ([Turn(0, -1, 3)], "turn 0 keeps 3 of 2 tokens"),
        ([Turn(0, -1, 0)], "turn 0 begins without any token before it"),
    ],
)
def test_turns_that_no_conversation_has_are_refused(turns: list[Turn], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segments([1, 2], [3, 4, 5, 6], turns)

"""A teacher that the trainer holds: loss, gradients and norm against two plain transformers models in fp64.

The teacher has another family, width, depth and vocabulary than the policy. The reference has all logits of
both, by torch.nn.functional and plain autograd, sequence by sequence.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.references.divergence_reference import on_logits
from helpers.suite.selected import selected
from helpers.workers.gradient_worker import TEMPERATURE, Case, Layout, Outcome
from test_methods_invariance import make_rows

from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.kernels.divergence import Divergence
from megatron_gvpo.types import BatchTotals, LossInputs, TrainBatch
from megatron_gvpo.verify.shrink import scatter

TOLERANCE = 2e-5  # of the largest entry of a parameter's gradient
_SP = {"tp": 2, "sequence_parallel": True}
QUICK = [Layout(1)]
LAYOUTS = [
    *QUICK,
    Layout(2, **_SP),
    Layout(2),
    Layout(2, tp=2),
    Layout(2, pp=2),
    Layout(2, cp=2),
    Layout(4, **_SP, pp=2),
    Layout(4, pp=2, vpp=2, overlap=True),
    Layout(4, cp=2, **_SP),
]


def full(**options: Any) -> dict[str, Any]:
    return {"recipe": "opd_full", "loss": {"divergence": options}}


def beside(recipe: str, **options: Any) -> dict[str, Any]:
    return {"recipe": recipe, "loss": {"divergence": {"coef": 0.3, **options}}}


REVERSE = full(name="reverse")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "reverse": REVERSE,
    "forward": full(name="forward", coef=2.0),
    "js": full(name="js", beta=0.3),
    "top 5": full(name="reverse", top_k=5),
    "weights known first": beside("gpg", name="forward"),
    "groups of several": beside("gvpo", name="js"),
    "clipped": beside("grpo", name="reverse"),
    "with entropy": {"recipe": "opd_full", "loss": {"entropy_coef": 0.1}},
    "on data": {"recipe": "opd_full", "sampler": "dataset"},
}
SELF = "the policy itself"
EXPERTS = "a mixture of experts learns"
EXPERT_LAYOUTS = [*QUICK, Layout(2, **_SP), Layout(2, pp=2)]
BUDGET = 24  # tokens: groups are divided between micro-batches


def text_rows(rows: TrainBatch) -> TrainBatch:
    """The rows as a teacher with another tokenizer would read them: other ids, numbers and lengths of tokens.

    One response is longer than a micro-batch, one is the end token alone, and prompts differ in a group, as
    where a token lies over the joint.
    """
    lengths = [1, BUDGET + 5, *(2 + 3 * i % 7 for i in range(len(rows) - 2))]
    ids = [[(7 * i + 3 * j) % 139 + 1 for j in range(n)] for i, n in enumerate(lengths)]
    prompts = [[*reversed(prompt), 138, i % 3 + 130] for i, prompt in enumerate(rows.prompt_ids)]
    return TrainBatch(prompts, ids, rows.group_n, rows.reward_n, rows.truncated_n)


class Plain:
    """The rows, and both models' logits of them by transformers in `dtype`."""

    def __init__(
        self, directory: Path, student_name: str = "untied", dtype: torch.dtype = torch.float64
    ) -> None:
        self.rows = make_rows()
        student, teacher = (reference.load(directory / n).to(dtype) for n in (student_name, "teacher"))
        self.parameters = dict(student.named_parameters())
        by_model: list[list[torch.Tensor]] = []
        for model in (student, teacher):
            logits = []
            for prompt, response in zip(self.rows.prompt_ids, self.rows.response_ids, strict=True):
                ids = torch.tensor([[*prompt, *response]])
                logits.append(model(input_ids=ids).logits[0, len(prompt) - 1 : -1])
            by_model.append(logits)
        self.z, self.y = (torch.cat(logits).double() for logits in by_model)
        labels = torch.tensor([t for response in self.rows.response_ids for t in response])
        self.labels = labels[:, None]
        generator = torch.Generator().manual_seed(1)
        base_r = (self.z / TEMPERATURE).log_softmax(-1).gather(1, self.labels)[:, 0].detach().float()
        old_r, ref_r = (base_r + s * torch.randn(base_r.shape, generator=generator) for s in (0.2, 0.5))
        self.rows = self.rows.with_columns(old_logp_r=old_r, ref_logp_r=ref_r)

    def gradients(self, algorithm: AlgorithmConfig) -> tuple[float, float, dict[str, torch.Tensor]]:
        temperature = TEMPERATURE if algorithm.samples_from_policy else 1.0
        z, y = self.z / temperature, self.y.detach()[:, : reference.VOCABULARY] / temperature
        logp = z.log_softmax(-1)
        rows = self.rows
        if algorithm.estimator is not None:
            rows, _ = algorithm.estimator.fill(rows)
        names = ("reward_n", "advantage_n", "old_logp_r", "ref_logp_r")
        double = {n: column.double() for n in names if (column := getattr(rows, n)) is not None}
        rows = rows.with_columns(**double)
        logp_r = logp.gather(1, self.labels)[:, 0]
        share, _ = algorithm.loss(LossInputs(rows, logp_r, BatchTotals.of(rows)))
        options = algorithm.loss.divergence
        assert options is not None
        divergence = on_logits(Divergence(options.name, options.beta or 0.5, options.top_k), z, y).mean()
        entropy = -(logp.exp() * logp).sum(-1).mean()
        loss = share + options.coef * divergence - algorithm.loss.entropy_coef * entropy
        gradients = torch.autograd.grad(loss, list(self.parameters.values()), retain_graph=True)
        return loss.item(), divergence.item(), dict(zip(self.parameters, gradients, strict=True))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("teachers")
    save_models(path)
    return path


def save_models(path: Path) -> None:
    reference.save_models(path, ("untied", "tied", "qwen3_moe"))
    torch.manual_seed(1)
    teacher = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(
            **{**reference.COMMON, "vocab_size": 140, "hidden_size": 48, "num_hidden_layers": 8}, head_dim=12
        )
    )
    scatter(teacher)
    teacher.save_pretrained(path / "teacher")


@pytest.fixture(scope="module")
def plain(directory: Path) -> Plain:
    return Plain(directory)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, directory: Path, plain: Plain) -> dict[tuple[str, str], Outcome]:
    """{(layout, algorithm): Outcome} in the layouts of the selected tests."""
    layouts = selected(request, "layout")
    cases = [Case(name, a, plain.rows, BUDGET, teacher="teacher") for name, a in ALGORITHMS.items()]
    own = beside("gvpo", name="js", reference="fixed")  # equal rewards have no gradient at a step's start
    ones_n = torch.ones_like(plain.rows.reward_n)
    equal = plain.rows.with_columns(reward_n=ones_n, old_logp_r=None, ref_logp_r=None)
    cases += [Case(SELF, own, equal, BUDGET, at_step_start=True, model="tied")]
    work = [(layout, case) for layout in LAYOUTS if layout in layouts for case in cases]
    experts = Case(EXPERTS, REVERSE, plain.rows, BUDGET, model="qwen3_moe", teacher="teacher")
    work += [(layout, experts) for layout in EXPERT_LAYOUTS if layout in layouts]
    cases[0] = replace(cases[0], text=text_rows(plain.rows))
    probes = {"untied": cases[0], "tied": cases[-1], "qwen3_moe": experts}
    torch.save((work, probes), directory / "work.pt")
    ranks = [layout.ranks for layout in dict.fromkeys(layout for layout, _ in work)]
    launch("helpers.workers.gradient_worker:run", ranks, str(directory))
    parts = [torch.load(file, weights_only=False) for file in directory.glob("results-*.pt")]
    return {key: value for part in parts for key, value in part.items()}


def in_layouts(layouts: list[Layout]) -> pytest.MarkDecorator:
    marks = {layout: () if layout in QUICK else pytest.mark.proof for layout in layouts}
    return pytest.mark.parametrize("layout", [pytest.param(x, marks=marks[x], id=str(x)) for x in layouts])


each_layout = in_layouts(LAYOUTS)


@each_layout
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_gradients_and_norm_equal_transformers(outcomes, plain, name, layout):
    algorithm = AlgorithmConfig.model_validate(ALGORITHMS[name])
    assert_equal(outcomes[str(layout), name], *plain.gradients(algorithm))


@in_layouts(EXPERT_LAYOUTS)
def test_a_mixture_of_experts_learns_from_a_dense_teacher(outcomes, directory, layout):
    plain = Plain(directory, "qwen3_moe")
    assert_equal(outcomes[str(layout), EXPERTS], *plain.gradients(AlgorithmConfig.model_validate(REVERSE)))


def assert_equal(
    outcome: Outcome, loss: float, divergence: float, gradients: dict[str, torch.Tensor]
) -> None:
    assert outcome.metrics["loss"] == pytest.approx(loss, rel=TOLERANCE, abs=2e-6)
    assert outcome.metrics["divergence"] == pytest.approx(divergence, rel=TOLERANCE)
    assert divergence > 0.1
    for key, wanted in reference.as_in_file(gradients).items():
        difference = (outcome.gradients[key] - wanted).abs().max() / wanted.abs().max()
        assert difference < TOLERANCE, key
    norm = torch.stack([wanted.norm() for wanted in gradients.values()]).norm().item()
    assert outcome.grad_norm == pytest.approx(norm, rel=TOLERANCE)


@each_layout
def test_the_teachers_log_probs_equal_transformers(outcomes, plain, layout):
    expected_r = (plain.y / TEMPERATURE).log_softmax(-1).gather(1, plain.labels)[:, 0]
    torch.testing.assert_close(
        outcomes[str(layout), "teacher"], expected_r, rtol=0, atol=1e-5, check_dtype=False
    )


@each_layout
def test_the_teachers_sums_of_its_own_tokens_equal_transformers(outcomes, plain, directory, layout):
    """A response's text in the tokens of another tokenizer, in fp64 by transformers."""
    teacher, rows = reference.load(directory / "teacher"), text_rows(plain.rows)
    sums = []
    for prompt, response in zip(rows.prompt_ids, rows.response_ids, strict=True):
        with torch.no_grad():
            logits = teacher(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        logp = (logits.double() / TEMPERATURE).log_softmax(-1)
        sums.append(logp.gather(1, torch.tensor(response)[:, None]).sum())
    own_n = rows.sequence_sum(outcomes[str(layout), "text"].double())
    torch.testing.assert_close(own_n, torch.stack(sums), rtol=1e-6, atol=1e-5)


@each_layout
def test_a_teacher_with_the_policys_weights_teaches_nothing(outcomes, layout):
    outcome = outcomes[str(layout), SELF]
    assert abs(outcome.metrics["divergence"]) < 1e-6
    assert outcome.grad_norm < 1e-5

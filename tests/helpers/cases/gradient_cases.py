"""Cases of test_gradient_invariance.py: optimizer steps, layouts, the steps of each layout, and the
reference.

A step has an algorithm of the package, the paper's formula for its loss (gradient_reference.py), and rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.cases.gradient_rows import ROWS, by_another_engine, make_rows, moved, routing_of, supports_of
from helpers.references import gradient_reference as reference
from helpers.references.gradient_reference import Correction, ReferenceLoss
from helpers.workers.gradient_worker import TEMPERATURE, UPDATE, Layout, Outcome, Probe
from megatron_gvpo.types import TrainBatch
from megatron_gvpo.verify.measures import gradient_difference, limit

TOLERANCE = 1e-5  # of the largest entry of a parameter's gradient
# Methods differ in normalisers and in splits over micro-batches and ranks, so all steps run on one rank and
# on two data-parallel ones. The other layouts change only the model, and run the CORE.
THOROUGH = [Layout(1), Layout(2)]
OTHERS = [
    Layout(1, recompute="full"),
    Layout(2, pp=2, recompute="full", recompute_layers=1),
    Layout(2, overlap=True),
    Layout(2, tp=2),
    Layout(2, tp=2, sequence_parallel=True),
    Layout(2, pp=2),
    Layout(2, pp=2, stage_layers=(3, 1)),
    Layout(2, pp=2, vpp=2),
    Layout(2, cp=2),
    Layout(4),
    Layout(4, tp=2),
    Layout(4, tp=2, pp=2),
    Layout(4, pp=2),
    Layout(4, pp=4),
]
COMBINED = [
    Layout(4, pp=2, vpp=2, overlap=True),
    Layout(4, tp=2, sequence_parallel=True, pp=2, vpp=2),
    Layout(4, cp=4),
    Layout(4, cp=2, overlap=True),
    Layout(4, cp=2, tp=2, sequence_parallel=True),
    Layout(4, cp=2, pp=2, vpp=2),
    Layout(2, overlap=True, offload=1.0),
    Layout(4, tp=2, offload=0.5),
]
_SP = {"tp": 2, "sequence_parallel": True}
# Every family runs on one rank and in the layouts that cut its own parts; experts in all layouts they allow.
_PARTS = {"recompute": "selective", "recompute_modules": ("core_attn", "mlp")}
_OF_EXPERTS = {"recompute": "selective", "recompute_modules": ("core_attn", "moe")}
_OF_MLA = {"recompute": "selective", "recompute_modules": ("shared_experts",)}
DENSE = [Layout(1), Layout(2, **_SP), Layout(2, **_SP, **_PARTS), Layout(2, cp=2), Layout(4, tp=2, pp=2)]
EXPERTS = [
    Layout(1),
    Layout(2),
    Layout(2, ep=2),
    Layout(2, pp=2),
    Layout(2, cp=2),
    Layout(2, **_SP),
    Layout(2, **_SP, etp=2),
    Layout(2, **_SP, ep=2),
    Layout(4, ep=4),
    Layout(4, ep=2, overlap=True),
    Layout(4, pp=2, vpp=2, ep=2),
    Layout(4, cp=2, ep=2),
    Layout(4, **_SP, ep=2, etp=2),
    Layout(2, ep=2, **_OF_EXPERTS),
    Layout(2, ep=2, offload=0.5),
]
MLA = [
    Layout(1),
    Layout(1, **_OF_MLA),
    Layout(2, **_SP),
    Layout(2, ep=2),
    Layout(2, cp=2),
    Layout(4, **_SP, pp=2, ep=2),
]
# In these layouts a replayed router runs twice, with other micro-batches in between.
COMPUTED_AGAIN = [Layout(2, pp=2, **_OF_EXPERTS), Layout(2, pp=2, recompute="full")]
FAMILY_LAYOUTS = {
    "qwen3": DENSE,
    "llama3": DENSE,
    "mistral": DENSE,
    "qwen3_moe": EXPERTS,
    "deepseek_v2": [Layout(1), Layout(2, **_SP, ep=2)],
    "deepseek_v3": MLA,
}
HIDDEN = 32  # of the reference's models
Params = dict[str, torch.nn.Parameter]
# budgets in tokens, named by their effect on the ragged rows
ONE_BY_ONE, SPLIT, WHOLE, ALL = 1, 24, 40, 10_000


@dataclass(frozen=True)
class Step:
    """An optimizer update by the package's `algorithm` and by the paper's `loss`.

    With `at_step_start` it is a step's first mini-batch: old policy and reference are the present policy,
    their columns are empty, and most methods know their weights before the forward. Otherwise the policy has
    moved. With `engine_gap` the reference's log-probs are the engine's, lower by the gap in every token; at
    step start they then come from older weights.
    """

    algorithm: dict[str, Any]
    loss: ReferenceLoss
    budget: int
    at_step_start: bool = False
    rows: str = "ragged"
    model: str = "untied"
    engine_gap: float | None = None
    replayed: bool = False
    truncated: bool = False


def gvpo(
    budget: int, at_step_start: bool = False, model: str = "untied", gap: float | None = None, **loss: Any
) -> Step:
    terms, form = loss.get("terms", ("var", "cov")), loss.get("form")
    paper = reference.gvpo(0.3, "var" in terms, "cov" in terms, surrogate=form == "nll")
    algorithm = {"recipe": "gvpo", "loss": {"beta": 0.3, **loss}}
    return Step(algorithm, paper, budget, at_step_start, model=model, engine_gap=gap)


def gvpo_plus_plus(budget: int, alpha: float = 0.0, power: float = 0.0, **loss: Any) -> Step:
    """`power`: the exponent of a user's own weights, which replace the lengths' weights."""
    loss |= {"reference": "fixed"} if "cov" in loss.get("terms", ("cov",)) else {}
    if power:
        own = "helpers.inputs.response_weights:by_reward"
        loss |= {"function": own, "options": {"power": power}}
    else:
        loss |= {"alpha": alpha}
    terms = loss.get("terms", ("var", "cov"))
    paper = reference.gvpo_plus_plus(alpha, power, "var" in terms, "cov" in terms)
    return Step({"recipe": "gvpo_plus_plus", "loss": loss}, paper, budget)


def gpg(
    budget: int,
    age: str,
    rows: str = "ragged",
    at_step_start: bool = False,
    by: Correction | None = None,
) -> Step:
    algorithm = {"recipe": "gpg", "estimator": {"age": age}, "loss": reference.option(by)}
    return Step(algorithm, reference.gpg(age, by), budget, at_step_start, rows)


def grpo(
    budget: int,
    kl_coef: float,
    at_step_start: bool = False,
    rows: str = "ragged",
    by: Correction | None = None,
) -> Step:
    algorithm = {"recipe": "grpo", "loss": {"kl_coef": kl_coef, **reference.option(by)}}
    return Step(algorithm, reference.grpo(0.2, kl_coef, by), budget, at_step_start, rows)


def sft(budget: int, model: str = "untied") -> Step:
    return Step({"recipe": "sft"}, reference.sft(), budget, model=model)


STEPS = {
    "gvpo, one by one": gvpo(ONE_BY_ONE),
    "gvpo, groups split": gvpo(SPLIT),
    "gvpo, groups whole": gvpo(WHOLE),
    "gvpo, all in one": gvpo(ALL),
    "gvpo, step start, groups split": gvpo(SPLIT, True),
    "gvpo, step start, groups whole": gvpo(WHOLE, True),
    "gvpo, without var, groups split": gvpo(SPLIT, terms=("cov",)),
    "gvpo, without var, groups whole": gvpo(WHOLE, terms=("cov",)),
    "gvpo, without cov, groups split": gvpo(SPLIT, terms=("var",)),
    "gvpo, without cov, groups whole": gvpo(WHOLE, terms=("var",)),
    "gvpo, without both, groups split": gvpo(SPLIT, terms=()),
    "gvpo, without both, groups whole": gvpo(WHOLE, terms=()),
    "gvpo, as variance, groups split": gvpo(SPLIT, form="variance"),
    "gvpo, as variance, groups whole": gvpo(WHOLE, form="variance"),
    "gvpo, as nll, groups split": gvpo(SPLIT, form="nll"),
    "gvpo, as nll, step start, groups split": gvpo(SPLIT, True, form="nll"),
    "gvpo, as nll, step start, groups whole": gvpo(WHOLE, True, form="nll"),
    "gvpo, engine's reference, groups split": gvpo(SPLIT, gap=0.05),
    "gvpo, engine's reference, groups whole": gvpo(WHOLE, gap=0.05),
    "gvpo, engine's reference, step start, groups split": gvpo(SPLIT, True, gap=0.05),
    "gvpo, engine's reference, step start, groups whole": gvpo(WHOLE, True, gap=0.05),
    "gvpo, engine's reference, without var": gvpo(WHOLE, gap=0.05, terms=("cov",)),
    "gvpo_plus_plus, by length, groups split": gvpo_plus_plus(SPLIT, 0.5),
    "gvpo_plus_plus, groups whole": gvpo_plus_plus(WHOLE),
    "gvpo_plus_plus, own weights, groups split": gvpo_plus_plus(SPLIT, power=1.5),
    "gvpo_plus_plus, without var, groups split": gvpo_plus_plus(SPLIT, 0.5, terms=("cov",)),
    "gvpo_plus_plus, without cov, groups split": gvpo_plus_plus(SPLIT, 0.5, terms=("var",)),
    "gpg, age by sample, one by one": gpg(ONE_BY_ONE, "sample"),
    "gpg, age by token": gpg(SPLIT, "token"),
    "gpg, age by sample, ranks without signal": gpg(ALL, "sample", "long without signal"),
    "gpg, age by token, ranks without signal, accumulated": gpg(SPLIT, "token", "long without signal"),
    "gpg with importance": gpg(SPLIT, "token", by=reference.token_truncate),
    "gpg with importance, step start": gpg(SPLIT, "sample", at_step_start=True, by=reference.token_truncate),
    "gpg with a token mask": gpg(SPLIT, "token", by=reference.token_mask),
    "gpg with sequence importance, one by one": gpg(ONE_BY_ONE, "sample", by=reference.sequence_truncate),
    "grpo with importance": grpo(SPLIT, 0.5, by=reference.token_truncate),
    "grpo with importance, step start": grpo(WHOLE, 0.0, True, by=reference.token_truncate),
    "grpo with geometric importance": grpo(SPLIT, 0.5, by=reference.geometric_truncate),
    "grpo with a sequence mask": grpo(SPLIT, 0.5, by=reference.sequence_mask),
    "grpo with a sequence mask, step start": grpo(WHOLE, 0.0, True, by=reference.sequence_mask),
    "grpo with kl, one by one": grpo(ONE_BY_ONE, 0.5),
    "grpo with kl": grpo(SPLIT, 0.5),
    "grpo without kl, step start": grpo(WHOLE, 0.0, True),
    "grpo with kl, fewer rows than ranks": grpo(SPLIT, 0.5, rows="fewer than ranks"),
    "grpo with kl, log-normal lengths": grpo(SPLIT, 0.5, rows="log-normal"),
    "gvpo, log-normal lengths": replace(gvpo(SPLIT), rows="log-normal"),
    "sft": sft(SPLIT),
    "sft, all in one": sft(ALL),
    "gvpo, truncated": replace(gvpo(SPLIT), truncated=True),
    "gvpo, truncated, step start": replace(gvpo(WHOLE, True), truncated=True),
    "grpo with kl, truncated": replace(grpo(SPLIT, 0.5), truncated=True),
    "tied, gvpo, groups split": gvpo(SPLIT, model="tied"),
    "tied, gvpo, groups whole": gvpo(WHOLE, model="tied"),
    "tied, sft": sft(SPLIT, model="tied"),
}
FAMILIES = [name for name in reference.CONFIGS if name not in ("untied", "tied")]
for family in FAMILIES:
    of_family = {
        "gvpo, groups split": gvpo(SPLIT),
        "gvpo, step start, groups whole": gvpo(WHOLE, True),
        "gpg, accumulated": gpg(SPLIT, "token", "long without signal"),
        "grpo, fewer rows than ranks": grpo(SPLIT, 0.5, rows="fewer than ranks"),
    }
    if family in ("qwen3_moe", "deepseek_v3"):
        of_family["gvpo, replayed"] = replace(gvpo(SPLIT), replayed=True)
    STEPS |= {f"{family}, {name}": replace(step, model=family) for name, step in of_family.items()}
CORE = [
    "gvpo, groups split",
    "gvpo, groups whole",
    "gvpo, step start, groups whole",
    "gvpo, engine's reference, groups split",
    "gvpo, engine's reference, groups whole",
    "gvpo_plus_plus, by length, groups split",
    "gvpo_plus_plus, own weights, groups split",
    "gvpo_plus_plus, without var, groups split",
    "gvpo_plus_plus, without cov, groups split",
    "gpg, age by sample, ranks without signal",
    "gpg, age by token, ranks without signal, accumulated",
    "grpo with kl",
    "grpo with kl, fewer rows than ranks",
    "grpo with importance, step start",
    "grpo with a sequence mask",
    "sft",
    "gvpo, truncated",
    "gvpo, truncated, step start",
    "tied, gvpo, groups split",
]
PART = ["gvpo, groups split", "gvpo, step start, groups whole", "grpo with kl, fewer rows than ranks"]
PART += ["gpg, age by token, ranks without signal, accumulated", "tied, gvpo, groups split"]
PART += ["gvpo, truncated"]
QWEN2 = [name for name, step in STEPS.items() if step.model not in FAMILIES]
RUNS = [(layout, name) for layout in THOROUGH for name in QWEN2]
RUNS += [(layout, name) for layout in OTHERS for name in CORE]
RUNS += [(layout, name) for layout in COMBINED for name in PART]
RUNS += [
    (layout, name)
    for model, layouts in FAMILY_LAYOUTS.items()
    for layout in layouts
    for name, step in STEPS.items()
    if step.model == model
]
RUNS += [(layout, "qwen3_moe, gvpo, replayed") for layout in COMPUTED_AGAIN]
LOG_NORMAL = ["gvpo, log-normal lengths", "grpo with kl, log-normal lengths"]  # in addition to THOROUGH
RUNS += [
    (layout, name)
    for layout in (Layout(4), Layout(2, cp=2), Layout(2, pp=2), Layout(4, pp=2, vpp=2, overlap=True))
    for name in LOG_NORMAL
]
# Every layout runs once more with overlap, and with the reduced sizes of small_constants.py.
SMALL_STEPS = {
    *LOG_NORMAL,
    "gvpo, groups split",
    "tied, gvpo, groups split",
    "grpo with kl",
    "qwen3_moe, gvpo, replayed",
}
SMALL_STEPS |= {f"{family}, gvpo, groups split" for family in FAMILIES}
SMALL_STEPS |= {f"{family}, grpo, fewer rows than ranks" for family in FAMILIES}


def small(layout: Layout) -> Layout:
    return replace(layout, overlap=True, small=True)


RUNS += list(dict.fromkeys((small(layout), name) for layout, name in RUNS if name in SMALL_STEPS))
MODELS = {"untied": "gvpo, groups split"}  # the step that updates each model
MODELS |= {model: f"{model}, gvpo, groups split" for model in ("tied", *FAMILIES)}
PROBES = list(dict.fromkeys((layout, STEPS[name].model) for layout, name in RUNS))
# `make test` runs every method on one and two ranks, and every family and every kind of division (tp, sp, pp,
# vpp, cp, ep, etp, dp, uneven stages, overlap, recomputation, offload) in few layouts and steps, and small
# constants in few layouts; `make proof` runs all of RUNS.
FEW = ["gvpo, groups split", "gvpo, truncated", "gpg, age by token, ranks without signal, accumulated"]
FEW_LAYOUTS = {
    "untied": [
        Layout(2, pp=2, recompute="full", recompute_layers=1),
        Layout(2, pp=2, stage_layers=(3, 1)),
        Layout(2, overlap=True, offload=1.0),
        Layout(4, **_SP, pp=2, vpp=2),
        Layout(4, cp=2, **_SP),
    ],
    "tied": [Layout(2, pp=2)],
    "qwen3": [Layout(2, **_SP, **_PARTS)],
    "llama3": [Layout(2, **_SP)],
    "mistral": [Layout(2, cp=2)],
    "qwen3_moe": [
        Layout(4, **_SP, ep=2, etp=2),
        Layout(2, ep=2, **_OF_EXPERTS),
    ],
    "deepseek_v2": [Layout(2, **_SP, ep=2)],
    "deepseek_v3": [Layout(1, **_OF_MLA)],
}
FEW_SMALL = {
    "untied": [Layout(2), Layout(4, pp=2, vpp=2)],
    "tied": [Layout(4, pp=2)],
    "deepseek_v3": [Layout(4, **_SP, pp=2, ep=2)],
}


def in_make_test(layout: Layout, name: str) -> bool:
    model = STEPS[name].model
    if layout.small:
        return layout in map(small, FEW_SMALL.get(model, [])) and not name.endswith(", replayed")
    if name.endswith(", replayed"):
        return model == "qwen3_moe" and layout in (Layout(1), Layout(2, pp=2, recompute="full"))
    if model not in FAMILIES and layout in THOROUGH:
        return name in CORE or name in LOG_NORMAL
    few = [*FEW_LAYOUTS.get(model, []), *([Layout(1)] if model in FAMILIES else [])]
    return layout in few and name in (*FEW, MODELS[model])


QUICK = [run for run in RUNS if in_make_test(*run)]


@cache
def sampled(
    directory: Path,
    model: str,
    temperature: float,
    rows: str,
    replayed: bool = False,
    truncated: bool = False,
) -> tuple[TrainBatch, list[Tensor], Params]:
    """Return the rows, the reference's log-probs of them (a reused autograd graph), and its parameters."""
    policy, made = reference.load(directory / model), make_rows(ROWS[rows])
    if replayed:
        made = replace(made, routing=routing_of(made, reference.CONFIGS[model]()))
    if truncated:
        made = replace(made, support=supports_of(made))
    return made, reference.log_probs(policy, made, temperature), dict(policy.named_parameters())


def sampled_for(step: Step, directory: Path) -> tuple[TrainBatch, list[Tensor], Params]:
    rows, logp, parameters = sampled(directory, *_model_and_rows(step))
    rows = by_another_engine(rows, logp)
    present = step.at_step_start and step.engine_gap is None
    return (rows if present else moved(rows, logp)), logp, parameters


def _model_and_rows(step: Step) -> tuple[str, float, str, bool, bool]:
    """The arguments of `sampled` except the directory."""
    temperature = 1.0 if step.algorithm["recipe"] == "sft" else TEMPERATURE
    return step.model, temperature, step.rows, step.replayed, step.truncated


@cache
def expected(name: str, directory: Path) -> tuple[float, dict[str, Tensor]]:
    """The reference's loss and gradients."""
    rows, logp, parameters = sampled_for(STEPS[name], directory)
    loss = STEPS[name].loss(reference.sample_of(rows, logp))
    return loss.item(), _gradients(loss, parameters)


def _gradients(loss: Tensor, parameters: Params) -> dict[str, Tensor]:
    values = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), values, strict=True)
    }


@cache
def gradient_limit(name: str, directory: Path) -> float:
    """The largest difference of a step's gradient that rounding on this machine explains.

    The limit is that of `megatron-gvpo verify`: TOLERANCE, or four times the error of transformers in fp32.
    """
    step = STEPS[name]
    rows, *_ = sampled_for(step, directory)
    logp, parameters = _in_float32(directory, *_model_and_rows(step))
    loss = step.loss(reference.sample_of(rows, [of_row.double() for of_row in logp]))
    in_float32 = {key: gradient.double() for key, gradient in _gradients(loss, parameters).items()}
    return limit(TOLERANCE, gradient_difference(in_float32, expected(name, directory)[1])[0])


@cache
def _in_float32(
    directory: Path, model: str, temperature: float, rows: str, replayed: bool, truncated: bool
) -> tuple[list[Tensor], Params]:
    """Like `sampled`, but computed by the model in fp32."""
    sequences, *_ = sampled(directory, model, temperature, rows, replayed, truncated)
    policy = reference.load(directory / model).float()
    return reference.log_probs(policy, sequences, temperature), dict(policy.named_parameters())


def assert_reference(outcome: Outcome, name: str, directory: Path) -> None:
    """Assert that a step's loss, gradients and norm are the reference's."""
    loss, gradients = expected(name, directory)
    gradients = reference.as_in_file(gradients)
    # The loss is a sum of terms of order 1, too, which may cancel each other completely.
    assert outcome.metrics["loss"] == pytest.approx(loss, rel=TOLERANCE, abs=1e-6)
    assert outcome.gradients.keys() == gradients.keys()
    difference, worst = gradient_difference(outcome.gradients, gradients)
    assert difference <= TOLERANCE or difference <= gradient_limit(name, directory), worst
    norm = torch.stack([wanted.norm() for wanted in gradients.values()]).norm().item()
    assert outcome.grad_norm == pytest.approx(norm, rel=TOLERANCE), "the norm that clips"


def assert_update_is_that_of_adamw(probe: Probe, model: str, directory: Path) -> None:
    """Assert that clipping uses the norm of each parameter once, and that norms and biases do not decay.

    A gradient with an error of d moves Adam's first step, lr g / (|g| + eps), by lr d / eps at most. After
    clipping to a norm of 0.5, d is at most TOLERANCE times 0.5, and eps is 1e-3: 5e-3 of lr.
    """
    _, gradients = expected(MODELS[model], directory)
    _, _, parameters = sampled(directory, model, TEMPERATURE, "ragged")
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    assert norm > UPDATE["clip_grad"], "nothing would be clipped"
    assert probe.grad_norm == pytest.approx(norm, rel=TOLERANCE)
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, weight in weights.items():
        weight.grad = gradients[name] * UPDATE["clip_grad"] / norm
    matrices = [w for w in weights.values() if w.dim() > 1]
    vectors = [w for w in weights.values() if w.dim() == 1]
    options = {key: UPDATE[key] for key in ("lr", "eps", "betas", "weight_decay")}
    torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], **options).step()
    for name, weight in reference.as_in_file(weights).items():
        assert (probe.updated[name].cpu() - weight).abs().max() < 5e-3 * UPDATE["lr"], name

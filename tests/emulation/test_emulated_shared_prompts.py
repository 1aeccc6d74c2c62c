"""Shared prompts on emulated GPUs: the gradient of whole sequences, from fewer tokens.

Attention is PyTorch's two operators of FlashAttention, whose results are merged, in bf16, the one precision
that these kernels have. The bound is that of test_emulated_gradients.py: twice the error of transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.cases.gradient_cases import STEPS, expected, sampled_for
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.references.bf16_errors import errors, round_weights, transformers_in_bf16
from helpers.suite.selected import selected
from helpers.workers.gradient_worker import Case, Layout

BUDGETS = {"groups split": 24, "groups whole": 400}  # tokens a micro-batch
_SP = {"tp": 2, "sequence_parallel": True}
_GVPO, _MIXTURE, _LLAMA = (f"{model}gvpo, groups split" for model in ("", "qwen3_moe, ", "llama3, "))
QUICK = [(Layout(2, **_SP), _GVPO, "groups whole")]
PROOF = [
    (layout, name, budget)
    for layout, name in (
        *((Layout(1), _GVPO), (Layout(2, **_SP), _GVPO), (Layout(2, pp=2), _GVPO), (Layout(2), _GVPO)),
        *((Layout(2, ep=2), _MIXTURE), (Layout(1), _LLAMA)),
    )
    for budget in BUDGETS
    if (layout, name, budget) not in QUICK
]
each_run = pytest.mark.parametrize(
    ("layout", "name", "budget"),
    [
        pytest.param(*run, id=", ".join(map(str, run)), marks=() if run in QUICK else pytest.mark.proof)
        for run in (*QUICK, *PROOF)
    ],
)


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the runs that tests need."""
    path = tmp_path_factory.mktemp("shared")
    reference.save_models(path)
    round_weights(path)
    work: dict[int, list[tuple[Layout, str, str, Case]]] = {}
    for layout, name, budget in selected(request, "layout", "name", "budget"):
        step = STEPS[name]
        rows, *_ = sampled_for(step, path)
        options = {"model": step.model, "dtype": "bfloat16", "replays": False}
        case = Case(name, step.algorithm, rows, BUDGETS[budget], **options)
        work.setdefault(layout.ranks, []).append((layout, budget, "GPU", case))
    torch.save(list(work.values()), path / "work.pt")
    launch("helpers.workers.shared_worker:run", list(work), str(path), timeout=3000, emulated=True)
    return path


@each_run
def test_the_error_is_that_of_transformers_and_of_whole_sequences(
    directory: Path, layout: Layout, name: str, budget: str
) -> None:
    results = torch.load(directory / f"shared-{layout}-{name}-{budget}-GPU.pt", weights_only=False)
    _, exact = expected(name, directory)
    bound = 2 * max(errors(transformers_in_bf16(STEPS[name], directory), exact).values())
    for is_shared in (False, True):
        outcome, *_ = results[is_shared]
        wrong = errors(outcome.gradients, exact)
        assert max(wrong.values()) <= bound, max(wrong, key=wrong.__getitem__)
        norm = torch.stack([gradient.norm() for gradient in exact.values()]).norm().item()
        assert outcome.grad_norm == pytest.approx(norm, rel=bound)
    (_, plain_logp_r, plain_tokens), (_, logp_r, tokens) = results[False], results[True]
    torch.testing.assert_close(logp_r, plain_logp_r, rtol=0, atol=0.05)
    assert results["default"]
    if budget == "groups whole":
        assert tokens < plain_tokens

"""The fused router changes nothing: experts, log-probs and gradients of whole models, on an emulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.cases.gradient_cases import ALL, STEPS, TOLERANCE, expected, sampled_for
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.workers.gradient_worker import Case
from helpers.workers.router_worker import Routed

# A softmax of the chosen; sigmoids with groups, bias and a factor.
MODELS = [pytest.param("qwen3_moe", marks=pytest.mark.proof), "deepseek_v3"]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_the_same_with_and_without_the_fused_router(model: str, tmp_path: Path) -> None:
    reference.save_models(tmp_path, [model])
    name = f"{model}, grpo, fewer rows than ranks"
    step = STEPS[name]
    rows, *_ = sampled_for(step, tmp_path)
    torch.save(Case(name, step.algorithm, rows, ALL, model=model, replays=False), tmp_path / "work.pt")
    launch("helpers.workers.router_worker:run", [1], str(tmp_path), timeout=1200, emulated=True)
    results = torch.load(tmp_path / "results.pt", weights_only=False)
    fused, plain = results[True], results[False]
    assert_same(fused, plain)
    _, gradients = expected(name, tmp_path)
    gradients = reference.as_in_file(gradients)
    nothing = 1e-8 * max(gradient.abs().max() for gradient in gradients.values())
    for key, gradient in gradients.items():
        difference = (fused.outcome.gradients[key] - gradient).abs().max()
        assert difference <= TOLERANCE * gradient.abs().max() + nothing, key


def assert_same(fused: Routed, plain: Routed) -> None:
    assert (fused.fused_calls, plain.fused_calls) == (len(fused.maps), 0)
    assert len(fused.maps) == len(plain.maps) > 0
    assert all(torch.equal(*maps) for maps in zip(fused.maps, plain.maps, strict=True))
    assert fused.maps[0].any(0).sum() > 2, "the tokens go to several experts"
    torch.testing.assert_close(fused.logp_r, plain.logp_r, rtol=0, atol=1e-5)
    # The loss is a mean of ratios times advantages, whose mean size is at most 1: it moves by no more than
    # the log-probs. Its terms cancel, so a bound relative to the loss would depend on the machine's rounding.
    assert fused.outcome.metrics["loss"] == pytest.approx(plain.outcome.metrics["loss"], abs=1e-5)
    assert fused.outcome.gradients.keys() == plain.outcome.gradients.keys()
    for key, gradient in plain.outcome.gradients.items():
        difference = (fused.outcome.gradients[key] - gradient).abs().max()
        assert difference <= TOLERANCE * gradient.abs().max() + 1e-9, key

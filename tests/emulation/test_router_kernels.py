"""References of Transformer Engine's fused router: fp64 and autograd, and megatron-core's own operations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatron_gvpo.emulation.transformer_engine import install  # noqa: F401 - it fills the table
from megatron_gvpo.emulation.transformer_engine.references import TABLE
from megatron_gvpo.megatron import parallel  # before megatron.core

Tensor = torch.Tensor
TOKENS, EXPERTS = 96, 16
BOUND = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8}  # of the largest number
# DeepSeek-V3's and Qwen3's rules, and what other families have: (score function, before the choice, options).
RULES: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {"topk": 4},
    "softmax of all": {"topk": 4, "use_pre_softmax": True, "scaling_factor": 2.5},
    "softmax of all, one expert": {"topk": 1, "use_pre_softmax": True},
    "softmax of all, groups": {"topk": 4, "use_pre_softmax": True, "num_groups": 4, "group_topk": 2},
    "sigmoid": {"topk": 4, "score_function": "sigmoid"},
    "sigmoid, one expert": {"topk": 1, "score_function": "sigmoid", "scaling_factor": 1.5},
    "sigmoid, bias": {"topk": 4, "score_function": "sigmoid", "expert_bias": 0.3},
    "sigmoid, bias, groups": {
        "topk": 4,
        "score_function": "sigmoid",
        "expert_bias": 0.3,
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 2.5,
    },
}


def made(rule: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """Logits without ties, whose order nobody defines, and all arguments of megatron-core's function."""
    torch.manual_seed(3)
    order = torch.stack([torch.randperm(EXPERTS) for _ in range(TOKENS)])
    logits = ((order - EXPERTS / 2) / 4 + 0.5 * torch.rand(TOKENS, 1)).to(dtype)
    options = {"use_pre_softmax": False, "num_groups": None, "group_topk": None, "scaling_factor": None}
    options |= {"score_function": "softmax", "expert_bias": None} | rule
    if options["expert_bias"] is not None:
        options["expert_bias"] = options["expert_bias"] * torch.randn(EXPERTS)
    return logits, options


def fused(logits: Tensor, grad: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, map and the logits' gradient, as the compiled functions are called for them."""
    weights, chosen, intermediate = (
        torch.empty_like(logits),
        torch.empty(logits.shape).bool(),
        torch.empty(logits.shape),
    )
    names = ("topk", "use_pre_softmax", "num_groups", "group_topk", "scaling_factor", "score_function")
    arguments = [*(options[name] for name in names), options["expert_bias"]]
    TABLE["fused_topk_with_score_function_fwd"]((weights, chosen, intermediate), logits, *arguments)
    d_logits = torch.empty_like(logits)
    of_backward = (options["topk"], options["use_pre_softmax"], options["scaling_factor"])
    backward = TABLE["fused_topk_with_score_function_bwd"]
    backward(None, chosen, intermediate, grad, d_logits, *of_backward, options["score_function"])
    return weights, chosen, d_logits


def exact(logits: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Weights and map in fp64, by trying every set of experts that the rule allows, token by token."""
    x, chosen = logits.double(), torch.zeros(logits.shape, dtype=torch.bool)
    is_softmax = options["score_function"] == "softmax"
    scores = x.sigmoid()
    if is_softmax:
        scores = x.softmax(-1) if options["use_pre_softmax"] else x
    bias = 0 if options["expert_bias"] is None else options["expert_bias"].double()
    for token, row in enumerate((scores + bias).tolist()):
        allowed = range(EXPERTS)
        if options["group_topk"]:
            size, share = EXPERTS // options["num_groups"], options["topk"] // options["group_topk"]
            groups = [range(start, start + size) for start in range(0, EXPERTS, size)]

            def of_group(group: range, row: list[float] = row, share: int = share) -> float:
                return max(sum(row[e] for e in part) for part in itertools.combinations(group, share))

            best = sorted(groups, key=of_group)[-options["group_topk"] :]
            allowed = [expert for group in best for expert in group]
        chosen[token, sorted(allowed, key=row.__getitem__)[-options["topk"] :]] = True
    if is_softmax and not options["use_pre_softmax"]:
        weights = x.masked_fill(~chosen, -torch.inf).softmax(-1)
    else:
        weights = scores * chosen
        if not is_softmax and options["topk"] > 1:
            weights = weights / weights.sum(-1, keepdim=True)
    return weights * (options["scaling_factor"] or 1.0), chosen


def assert_close(computed: Tensor, wanted: Tensor, bound: float) -> None:
    error = (computed.double() - wanted.double()).abs().max() / wanted.double().abs().max()
    assert error <= bound, error.item()


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", RULES)
def test_weights_experts_and_gradient_are_those_of_the_rule(name: str, dtype: torch.dtype) -> None:
    logits, options = made(RULES[name], dtype)
    grad = torch.randn(TOKENS, EXPERTS).to(dtype)
    weights, chosen, d_logits = fused(logits, grad, options)
    x = logits.double().requires_grad_()
    wanted, wanted_chosen = exact(x, options)
    assert torch.equal(chosen, wanted_chosen)
    assert_close(weights, wanted.detach(), BOUND[dtype])
    wanted.backward(grad.double())
    assert_close(d_logits, x.grad, BOUND[dtype])


@pytest.mark.parametrize("name", RULES)
def test_megatron_chooses_and_weighs_alike_without_the_fusion(name: str) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    logits, options = made(RULES[name], torch.float32)
    grad = torch.randn(TOKENS, EXPERTS)
    weights, chosen, d_logits = fused(logits, grad, options)
    x = logits.clone().requires_grad_()
    with parallel.megatron_device():
        wanted, wanted_chosen = topk_routing_with_score_function(x, **options)
        wanted.backward(grad)
    assert torch.equal(chosen, wanted_chosen)
    assert_close(weights, wanted.detach(), 1e-6)
    assert_close(d_logits, x.grad, 1e-6)


def test_a_large_bias_costs_the_weights_digits_and_not_the_gradient() -> None:
    """The kernel subtracts the bias from the sum. DeepSeek-V3's biases could be as large as 14."""
    logits, options = made(RULES["sigmoid, bias"], torch.float32)
    options["expert_bias"] = options["expert_bias"] + 14
    grad = torch.randn(TOKENS, EXPERTS)
    weights, chosen, d_logits = fused(logits, grad, options)
    x = logits.double().requires_grad_()
    wanted, wanted_chosen = exact(x, options)
    wanted.backward(grad.double())
    assert torch.equal(chosen, wanted_chosen)
    error = ((weights - wanted).abs() / wanted.clamp(min=1e-3)).max().item()
    assert 1e-7 < error < 1e-5
    assert_close(d_logits, x.grad, 3e-6)


def test_what_this_package_does_not_use_is_refused() -> None:
    logits, options = made(RULES["sigmoid"], torch.float32)
    options["score_function"] = "sqrtsoftplus"
    with pytest.raises(NotImplementedError, match="the fused router with the score function sqrtsoftplus"):
        fused(logits, logits, options)

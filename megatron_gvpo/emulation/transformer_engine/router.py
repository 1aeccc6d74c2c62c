"""The router that chooses and weights each token's experts. Source: transformer_engine/common/fused_router.

The kernels compute in fp32, also for logits in bf16. They add the balancing bias to the scores before they
choose, and subtract it afterwards, so scores lose precision where the bias is large.
"""

from __future__ import annotations

import torch

from megatron_gvpo.emulation.transformer_engine.references import fill, read, reference
from megatron_gvpo.rehearsal.nullcuda.aliases import alias

Tensor = torch.Tensor
_SMALLEST = 1e-20  # added to the sum of a token's scores before the division by it


@reference
def fused_topk_with_score_function_fwd(
    result: tuple[Tensor, Tensor, Tensor],
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: int = 0,
    topk_indices: Tensor | None = None,
) -> None:
    """`logits`: [tokens, experts]. `result` has three tensors of this shape.

    They are the weights of the chosen experts, zeros elsewhere; the mask of the chosen experts; and the
    scores that the backward pass needs, in fp32.
    """
    _refuse(score_function, routing_map_format, topk_indices is not None)
    x = read(logits)
    is_softmax = score_function == "softmax"
    scores = x
    if not is_softmax:
        scores = torch.sigmoid(x)
    elif use_pre_softmax:
        scores = torch.softmax(x, -1)
    bias = torch.zeros(x.shape[-1]) if expert_bias is None else read(expert_bias)
    biased = scores + bias
    allowed = _of_best_groups(biased, topk, num_groups, group_topk) if group_topk else biased
    values, experts = allowed.topk(topk, dim=-1)
    weights, saved = values - bias[experts], scores
    if is_softmax and not use_pre_softmax:
        weights = torch.softmax(weights, -1)
        saved = torch.full_like(x, -torch.inf).scatter(-1, experts, weights)
    if not is_softmax and topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST)
    fill(result[0], torch.zeros_like(x).scatter(-1, experts, weights * _scale(scaling_factor)))
    fill(result[1], torch.zeros_like(x).scatter(-1, experts, 1.0))
    fill(result[2], saved)


def _of_best_groups(scores: Tensor, topk: int, groups: int | None, best: int) -> Tensor:
    """Keep the scores of the experts in a token's `best` groups, and set the others to minus infinity.

    A group's score is the sum of its topk // best largest scores.
    """
    assert groups is not None
    grouped = scores.unflatten(-1, (groups, -1))
    group_scores = grouped.topk(topk // best, dim=-1).values.sum(-1)
    chosen = torch.zeros_like(group_scores).scatter(-1, group_scores.topk(best, dim=-1).indices, 1.0).bool()
    return grouped.masked_fill(~chosen[..., None], -torch.inf).flatten(-2)


@reference
def fused_topk_with_score_function_bwd(
    _: None,
    routing_map: Tensor,
    intermediate_output: Tensor,
    grad_probs: Tensor,
    grad_logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float | None,
    score_function: str,
    use_dense_indices: bool = False,
    routing_map_format: int = 0,
) -> None:
    """Write the gradient of the logits into `grad_logits`."""
    _refuse(score_function, routing_map_format, use_dense_indices)
    is_chosen = alias(routing_map).bool()
    grad = read(grad_probs) * _scale(scaling_factor)
    scores = read(intermediate_output)
    if score_function == "softmax":
        # If the softmax was taken over the chosen experts, the scores of the others are minus infinity.
        scores = scores if use_pre_softmax else scores.masked_fill(~is_chosen, 0.0)
        grad = grad.masked_fill(~is_chosen, 0.0)
        fill(grad_logits, scores * (grad - (grad * scores).sum(-1, keepdim=True)))
        return
    chosen = scores.masked_fill(~is_chosen, 0.0)
    if topk > 1:
        total = chosen.sum(-1, keepdim=True) + _SMALLEST
        grad = grad / total - (grad * chosen).sum(-1, keepdim=True) / (total * total)
    fill(grad_logits, (grad * scores * (1 - scores)).masked_fill(~is_chosen, 0.0))


def _scale(factor: float | None) -> float:
    return 1.0 if factor is None else factor


def _refuse(score_function: str, routing_map_format: int, is_dense: bool) -> None:
    refused = {
        f"the score function {score_function}": score_function not in ("softmax", "sigmoid"),
        "a map of bits": routing_map_format != 0,
        "a list of the chosen experts": is_dense,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise NotImplementedError(f"the fused router with {name}")

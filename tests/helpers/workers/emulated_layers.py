"""Runs Transformer Engine's layers and optimizer on the emulated GPU of this process, and compares with fp64.

    python -m helpers.workers.emulated_layers RESULT.json

The result maps what was compared to its largest error, relative to the largest number, over the error of its
dtype: 1 is the largest error that is allowed. FP8's operands are made anew from PyTorch's FP8 types
(fp8_quantized.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.references.fp8_quantized import quantizers
from megatron_gvpo.emulation import emulated_gpu

Errors = dict[str, float]
BOUND = {torch.bfloat16: 2.0**-8, torch.float32: 1e-5}  # the errors of one rounding, and of sums in fp32


def main(file: str) -> int:
    emulated_gpu.install()
    torch.manual_seed(0)
    errors = norm_and_linear() | attention() | rotary() | adam() | refusals()
    for name in recipes():
        errors |= linear(name) | experts(name)
    errors |= lost_gradient()
    Path(file).write_text(json.dumps(errors))
    return 0


def error_of(computed: Tensor, exact: Tensor, bound: float | None = None) -> float:
    bound = BOUND[computed.dtype] if bound is None else bound
    computed, exact = computed.detach().cpu().double(), exact.detach().double()
    return ((computed - exact).abs().max() / exact.abs().max()).item() / bound


def norm_and_linear() -> Errors:
    """LayerNormLinear in bf16 whose weight's gradient is added to `main_grad` in fp32."""
    import transformer_engine.pytorch as te

    x, grad = torch.randn(24, 1, 64).bfloat16(), torch.randn(24, 1, 48).bfloat16()
    errors = {}
    for normalization in ("RMSNorm", "LayerNorm"):
        layer = te.LayerNormLinear(
            64,
            48,
            normalization=normalization,
            zero_centered_gamma=True,
            fuse_wgrad_accumulation=True,
            params_dtype=torch.bfloat16,
        ).cuda()
        weights = dict(layer.named_parameters())
        exact = {name: weight.detach().cpu().double().requires_grad_() for name, weight in weights.items()}
        layer.weight.main_grad = torch.ones(48, 64, device="cuda")
        on_gpu, exact_x = x.cuda().requires_grad_(), x.double().requires_grad_()
        out = layer(on_gpu)
        out.backward(grad.cuda())
        scale = exact["layer_norm_weight"] + 1
        if normalization == "RMSNorm":
            normed = F.rms_norm(exact_x, (64,), scale, 1e-5)
        else:
            normed = F.layer_norm(exact_x, (64,), scale, exact["layer_norm_bias"], 1e-5)
        exact_out = F.linear(normed, exact["weight"], exact["bias"])
        exact_out.backward(grad.double())
        pairs = {"out": (out, exact_out), "x": (on_gpu.grad, exact_x.grad)}
        pairs |= {name: (weight.grad, exact[name].grad) for name, weight in weights.items()}
        pairs["weight"] = (layer.weight.main_grad - 1, exact["weight"].grad)
        # The norm's output, too, is rounded to bf16.
        bound = 2 * BOUND[torch.bfloat16]
        errors |= {f"{normalization} {name}": error_of(*pair, bound) for name, pair in pairs.items()}
    return errors


def lost_gradient() -> Errors:
    """Transformer Engine (2.20.2) leaves out the gradient of a norm's output that it returns gathered.

    Adapters avoid this fault (megatron/adapters/lora.py). The result is 0 as long as the fault exists. When a
    release corrects it, adapters can take the gathered output.
    """
    import transformer_engine.pytorch as te

    options = {"return_layernorm_output": True, "return_layernorm_output_gathered": True}
    layer = te.LayerNormLinear(16, 16, **options).cuda()
    x = torch.randn(4, 16).cuda().requires_grad_()
    _, normed = layer(x)
    (normed * torch.randn(4, 16).cuda()).sum().backward()
    assert x.grad is not None
    return {"lost gradient": float(x.grad.abs().max() > 0) * 2}


def attention() -> Errors:
    """DotProductAttention of a pack of two sequences with grouped heads."""
    import transformer_engine.pytorch as te

    ends = [0, 20, 48]
    tensors = [torch.randn(48, heads, 64).bfloat16() for heads in (4, 2, 2)]
    layer = te.DotProductAttention(
        4, 64, num_gqa_groups=2, qkv_format="thd", attention_dropout=0.0, attn_mask_type="padding_causal"
    ).cuda()
    cu_seqlens = torch.tensor(ends, dtype=torch.int32).cuda()
    on_gpu = [tensor.cuda().requires_grad_() for tensor in tensors]
    lengths = {"max_seqlen_q": 28, "max_seqlen_kv": 28}
    out = layer(*on_gpu, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, **lengths)
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    parts = []
    for begin, end in ((0, 20), (20, 48)):
        heads = (tensor[begin:end].transpose(0, 1)[None] for tensor in exact)
        part = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        parts.append(part[0].transpose(0, 1))
    exact_out = torch.cat(parts).flatten(1)
    grad = torch.randn(48, 256).bfloat16()
    out.backward(grad.cuda())
    exact_out.backward(grad.double())
    pairs = zip(("q", "k", "v"), on_gpu, exact, strict=True)
    errors = {f"attention {name}": error_of(a.grad, b.grad) for name, a, b in pairs}
    return errors | {"attention out": error_of(out, exact_out)}


def rotary() -> Errors:
    """megatron-core's fused rotary embedding against its own unfused one, in fp64."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    x, grad = torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    freqs = torch.randn(8, 1, 1, 16).repeat(1, 1, 1, 1)
    freqs[..., 8:] = freqs[..., :8]
    on_gpu, exact_x = x.cuda().requires_grad_(), x.double().requires_grad_()
    ends = torch.tensor([0, 8, 12], dtype=torch.int32).cuda()
    out = apply_rotary_pos_emb(on_gpu, freqs.cuda(), tensor_format="thd", fused=True, cu_seqlens=ends)
    exact = torch.cat(
        [
            _apply_rotary_pos_emb_bshd(part[:, None], freqs[: len(part)].double())[:, 0]
            for part in (exact_x[:8], exact_x[8:])
        ]
    )
    out.backward(grad.cuda())
    exact.backward(grad.double())
    return {"rotary out": error_of(out, exact), "rotary x": error_of(on_gpu.grad, exact_x.grad)}


def adam() -> Errors:
    """Transformer Engine's FusedAdam, two steps."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    weight = torch.randn(33, 5)
    on_gpu, exact = torch.nn.Parameter(weight.cuda()), torch.nn.Parameter(weight.double())
    fused, plain = FusedAdam([on_gpu], **options), torch.optim.AdamW([exact], **options)
    for _ in range(2):
        grad = torch.randn(33, 5)
        on_gpu.grad, exact.grad = grad.cuda(), grad.double()
        fused.step()
        plain.step()
    return {"adam": error_of(on_gpu, exact)}


def refusals() -> Errors:
    """The error of a function without a reference names the function: 0 if it does."""
    import transformer_engine_torch as extension

    try:
        extension.dropout_fwd(torch.ones(4, 4, device="cuda"), 0.5)
    except NotImplementedError as error:
        return {"refusal": float("dropout_fwd" not in str(error))}
    return {"refusal": 1.0}


def recipes() -> dict[str, Any]:
    from transformer_engine.common import recipe

    is_blackwell = torch.cuda.get_device_capability()[0] >= 10
    kinds = {"tensorwise": recipe.Float8CurrentScaling(), "blockwise": recipe.Float8BlockScaling()}
    return kinds | ({"mxfp8": recipe.MXFP8BlockScaling()} if is_blackwell else {})


def linear(name: str) -> Errors:
    """Linear: each of its three products reads operands that were quantized along its sum."""
    import transformer_engine.pytorch as te

    x, grad = torch.randn(256, 384).bfloat16(), torch.randn(256, 128).bfloat16()
    inputs, weights, gradients = quantizers(name)
    errors = {}
    for has_fp8_weight in (False, True):
        with te.quantized_model_init(enabled=has_fp8_weight, recipe=recipes()[name]):
            layer = te.Linear(
                384, 128, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16, device="cuda"
            )
        layer.weight.main_grad = torch.zeros(128, 384, device="cuda")
        on_gpu = x.cuda().requires_grad_()
        with te.autocast(enabled=True, recipe=recipes()[name]):
            out = layer(on_gpu[:, None])[:, 0]  # megatron-core's shape: tokens, one sequence, width
        out.backward(grad.cuda())
        weight = (layer.weight.dequantize() if has_fp8_weight else layer.weight).detach().cpu()
        rowwise = weight.double() if has_fp8_weight else weights.along_rows(weight)
        columnwise = weight.double() if has_fp8_weight else weights.along_columns(weight)
        exact_out = inputs.along_rows(x) @ rowwise.T + layer.bias.detach().cpu().double()
        exact_dw = gradients.along_columns(grad).T @ inputs.along_columns(x)
        pairs = {"out": (out, exact_out), "weight": (layer.weight.main_grad, exact_dw)}
        pairs["bias"] = (layer.bias.grad, grad.double().sum(0))
        if not (has_fp8_weight and name == "mxfp8"):  # the weight's columnwise copy has other scales
            pairs["x"] = (on_gpu.grad, gradients.along_rows(grad) @ columnwise)
        kind = f"{name}, FP8 weights" if has_fp8_weight else name
        errors |= {f"{kind} {part}": error_of(*pair) for part, pair in pairs.items()}
    return errors


def experts(name: str) -> Errors:
    """GroupedLinear of three experts, of which the second has no tokens."""
    import transformer_engine.pytorch as te

    x, grad, splits = torch.randn(384, 256).bfloat16(), torch.randn(384, 128).bfloat16(), [128, 0, 256]
    layer = te.GroupedLinear(
        3, 256, 128, bias=False, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16
    ).cuda()
    weights = [getattr(layer, f"weight{i}") for i in range(3)]
    for weight in weights:
        weight.main_grad = torch.zeros(128, 256, device="cuda")
    on_gpu = x.cuda().requires_grad_()
    with te.autocast(enabled=True, recipe=recipes()[name]):
        out = layer(on_gpu, splits)
    out.backward(grad.cuda())
    inputs, of_weights, gradients = quantizers(name)
    exact: dict[str, list[Tensor]] = {"out": [], "x": []}
    errors, begin = {}, 0
    for i, size in enumerate(splits):
        part, d_part = x[begin : begin + size], grad[begin : begin + size]
        begin += size
        weight = weights[i].detach().cpu()
        if not size:
            errors[f"{name} experts, idle weight"] = weights[i].main_grad.abs().max().item()
            continue
        exact["out"].append(inputs.along_rows(part) @ of_weights.along_rows(weight).T)
        exact["x"].append(gradients.along_rows(d_part) @ of_weights.along_columns(weight))
        exact_dw = gradients.along_columns(d_part).T @ inputs.along_columns(part)
        errors[f"{name} experts, weight {i}"] = error_of(weights[i].main_grad, exact_dw)
    errors[f"{name} experts, out"] = error_of(out, torch.cat(exact["out"]))
    return errors | {f"{name} experts, x": error_of(on_gpu.grad, torch.cat(exact["x"]))}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Exponentials of logits, as the epilogue of QuACK's matrix product on Hopper: no logits are written.

QuACK (quack-kernels 0.6) compiles a product of matrices whose epilogue is a Python function of the fp32
accumulator. Ours writes, of each row and each tile of columns t, with z the logit at its temperature,

    k_t = the integer next to log2(e) max z,   E = 2^(log2(e) z - k_t) in bf16,   the sum of E in fp32,

and the label's z. In each tile the largest E is between sqrt(1/2) and sqrt(2), however large the logits are.
It is QuACK's `scaled_exp_target_epi`, with a temperature: the same operations in the same order.

QuACK compiles at the first use, for which it needs no GPU (tests/helpers/programs/quack_compiled.py).
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False
from __future__ import annotations

import torch
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.math import pexp2
from quack.epilogue.ops import ColVecLoad, ColVecReduce, ColVecSelect
from quack.epilogue.scaled_exp import LOG2E, MaxLog2
from torch import Tensor

_LARGEST = MaxLog2("offset")  # the value of the first pass, times log2(e), rounded: k of a row and a tile
_LABEL = ColVecLoad("label")


def scaled_logits(acc, inverse):
    """First pass over a tile, for its largest logits."""
    return {"offset": acc * inverse}


@gemm_epilogue(
    ops={"offset": _LARGEST, "inverse": ColVecLoad("inverse")},
    prepass=scaled_logits,
    prepass_outs=("offset",),
    reduces={"sum": ColVecReduce("sum")},
    outs={"target": ColVecSelect("target", idx_op=_LABEL)},
    extra_ops=(_LARGEST.out("offsets"), _LABEL),
)
def exponentials(acc, inverse, offset):
    """Second pass: D is E. `inverse`: 1 / temperature."""
    logit = acc * inverse
    power = pexp2(logit * LOG2E - offset)
    return {"D": power, "sum": power, "target": logit}


def product(
    x_rh: Tensor, w_vh: Tensor, labels_r: Tensor, inverse_r: Tensor, out_rv: Tensor, tile: int
) -> tuple[Tensor, Tensor, Tensor]:
    """out_rv <- E; returns k [r, v / tile], the sums of E of each tile [r, v / tile], and the labels' z [r].

    x_rh, w_vh and out_rv are bf16, contiguous and aligned to 16 bytes; inverse_r is fp32; labels_r is int64.
    A label outside the columns has z = -inf. `tile`: the columns of a tile, which divide v.
    """
    offset_rt = inverse_r.new_empty(len(x_rh), len(w_vh) // tile)
    sum_rt = torch.empty_like(offset_rt)
    target_r = torch.full_like(inverse_r, -torch.inf)
    arguments = {
        "offset": tile,
        "offsets": offset_rt,
        "sum": sum_rt,
        "inverse": inverse_r[None],
        "label": labels_r,
        "target": target_r,
    }
    # As in QuACK's own head. "pingpong": a group of warps multiplies while the other one has its epilogue.
    exponentials.gemm(
        x_rh,
        w_vh,
        out_rv,
        epi_args=arguments,
        tile_M=128,
        tile_N=tile,
        cluster_M=2,
        cluster_N=1,
        pingpong=True,
    )
    return offset_rt, sum_rt, target_r

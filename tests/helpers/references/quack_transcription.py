"""QuACK's product with our epilogue, transcribed in PyTorch: it rounds where the compiled kernel rounds.

For each number the kernel has FMUL (the temperature), FFMA (log2(e) z - k, one rounding) and MUFU.EX2 (2^x,
with a relative error of about 2^-22, which every number has here, up or down). Sums are in fp32; E is rounded
to bf16 when it is stored.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ERROR = 2**-22
LOG2E = torch.tensor(math.log2(math.e), dtype=torch.float32)


def product(
    x_rh: Tensor, w_vh: Tensor, labels_r: Tensor, inverse_r: Tensor, out_rv: Tensor, tile: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what `quack_product.product` does."""
    assert out_rv.dtype == torch.bfloat16 and inverse_r.dtype == torch.float32
    z_rv = (x_rh.float() @ w_vh.float().T) * inverse_r[:, None]
    z_rtc = z_rv.unflatten(1, (-1, tile))
    offset_rt = (z_rtc.amax(2) * LOG2E).round()
    e_rtc = (z_rtc.double() * LOG2E - offset_rt[..., None]).float().double().exp2()
    e_rtc = (e_rtc * (1 + _ERROR * (e_rtc * 1e6).sin().sign())).float()
    out_rv.copy_(e_rtc.flatten(1))
    is_inside_r = (labels_r >= 0) & (labels_r < len(w_vh))
    target_r = z_rv.gather(1, labels_r.clamp(0, len(w_vh) - 1)[:, None])[:, 0]
    return offset_rt, e_rtc.sum(2), target_r.masked_fill(~is_inside_r, -torch.inf)

"""The CPU's rotary embedding against megatron-core's own, with gradients, in fp64."""

from __future__ import annotations

import pytest
import torch

from megatron_gvpo.settings.parallel import ParallelConfig


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("channels", "rotated"), [(8, 8), (12, 8)])
def test_rotation_and_gradient_are_megatrons(interleaved: bool, channels: int, rotated: int) -> None:
    from megatron_gvpo.megatron import parallel

    parallel.initialize(ParallelConfig(), seed=0)
    try:
        from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

        from megatron_gvpo.megatron.attention.rotary import angles, rotate

        half = torch.randn(7, rotated // 2, dtype=torch.float64)
        pairs = (half, half)
        freqs = torch.stack(pairs, -1).flatten(1) if interleaved else torch.cat(pairs, -1)
        freqs_t = freqs[:, None, None]
        packed_qkv = torch.randn(7, 3, 2 * channels, dtype=torch.float64, requires_grad=True)
        x_tnd = packed_qkv[..., :channels]  # not contiguous, as the query in a fused projection
        upstream = torch.randn(7, 3, channels, dtype=torch.float64)

        output = rotate(x_tnd, angles(freqs_t, interleaved), interleaved)
        wanted = _apply_rotary_pos_emb_bshd(x_tnd.unsqueeze(1), freqs_t, interleaved).squeeze(1)
        torch.testing.assert_close(output, wanted)
        torch.testing.assert_close(
            torch.autograd.grad(output, packed_qkv, upstream),
            torch.autograd.grad(wanted, packed_qkv, upstream),
        )
    finally:
        parallel.shut_down()

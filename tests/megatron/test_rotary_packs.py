"""Rotary embeddings of packs on GPUs: no loop over sequences, and no number that the host waits for.

Compared with megatron-core's own loop, sequence by sequence.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_gvpo.settings.parallel import ParallelConfig

LENGTHS = (5, 1, 8, 3)
ENDS = torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)
POSITION_T = torch.cat([torch.arange(length) for length in LENGTHS])
CONFIG = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)


@pytest.fixture
def yarn() -> Iterator[Any]:
    """megatron-core's YaRN with GPT-OSS's values, on a CPU."""
    from megatron_gvpo.megatron import parallel

    parallel.initialize(ParallelConfig(), seed=0)
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    yield lambda **more: YarnRotaryEmbedding(
        **{
            "kv_channels": 16,
            "rotary_base": 150000.0,
            "scaling_factor": 32.0,
            "original_max_position_embeddings": 64,
            "use_cpu_initialization": True,
            "correction_range_round_to_int": False,
            **more,
        }
    )
    parallel.shut_down()


def test_one_gather_is_the_loop_over_sequences(yarn: Any) -> None:
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    from megatron_gvpo.megatron.attention.core import OwnPackedSeqParams, _rotated, frequencies
    from megatron_gvpo.megatron.attention.rotary import angles, rotate
    from megatron_gvpo.megatron.parallel import megatron_device

    rotary = yarn()
    x_tnd = torch.randn(sum(LENGTHS), 3, 16, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(x_tnd.shape, dtype=torch.float64)
    with megatron_device():
        table, scale = rotary(max(LENGTHS), packed_seq=True)
        group = parallel_state.get_context_parallel_group()
        wanted = apply_rotary_pos_emb(x_tnd, table, CONFIG, ENDS, mscale=scale, cp_group=group)
        freqs_t, own_scale = frequencies(rotary, max(LENGTHS), POSITION_T)
        pack = OwnPackedSeqParams(freqs_t=freqs_t, rotary_scale=own_scale)
        on_gpu = _rotated(x_tnd, pack, CONFIG)
        on_cpu = rotate(x_tnd, angles(freqs_t.double(), False, own_scale), False)
    assert own_scale == scale != 1.0
    [gradient] = torch.autograd.grad(wanted, x_tnd, upstream)
    for rotated, tolerance in ((on_gpu, 0.0), (on_cpu, 1e-6)):
        torch.testing.assert_close(rotated, wanted, rtol=0, atol=tolerance)
        torch.testing.assert_close(
            torch.autograd.grad(rotated, x_tnd, upstream)[0], gradient, rtol=0, atol=tolerance
        )


def test_a_rotation_brings_no_number_to_the_host(yarn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's own asks for the lengths of the pack, and for its end, in every call."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    from megatron_gvpo.megatron.attention.core import OwnPackedSeqParams, _rotated, frequencies
    from megatron_gvpo.megatron.parallel import megatron_device

    read: list[str] = []
    for name in ("item", "tolist", "cpu", "__int__", "__bool__"):
        plain = getattr(torch.Tensor, name)

        def counted(self: Any, *args: Any, name: str = name, plain: Any = plain) -> Any:
            read.append(name)
            return plain(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    x_tnd = torch.randn(sum(LENGTHS), 3, 16)
    with megatron_device():
        freqs_t, scale = frequencies(yarn(), max(LENGTHS), POSITION_T)
        read.clear()
        _rotated(x_tnd, OwnPackedSeqParams(freqs_t=freqs_t, rotary_scale=scale), CONFIG)
        assert read == []
        group = parallel_state.get_context_parallel_group()
        apply_rotary_pos_emb(x_tnd, freqs_t, CONFIG, ENDS, cp_group=group)
    assert {"item", "tolist"} <= set(read), "the count sees what megatron-core's own loop reads"


FUSED = """
import torch
from itertools import accumulate
from types import SimpleNamespace
from megatron.core.fusions import fused_mla_yarn_rope_apply as fused
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

class FirstBlock:  # the autotuner would time the blocks on a GPU
    def __init__(self, kernel): self.kernel = kernel.fn
    def __getitem__(self, grid):
        return lambda *args: self.kernel[grid({"BLOCK_H": 2})](*args, BLOCK_H=2)

for name in ("rotary_fwd_q_kernel", "rotary_bwd_q_kernel", "rotary_fwd_kv_kernel", "rotary_bwd_kv_kernel"):
    setattr(fused, name, FirstBlock(getattr(fused, name)))

torch.manual_seed(0)
ranks, lengths = CP, LENGTHS_OF_RANKS
whole = [0, *accumulate(n * ranks for n in lengths)]
ends = torch.tensor(whole, dtype=torch.int32)
nope, rope, v, heads, tokens = 16, 8, 4, 4, sum(lengths)
freqs = torch.randn(max(lengths) * ranks, 1, 1, rope // 2, dtype=torch.float64)
freqs, scale = torch.cat([freqs, freqs], -1), 1.25
cos, sin = (f(freqs).mul(scale).contiguous() for f in (torch.cos, torch.sin))
config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=True)
for rank in range(ranks):
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    def loop(x):
        return apply_rotary_pos_emb(
            x, freqs, config, ends, mscale=scale, cp_group=group, mla_rotary_interleaved=True
        )
    leaves = [torch.randn(tokens, *s, dtype=torch.float64, requires_grad=True)
              for s in ((heads, nope + rope), (heads, nope + v), (1, rope))]
    q, kv, k_rope = leaves
    wanted = [torch.cat([q[..., :nope], loop(q[..., nope:])], -1),
              torch.cat([kv[..., :nope], loop(k_rope).expand(-1, heads, -1)], -1), kv[..., nope:]]
    fq = fused.fused_apply_mla_rope_for_q(q.clone(), cos, sin, nope, rope, ends, rank, ranks)
    fk, fv = fused.fused_apply_mla_rope_for_kv(
        kv.clone(), k_rope.clone(), cos, sin, rope, nope, v, ends, rank, ranks)
    upstream = [torch.randn_like(x) for x in wanted]
    for got, exact in zip((fq, fk, fv), wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(out, leaves, [u.clone() for u in upstream])
                 for out in ((fq, fk, fv), tuple(wanted))]
    for got, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-12)
print("equal")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_latent_attentions_fused_kernels_are_the_loop_over_sequences(ranks: int) -> None:
    """megatron-core's Triton kernels in the interpreter, in fp64, with gradients and context parallelism."""
    program = FUSED.replace("CP,", f"{ranks},").replace("LENGTHS_OF_RANKS", "(4, 2, 6)")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]

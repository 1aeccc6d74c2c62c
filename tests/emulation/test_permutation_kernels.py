"""Triton's kernels on the emulated GPU: those that permute tokens by references, and casts to bf16.

The references are compared with the interpreted kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import on_null_cuda

from megatron_gvpo.emulation.triton_kernels import to_bf16

CODE = """
from unittest import mock

import torch
from megatron_gvpo.emulation import emulated_gpu

emulated_gpu.install()
from megatron_gvpo.emulation.transformer_engine import permutation as references
from transformer_engine.pytorch.triton import permutation as kernels

TOKENS, EXPERTS, HIDDEN = 9, 5, 70  # hidden sizes are processed in blocks of 64
generator = torch.Generator().manual_seed(0)

def random(*shape):
    return torch.randn(*shape, generator=generator).to(torch.bfloat16).cuda()

routed = torch.rand(TOKENS, EXPERTS, generator=generator) < 0.4
routed[2] = False  # a token of no expert
routed[3] = True
count = int(routed.sum())
pads = torch.arange(EXPERTS).int() * 3
inputs, outputs, scales = random(TOKENS, HIDDEN), random(count + 20, HIDDEN), random(TOKENS, 3)
probs = torch.rand(TOKENS, EXPERTS, generator=generator)
probs[3, 1] = 0
probs, routed_probs = probs.cuda(), torch.rand(count + 20, generator=generator).cuda()
sizes, order = torch.tensor([3, 0, 2, 3]).cuda(), torch.tensor([2, 0, 3, 1]).cuda()  # a row is behind them


def results():
    ids = kernels.make_row_id_map(routed.cuda(), TOKENS, EXPERTS)
    n = ids[:, -1].tolist()
    by_case = {"ids": [[row[:k], row[EXPERTS : EXPERTS + k]] for row, k in zip(ids.tolist(), n)]}
    for name, pad, rows in (("packed", None, count), ("padded", pads.cuda(), count + 20)):
        by_case[name] = kernels.permute_with_mask_map(
            inputs, ids, probs, scales, pad, TOKENS, EXPERTS, rows, HIDDEN, 3
        )
        by_case[name + ", plain"] = kernels.permute_with_mask_map(
            inputs, ids, None, None, pad, TOKENS, EXPERTS, rows, HIDDEN, 0
        )[:1]
        for weights in (None, probs):
            by_case[f"{name}, back, {weights is None}"] = kernels.unpermute_with_mask_map(
                outputs[:rows], ids, weights, routed_probs[:rows], pad, TOKENS, EXPERTS, HIDDEN
            )
        by_case[name + ", gradient"] = kernels.unpermute_with_mask_map_bwd_with_merging_probs(
            inputs, ids, outputs[:rows], probs, pad, TOKENS, EXPERTS, rows, HIDDEN
        )
    ids = kernels.make_chunk_sort_map(sizes, order, TOKENS, 4)
    by_case["chunks"] = [ids]
    for forward in (True, False):
        by_case[f"chunks, {forward}"] = kernels.sort_chunks_by_map(
            inputs, ids, routed_probs[:TOKENS], TOKENS, HIDDEN, forward
        )
    return {
        key: [t.tolist() if isinstance(t, torch.Tensor) else t for t in of] for key, of in by_case.items()
    }

by_reference = results()
with mock.patch.dict(references.KERNELS, clear=True):
    interpreted = results()
result = [by_reference, interpreted, list(references.KERNELS)]
"""


def test_references_are_the_interpreted_kernels() -> None:
    by_reference, interpreted, kernels = on_null_cuda.run_code(CODE, emulated=True)
    assert len(kernels) == 8
    assert by_reference.keys() == interpreted.keys()
    for key, wanted in interpreted.items():
        if "gradient" not in key:
            assert by_reference[key] == wanted, key
            continue
        assert by_reference[key][0] == wanted[0], key
        for own, other in zip(by_reference[key][1], wanted[1], strict=True):  # sums in another order
            assert own == pytest.approx(other, rel=1e-5, abs=1e-5), key


def test_casts_to_bf16_are_those_of_torch() -> None:
    """Middles between two numbers, the largest, infinity and NaN, too."""
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).int()
    middles = bits & -0x10000 | 0x8000
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4028235e38, 1e-45])
    values = torch.cat([bits.view(torch.float32), middles.view(torch.float32), special])
    rounded = torch.from_numpy(to_bf16(values.numpy()).astype(np.int16)).view(torch.bfloat16)
    torch.testing.assert_close(rounded, values.bfloat16(), rtol=0, atol=0, equal_nan=True)

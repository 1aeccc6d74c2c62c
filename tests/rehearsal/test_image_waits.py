"""The libraries' own code waits for image grids that are on the device, and not for those on the host.

When a test of a library's own code fails, a release has mended it: `megatron/vision.py` and
docs/explanation/audit.md then say too much.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers import on_null_cuda

pytestmark = pytest.mark.proof

CODE = """
import torch
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import get_rope_index
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model import Qwen3VLVisionModel
from megatron.core.packed_seq_params import PackedSeqParams
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

from megatron_gvpo.megatron.image_tokens import qwen2_5_arguments
from megatron_gvpo.rehearsal.integers import with_integers
from megatron_gvpo.rehearsal.nullcuda import counters
from megatron_gvpo.rehearsal.stand_ins import install

install(made_weights=False)  # no cuDNN

def waits(function, *args, **options):
    before = counters.read()["host_waits"]
    function(*args, **options)
    return counters.read()["host_waits"] - before

sizes = dict(hidden_size=64, intermediate_size=128, num_heads=4, out_hidden_size=64, window_size=56)
grid = torch.tensor([[1, 8, 8], [1, 4, 6]])
pixels = torch.zeros(8 * 8 + 4 * 6, 3 * 2 * 14 * 14, device="cuda", dtype=torch.bfloat16)
result = {"tower": {}, "tower with arguments": {}, "positions": {}}
for depth in (2, 4):
    config = qwen.Qwen2_5_VLVisionConfig(depth=depth, fullatt_block_indexes=[1], **sizes)
    tower = qwen.Qwen2_5_VisionTransformerPretrainedModel._from_config(config).bfloat16().cuda()
    there = with_integers(tower.forward)
    arguments = {
        key: value if "seqlens" in key else value.pin_memory().to("cuda", non_blocking=True)
        for key, value in qwen2_5_arguments(tower, grid).items()
    }
    result["tower"][depth] = waits(there, pixels, grid_thw=grid.pin_memory().to("cuda", non_blocking=True))
    result["tower with arguments"][depth] = waits(tower, pixels, grid_thw=grid, **arguments)

for images in (1, 2):
    sequence = [7, 122, *[120] * 16, 123, 7]
    tokens = torch.tensor([sequence * images]).cuda()
    ends = torch.arange(images + 1).mul(len(sequence)).int().cuda()
    pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    grids = torch.tensor([[1, 8, 8]] * images).cuda()
    result["positions"][images] = waits(
        with_integers(get_rope_index), 2, 120, 121, 122, tokens, grids, packed_seq_params=pack
    )
made = with_integers(Qwen3VLVisionModel.build_packed_seq_params)(None, grid.cuda())
result["longest image is on the device"] = made.max_seqlen_q.is_cuda
"""


@pytest.fixture(scope="module")
def counted() -> Any:
    return on_null_cuda.run_code(CODE)


def test_transformers_tower_waits_in_every_layer(counted: Any) -> None:
    """Qwen2.5-VL's, transformers 5.19: three times, once for each of queries, keys and values."""
    assert counted["tower"]["4"] - counted["tower"]["2"] == 3 * 2


def test_it_waits_for_nothing_that_it_gets(counted: Any) -> None:
    assert counted["tower with arguments"] == {"2": 0, "4": 0}


def test_positions_wait_for_every_image(counted: Any) -> None:
    """Qwen3-VL's, Megatron-Bridge 0.6.2."""
    assert counted["positions"]["2"] > counted["positions"]["1"] > 0


def test_the_longest_image_is_a_tensor_on_the_device(counted: Any) -> None:
    """Qwen3-VL's, Megatron-Bridge 0.6.2: Transformer Engine waits for it in every layer of the tower."""
    assert counted["longest image is on the device"]

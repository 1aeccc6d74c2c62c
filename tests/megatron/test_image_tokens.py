"""Positions of a pack with images, computed on the host, are those that the libraries compute."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from transformers import Qwen2_5_VLModel

from megatron_gvpo.groups import Image
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.megatron.cpu.bridge import import_bridge
from megatron_gvpo.megatron.image_tokens import ImageTokens
from megatron_gvpo.settings.parallel import Padding
from megatron_gvpo.types import TrainBatch

IMAGE, VIDEO, START, END = 120, 121, 122, 123
MERGE = 2
# The height and width in patches of every prompt's images.
GRIDS: list[list[tuple[int, int]]] = [[(4, 6)], [], [(2, 8), (8, 2), (4, 4)], [(2, 2)], [(6, 4), (2, 2)]]


def _rows() -> TrainBatch:
    prompts, responses, images = [], [], []
    for row, grids in enumerate(GRIDS):
        prompt, of_row = list(range(1, 4 + row % 2)), []
        for number, (height, width) in enumerate(grids):
            of_row.append(Image(f"{row}-{number}", "", (1, height, width), height * width // MERGE**2))
            prompt += [START, *[IMAGE] * of_row[-1].tokens, END]
        prompts.append([*prompt, 7, 8])
        responses.append([9 + row] * (2 + row))
        images.append(tuple(of_row))
    count = len(prompts)
    return TrainBatch(
        prompt_ids=prompts,
        response_ids=responses,
        group_n=torch.arange(count),
        reward_n=torch.zeros(count),
        truncated_n=torch.zeros(count, dtype=torch.bool),
        images=images,
    )


def _of_megatron_bridge(token_t: Tensor, grid_n3: Tensor, pack: PackedSeqParams) -> Tensor:
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.rope import get_rope_index

    positions, _ = get_rope_index(
        MERGE, IMAGE, VIDEO, START, token_t[None], image_grid_thw=grid_n3, packed_seq_params=pack
    )
    return positions[:, 0]


def _of_transformers(token_t: Tensor, grid_n3: Tensor, pack: PackedSeqParams) -> Tensor:
    from megatron.bridge.training.utils import packed_seq_utils as packs

    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = MethodType(Qwen2_5_VLModel.get_vision_position_ids, model)
    rows, mask, starts, lengths = packs.unpack_mcore_thd_tensor_for_position_ids(token_t[None], pack)
    kinds = (rows == IMAGE).int()
    positions, _ = Qwen2_5_VLModel.get_rope_index(model, rows, kinds, grid_n3, attention_mask=mask)
    packed = packs.repack_mcore_thd_position_ids(
        positions, padded_starts=starts, lengths=lengths, total_length=len(token_t)
    )
    return packed[:, 0]


@pytest.mark.parametrize("library", [_of_megatron_bridge, _of_transformers])
@pytest.mark.parametrize("padding", [1, 16])
def test_positions_and_places_are_those_of_the_libraries(library: Any, padding: int) -> None:
    import_bridge()  # without Transformer Engine
    batch = PackedBatch.pack(_rows(), Padding(1, padding))
    tokens = ImageTokens.of(batch, IMAGE, MERGE)
    ends = torch.tensor([0, *batch.lengths]).cumsum(0, dtype=torch.int32)
    pack = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    assert torch.equal(tokens.position_3t, library(batch.token_t, tokens.grid_n3, pack))
    assert tokens.indices == (batch.token_t == IMAGE).nonzero().flatten().tolist()


def test_placeholders_in_a_response_are_ordinary_tokens() -> None:
    rows = _rows()
    rows.response_ids[0] = [9, IMAGE, START, IMAGE, 9]
    batch = PackedBatch.pack(rows)
    tokens = ImageTokens.of(batch, IMAGE, MERGE)
    assert len(tokens.indices) == sum(image.tokens for image in tokens.images)
    begin = sum(batch.lengths[: batch.order.index(0)])
    own = tokens.position_3t[:, begin + len(rows.prompt_ids[0]) :][:, :4]
    assert torch.equal(own, own[:1, :1] + torch.arange(4).expand(3, -1))


def test_a_prompt_without_its_images_is_a_fault() -> None:
    rows = _rows()
    rows.images = [(), *(rows.images or [])[1:]]
    with pytest.raises(AssertionError, match="placeholders of other images"):
        ImageTokens.of(PackedBatch.pack(rows), IMAGE, MERGE)

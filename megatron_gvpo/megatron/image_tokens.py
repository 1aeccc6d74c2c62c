"""Where the images of a pack are, and what their towers need to know of their grids: computed on the host.

The libraries' models compute this from tokens and grids on the GPU, and the host waits for each number that
is the size of a tensor: 43 times in a forward pass of Qwen2.5-VL with two images, and 71 times of Qwen3-VL.
Prompts and grids are known on the host. `megatron/vision.py` gives the models these tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import vision_utils

from megatron_gvpo.groups import Image
from megatron_gvpo.megatron.batch import PackedBatch


@dataclass(frozen=True)
class ImageTokens:
    """The images of a pack, in the order of its sequences, and the positions of its tokens.

    All tensors are on the host.
    """

    images: list[Image]
    indices: list[int]  # into t, of the tokens that stand for the images, ascending
    position_3t: Tensor  # int64: time, height and width of every token, from 0 in every sequence

    @staticmethod
    def of(batch: PackedBatch, placeholder: int, merge: int) -> ImageTokens:
        """Find the images of a pack without shared prompts and conversations.

        `placeholder`: the token that stands for images in prompts. In a response it is an ordinary token,
        as in the engine that sampled it. `merge`: a token stands for `merge` x `merge` patches.
        """
        assert batch.rows.turns is None and not batch.followers, "only prompts of their own have images"
        images: list[Image] = []
        indices: list[int] = []
        positions: list[Tensor] = []
        of_rows = batch.rows.images or [()] * len(batch.order)
        begin = 0
        for row, length in zip_longest(batch.order, batch.lengths):  # padding at the end has no row
            of_row = () if row is None else of_rows[row]
            starts = [] if row is None else _starts(batch.rows.prompt_ids[row], of_row, placeholder)
            positions.append(_positions(length, of_row, starts, merge))
            for image, start in zip(of_row, starts, strict=True):
                indices += range(begin + start, begin + start + image.tokens)
            images += of_row
            begin += length
        return ImageTokens(images, indices, torch.cat(positions, dim=1))

    @property
    def grid_n3(self) -> Tensor:
        """The patches of each image in time, height and width, int64."""
        return torch.tensor([image.grid for image in self.images])


def _starts(prompt: Sequence[int], images: Sequence[Image], placeholder: int) -> list[int]:
    """Return the index in the prompt of every image's first token."""
    ids, starts, end = list(prompt), [], 0
    assert ids.count(placeholder) == sum(image.tokens for image in images), "placeholders of other images"
    for image in images:
        starts.append(ids.index(placeholder, end))
        end = starts[-1] + image.tokens
    return starts


def _positions(length: int, images: Sequence[Image], starts: Sequence[int], merge: int) -> Tensor:
    """Return the positions of a sequence's tokens in three axes, int64 [3, length].

    Text advances all axes by one a token. An image's tokens lie in a grid, and the text behind it goes on
    after the grid's longest side (Qwen2-VL, arXiv 2409.12191).
    """
    parts, end, position = [], 0, 0
    for image, start in zip(images, starts, strict=True):
        time, height, width = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
        parts.append(torch.arange(position, position + start - end).expand(3, -1))
        position += start - end
        axes = [torch.arange(position, position + size) for size in (time, height, width)]
        parts.append(torch.cartesian_prod(*axes).T)
        position += max(time, height, width)
        end = start + image.tokens
    parts.append(torch.arange(position, position + length - end).expand(3, -1))
    return torch.cat(parts, dim=1)


def qwen2_5_arguments(tower: Any, grid_n3: Tensor) -> dict[str, Tensor]:
    """Return what the forward pass of transformers' tower (5.19) else computes from the grids, on the host.

    The lengths stay there: the tower cuts its sequences by them, and does so in every layer.
    """
    index, window_ends = vision_utils.get_vision_window_index(
        grid_n3, tower.spatial_merge_size, tower.window_size, tower.patch_size
    )
    return {
        "position_ids": vision_utils.get_vision_position_ids(grid_n3, tower.spatial_merge_size),
        "cu_seqlens": vision_utils.get_vision_cu_seqlens(grid_n3),
        "window_index": index,
        "cu_window_seqlens": window_ends,
    }


def qwen3_interpolation(grid_n3: Tensor, side: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return how every patch's position embedding is made of four of a table, on the host.

    Indices, int64, and weights, fp32, both [4, patches]. The table is a square of `side` x `side` positions.
    """
    index_p4, weight_p4 = vision_utils.get_vision_interpolation_indices_and_weights(
        grid_n3, side, mode="bilinear", align_corners=True, spatial_merge_size=merge
    )
    return index_p4.T.contiguous(), weight_p4.T.contiguous()


def image_ends(grid_n3: Tensor) -> tuple[Tensor, int]:
    """Return the ends of the images among their patches, int32 [n + 1] from 0, and the longest image."""
    ends = vision_utils.get_vision_cu_seqlens(grid_n3)
    return ends, int(ends.diff().max())

"""The supports of sampled tokens: the tokens that top-p, top-k and min-p allowed at each position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megatron_gvpo.types import on_device

# The logit of a token outside the support. It is finite, so that no difference of two of them is NaN, and so
# low that e^(it - any logit) is 0.
HIDDEN = -1e30


@dataclass(frozen=True)
class Supports:
    """The supports of r tokens; a token with count 0 was sampled from the whole vocabulary."""

    ids_k: Tensor  # int64 [k]: the members of all supports, token after token; global token ids
    count_r: Tensor  # int64 [r], on the host: the number of members of each support

    def on(self, device: torch.device) -> Supports:
        """The same supports with their members on `device`."""
        return Supports(on_device(self.ids_k, device), self.count_r)

    @cached_property
    def offsets(self) -> list[int]:
        """Where each token's members begin in `ids_k`, r + 1 numbers."""
        return [0, *torch.cumsum(self.count_r, 0).tolist()]

    @cached_property
    def row_k(self) -> Tensor:
        """The token that each member belongs to, int64 [k]."""
        row_k = torch.repeat_interleave(torch.arange(len(self.count_r)), self.count_r)
        return on_device(row_k, self.ids_k.device)

    @cached_property
    def truncated_r(self) -> Tensor:
        """True for tokens with a support, bool [r], on the members' device."""
        return on_device(self.count_r > 0, self.ids_k.device)

    def select(self, is_chosen_r: Tensor) -> Supports:
        """The supports of the tokens where `is_chosen_r`, bool [r] on the host, is true."""
        is_chosen_k = torch.repeat_interleave(is_chosen_r, self.count_r)
        index_k = on_device(is_chosen_k.nonzero().flatten(), self.ids_k.device)
        return Supports(self.ids_k.index_select(0, index_k), self.count_r[is_chosen_r])

    def shifted(self, first_id: int) -> Supports:
        """The same supports in columns of a shard of the vocabulary that begins with token `first_id`."""
        return Supports(self.ids_k - first_id, self.count_r)

    def narrow(self, most: int) -> Tensor:
        """True for tokens with a support of at most `most` members, bool [r] on the host."""
        return (self.count_r > 0) & (self.count_r <= most)

    def hide_(self, tile_rv: Tensor, rows: slice, first_column: int = 0) -> None:
        """Set the logits of a tile to HIDDEN where the column is not in its row's support.

        `rows`: the tokens of the tile; `first_column`: the column, as `ids_k` count them, where it begins.
        """
        height, width = tile_rv.shape
        members = slice(self.offsets[rows.start], self.offsets[rows.stop])
        column_k = self.ids_k[members] - first_column
        flat_k = (self.row_k[members] - rows.start) * width + column_k
        is_inside_k = (column_k >= 0) & (column_k < width)
        # Members outside the tile write to an extra element; leaving them out would make the host wait for
        # the GPU.
        flat = torch.empty(height * width + 1, dtype=torch.bool, device=tile_rv.device)
        is_hidden_rv = flat[:-1].view(height, width)
        is_hidden_rv.copy_(self.truncated_r[rows, None].expand(height, width))
        flat.index_fill_(0, torch.where(is_inside_k, flat_k, height * width), False)
        tile_rv.masked_fill_(is_hidden_rv, HIDDEN)

"""The operations on a tile of logits that a backend must have, and the backend in PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from megatron_gvpo.kernels.mathematics import empty_statistics, label_columns


class Tiles(ABC):
    """A backend's operations on a tile of logits z_rv [rows, columns], in the accumulator's dtype.

    The rows of z_rv are contiguous, and its content is lost. `labels_r` are column numbers of the tile; a
    number outside the tile means that another tile has the label. mathematics.py defines the statistics.
    """

    @abstractmethod
    def statistics_(self, z_rv: Tensor, labels_r: Tensor, entropy: bool) -> Tensor:
        """Return the statistics of the tile's columns."""

    @abstractmethod
    def stash_(self, z_rv: Tensor, labels_r: Tensor, out_rv: Tensor, entropy: bool) -> Tensor:
        """out_rv <- e^(z - row maximum); returns the statistics. out_rv may be z_rv itself."""

    @abstractmethod
    def gradient_(
        self,
        z_rv: Tensor,
        max_r: Tensor,
        offset_r: Tensor,
        slope_r: Tensor | None,
        labels_r: Tensor,
        g_r: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """e^(z - max) (offset + slope (z - max)) + 1[label] g in `dtype`."""

    def product_(
        self, x_rh: Tensor, w_vh: Tensor, labels_r: Tensor, temperature: float | Tensor, out_rv: Tensor
    ) -> Tensor | None:
        """out_rv <- e^(z - an offset of the row), z = x_rh w_vh^T / T, without logits; return the statistics.

        The offset takes the maximum's part in them. It is at most ln(2) / 2 from it. Without entropy.
        Returns None, and writes nothing, where the backend has no such product.
        """
        return None


class TorchTiles(Tiles):
    """Tiles in PyTorch, in place, on any device and in any floating dtype. Each operation takes one pass."""

    def statistics_(self, z_rv: Tensor, labels_r: Tensor, entropy: bool) -> Tensor:
        """Return the statistics, and leave e^(z - row maximum) in z_rv."""
        if z_rv.shape[1] == 0:
            return empty_statistics(labels_r, z_rv.dtype, entropy)
        index_r, owned_r = label_columns(z_rv.shape[1], labels_r)
        target_r = z_rv.gather(1, index_r[:, None])[:, 0].masked_fill(~owned_r, -torch.inf)
        max_r = z_rv.amax(1).clamp(min=torch.finfo(z_rv.dtype).min)
        z_rv.sub_(max_r[:, None])
        if not entropy:
            return torch.stack((max_r, z_rv.exp_().sum(1), target_r))
        shifted_rv = z_rv.clone()
        return torch.stack((max_r, z_rv.exp_().sum(1), target_r, shifted_rv.mul_(z_rv).sum(1)))

    def stash_(self, z_rv: Tensor, labels_r: Tensor, out_rv: Tensor, entropy: bool) -> Tensor:
        stats_sr = self.statistics_(z_rv, labels_r, entropy)
        if out_rv is not z_rv:
            out_rv.copy_(z_rv)
        return stats_sr

    def gradient_(
        self,
        z_rv: Tensor,
        max_r: Tensor,
        offset_r: Tensor,
        slope_r: Tensor | None,
        labels_r: Tensor,
        g_r: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        z_rv.sub_(max_r[:, None])
        if slope_r is None:
            z_rv.exp_().mul_(offset_r[:, None])
        else:
            exp_rv = z_rv.exp()
            z_rv.mul_(slope_r[:, None]).add_(offset_r[:, None]).mul_(exp_rv)
        return _add_at_labels_(z_rv, labels_r, g_r).to(dtype)


def _add_at_labels_(d_rv: Tensor, labels_r: Tensor, value_r: Tensor) -> Tensor:
    """d_rv[i, labels_r[i]] += value_r[i] if the label lies in this tile; without host synchronisation."""
    if d_rv.shape[1] > 0:
        index_r, owned_r = label_columns(d_rv.shape[1], labels_r)
        d_rv.scatter_add_(1, index_r[:, None], value_r.masked_fill(~owned_r, 0)[:, None])
    return d_rv

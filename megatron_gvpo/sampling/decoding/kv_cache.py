"""The embedded engine's keys and values: a new column is written in place, and so is a row that moves.

The cache of transformers copies all keys and values of a layer for every token, and again whenever a row
leaves the batch: on a CPU, most of a small model's sampling time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_LEAST_GROWTH = 16  # columns


class KeyValueCache(DynamicCache):
    """A cache for a batch whose rows leave one after the other.

    Layers with full attention write in place. Other layers, such as those with a sliding window, are those
    of transformers.
    """

    def __init__(self, config: Any, most_columns: int) -> None:
        super().__init__(config=config)
        self.layers: list[Any] = [
            _InPlace(most_columns) if type(x) is DynamicLayer else x for x in self.layers
        ]

    def keep(self, stays: Tensor) -> Tensor:
        """Drop the rows where `stays`, bool [rows], is False; the last rows move to the places that are free.

        Returns the former places of the rows that are left, int64, in their new order.
        """
        left = int(stays.sum())
        free = (~stays[:left]).nonzero().squeeze(1)
        moved = left + stays[left:].nonzero().squeeze(1)
        rows = torch.arange(left, device=stays.device).index_copy_(0, free, moved)
        for layer in self.layers:
            if isinstance(layer, _InPlace):
                layer.move(moved, free, left)
            else:
                layer.batch_select_indices(rows)
        return rows


class _InPlace(DynamicLayer):
    """A layer with full attention. Its keys and values are views of memory for further columns."""

    def __init__(self, most_columns: int) -> None:
        super().__init__()
        self._memories = _Memory(most_columns), _Memory(most_columns)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        of_keys, of_values = self._memories
        self.keys, self.values = of_keys.append(key_states), of_values.append(value_states)
        self.is_initialized = True
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Copy the rows at `indices`, which may repeat a row."""
        if self.is_initialized:
            self.keys, self.values = (memory.select(indices) for memory in self._memories)

    def move(self, moved: Tensor, free: Tensor, left: int) -> None:
        """Copy the rows `moved` to the places `free`, and keep the first `left` rows."""
        if self.is_initialized:
            self.keys, self.values = (memory.move(moved, free, left) for memory in self._memories)


class _Memory:
    """A tensor [rows, heads, columns, dim] that grows by columns, with room for further ones behind it."""

    def __init__(self, most_columns: int) -> None:
        self._most, self._columns, self._rows = most_columns, 0, 0
        self._data: Tensor | None = None  # [rows or more, heads, columns or more, dim]

    def append(self, new: Tensor) -> Tensor:
        """Write the columns `new` behind those that are held; returns all."""
        rows, heads, columns, dim = new.shape
        begin, end = self._columns, self._columns + columns
        if self._data is None or end > self._data.shape[2]:
            room = min(end + max(_LEAST_GROWTH, end // 8), max(end, self._most))
            data = new.new_zeros(rows, heads, room, dim)  # attention reads the room, too
            if self._data is not None:
                data[:, :, :begin] = self._data[:rows, :, :begin]
            self._data, self._rows = data, rows
        self._data[:rows, :, begin:end] = new
        self._columns = end
        return self._held()

    def select(self, rows: Tensor) -> Tensor:
        """Copy the rows at `rows`, without room: the next column makes it."""
        self._data, self._rows = self._held()[rows], len(rows)
        return self._data

    def move(self, moved: Tensor, free: Tensor, left: int) -> Tensor:
        held = self._held()
        held[free] = held[moved]
        self._rows = left
        return self._held()

    def _held(self) -> Tensor:
        assert self._data is not None
        return self._data[: self._rows, :, : self._columns]

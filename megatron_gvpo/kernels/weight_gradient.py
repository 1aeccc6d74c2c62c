"""The gradient of the output layer's weight: added to Megatron's fp32 gradient buffer, if the weight has one.

Megatron's data parallelism gives every parameter `main_grad`, a view of the buffer that it reduces, and a
hook that adds `.grad` to it. A layer that adds to `main_grad` itself sets `grad_added_to_main_grad`. It must
still return a tensor, because the hook runs only then. It returns zeros if `zero_out_wgrad` is set: the
weight then has a second use (tied embeddings), and autograd adds that gradient to the returned tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gvpo.kernels.mathematics import accumulator


def main_grad(weight_vh: Tensor) -> Tensor | None:
    """Return Megatron's buffer of this weight's gradient, in the accumulator's dtype, or None."""
    main_vh = getattr(weight_vh, "main_grad", None)  # Megatron sets these attributes; a plain weight has none
    if not isinstance(main_vh, Tensor) or not hasattr(weight_vh, "grad_added_to_main_grad"):
        return None
    return main_vh if main_vh.dtype == accumulator(weight_vh.dtype) else None


def added(weight_vh: Tensor) -> Tensor:
    """Return the autograd function's result for a weight whose gradient is already in `main_grad`."""
    weight_vh.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight_vh, "zero_out_wgrad", False):
        return torch.zeros_like(weight_vh)
    return torch.empty_like(weight_vh)


class WeightGradient:
    """Sums dW of one backward, a slice of W's rows (the logits' columns) at a time, each slice once."""

    def __init__(self, weight_vh: Tensor) -> None:
        self._weight_vh = weight_vh
        self._main_vh = main_grad(weight_vh)
        self._own_vh = torch.zeros_like(weight_vh) if self._main_vh is None else None
        self._scratch_ch: Tensor | None = None
        self.in_place = self._main_vh is not None  # sums need no memory of their own

    def begin(self, columns: slice) -> Tensor:
        """Return [c, h] in the accumulator's dtype: the caller adds the products of these rows to it."""
        if self._main_vh is not None:
            return self._main_vh[columns]
        rows, width = columns.stop - columns.start, self._weight_vh.shape[1]
        if self._scratch_ch is None or len(self._scratch_ch) < rows:
            dtype = accumulator(self._weight_vh.dtype)
            self._scratch_ch = self._weight_vh.new_empty(rows, width, dtype=dtype)
        return self._scratch_ch[:rows].zero_()

    def end(self, columns: slice, dw_ch: Tensor) -> None:
        """Finish the rows of `begin`. Without Megatron's buffer, their sum is rounded here, once."""
        if self._own_vh is not None:
            self._own_vh[columns] = dw_ch

    def result(self) -> Tensor:
        """Return the autograd function's result for the weight."""
        return added(self._weight_vh) if self._own_vh is None else self._own_vh

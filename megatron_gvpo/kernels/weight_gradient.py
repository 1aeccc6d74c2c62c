"""Where the output layer's dW goes: straight into Megatron's fp32 buffer, where the weight has one.

Megatron's data parallelism gives every parameter `main_grad`, a view of the buffer that it reduces, and a
hook that adds `.grad` to it. A layer that adds there by itself says so by `grad_added_to_main_grad`, returns
some tensor all the same, because the hook hangs on it, and returns zeros where `zero_out_wgrad` says that
the weight has a second use (tied embeddings), whose gradient autograd adds to what is returned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_gvpo.kernels.products import accumulator


def main_grad(weight_vh: Tensor) -> Tensor | None:
    """Megatron's buffer of this weight's gradient, in the accumulator's dtype; None where there is none."""
    main_vh = getattr(weight_vh, "main_grad", None)
    if not isinstance(main_vh, Tensor) or not hasattr(weight_vh, "grad_added_to_main_grad"):
        return None
    return main_vh if main_vh.dtype == accumulator(weight_vh.dtype) else None


def added(weight_vh: Tensor) -> Tensor:
    """What the autograd function returns for a weight whose gradient is in `main_grad`."""
    weight_vh.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight_vh, "zero_out_wgrad", False):
        return torch.zeros_like(weight_vh)
    return torch.empty_like(weight_vh)


class WeightGradient:
    """Sums dW of one backward, some rows of W (columns of logits) at a time, each of them once."""

    def __init__(self, weight_vh: Tensor) -> None:
        self._weight_vh = weight_vh
        self._main_vh = main_grad(weight_vh)
        self._own_vh = torch.zeros_like(weight_vh) if self._main_vh is None else None
        self._scratch_ch: Tensor | None = None
        self.in_place = self._main_vh is not None  # whole or in parts, no memory is needed besides

    def begin(self, columns: slice) -> Tensor:
        """[c, h] in the accumulator's dtype, to add these rows' products to."""
        if self._main_vh is not None:
            return self._main_vh[columns]
        rows, width = columns.stop - columns.start, self._weight_vh.shape[1]
        if self._scratch_ch is None or len(self._scratch_ch) < rows:
            dtype = accumulator(self._weight_vh.dtype)
            self._scratch_ch = self._weight_vh.new_empty(rows, width, dtype=dtype)
        return self._scratch_ch[:rows].zero_()

    def end(self, columns: slice, dw_ch: Tensor) -> None:
        """All products of `begin`'s rows are in: without a buffer of Megatron's they are rounded, once."""
        if self._own_vh is not None:
            self._own_vh[columns] = dw_ch

    def result(self) -> Tensor:
        """What the autograd function returns for the weight."""
        return added(self._weight_vh) if self._own_vh is None else self._own_vh

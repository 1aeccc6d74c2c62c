"""Mends vLLM's speculative decoding on CPUs. It does nothing where there is CUDA.

vLLM 0.32.0 without Triton spreads each request's temperature over its drafted tokens by a C++ function that
writes into a copy of the output. The temperatures were uninitialised memory, and so were the log-probs.
"""

from __future__ import annotations

from typing import Any

import torch


def mend_temperatures() -> None:
    """Replace vLLM's function in this process. vLLM registers it after its plugins are loaded."""
    if torch.cuda.is_available():
        return
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,  # noqa: N803 - vLLM's name
) -> None:
    """Give each token its request's value, in place: output [tokens], values and ends [requests].

    A request's tokens end before `ends`. The value `replace_from` becomes `replace_to`.
    """
    counts = ends.long().diff(prepend=ends.new_zeros(1, dtype=torch.long))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))

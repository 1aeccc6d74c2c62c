"""`from megatron_gvpo.core.lazy_torch import torch`: torch, imported at the first use of its attributes.

A block of a method is its options and the function that they configure, in one class. A configuration needs
the options only, so `recipes`, `plan` and the refusal of a wrong configuration do not wait for torch. Modules
that a configuration imports take torch from here, and `Tensor` under TYPE_CHECKING; tests/cli/test_startup.py
fails if one does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()

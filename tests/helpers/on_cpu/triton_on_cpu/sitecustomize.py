"""Interprets the Triton kernels of vLLM's newer model runner, which alone returns routed experts.

Only tests use it. Python imports this module first in each of the server's processes, because vLLM looks for
a Triton that knows the CPU during its own import. The kernels' code stays vLLM's own.
"""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

os.environ["TRITON_INTERPRET"] = "1"

from triton.backends import backends

backends["cpu"] = next(iter(backends.values()))


class TopKInTorch(MetaPathFinder):
    """Makes vLLM apply top-k and top-p in PyTorch, as it does without Triton.

    The interpreter's loop over rows yields integers, and vLLM's kernel calls methods of tensors on them.
    """

    NAME = "vllm.v1.sample.ops.topk_topp_sampler"

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self.NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def without_triton(module: ModuleType) -> None:
            execute(module)
            module.HAS_TRITON = False  # type: ignore[attr-defined]

        spec.loader.exec_module = without_triton  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, TopKInTorch())

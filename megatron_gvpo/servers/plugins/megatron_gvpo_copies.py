"""Lets vLLM reload models that copy weights into their parameters without a loader, such as GPT-OSS.

While vLLM (0.32.0) reloads, parameters are on the meta device, and each parameter's loader keeps tensors
until a layer is complete. GPT-OSS calls no loader for its experts and attention sinks: it copies, and a copy
to the meta device is lost without an error, so that the server would continue with the old weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
from vllm.model_executor.model_loader.reload.meta import CopyCounter
from vllm.model_executor.model_loader.weight_utils import default_weight_loader


class LoadCopies(TorchFunctionMode):
    """Context in which copies into parameters of `model`, which is being reloaded, go through a loader.

    Raises RuntimeError for a copy into a part of a parameter.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._parameters = {
            id(parameter): (layer, name)
            for layer in model.modules()
            for name, parameter in layer._parameters.items()
            if parameter is not None and parameter.is_meta
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # vLLM runs a loader once on the meta device, to count the elements that it would copy.
        if isinstance(_get_current_dispatch_mode(), CopyCounter):
            return func(*args, **(kwargs or {}))
        if func == torch.Tensor.data.__get__ and id(args[0]) in self._parameters:  # type: ignore[attr-defined]
            return args[0]
        if func is not torch.Tensor.copy_ or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        if id(args[0]) not in self._parameters:
            raise RuntimeError(
                "the model copies into a part of a weight while vLLM reloads: it would be lost"
            )
        layer, name = self._parameters[id(args[0])]
        args[0].weight_loader = default_weight_loader
        args[0].weight_loader = make_online_process_loader(layer, name)
        args[0].weight_loader(args[0], args[1])
        return args[0]

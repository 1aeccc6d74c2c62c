"""Frees what the modules of a model keep when a pass over micro-batches has ended.

megatron-core (0.19.2) replaces it in the next forward pass, and nothing reads it before. Until then it would
be missing to a rollout engine on the same GPUs, and to the head of the next pass.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from megatron.core.utils import get_attr_wrapped_model

from megatron_gvpo.megatron.model.model import Model


def drop_leftovers(model: Model) -> None:
    """Drop the last micro-batch's routing and its pipeline stage's input, and the rotary frequencies.

    The input of a stage comes with its gradient. Rotary classes cache up to 32 tables of frequencies, one for
    each length of a micro-batch's longest sequence, also those of models that are gone.
    """
    if model.replay is not None:
        model.replay.begin(training=False)
    for chunk in model.chunks:
        get_attr_wrapped_model(chunk, "set_input_tensor")([None])
    for module in (*model.rotary, *(module for chunk in model.chunks for module in chunk.modules())):
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None:
            _drop_routing(dispatcher)
        clear = getattr(module.forward, "cache_clear", None)
        if clear is not None:
            clear()


def _drop_routing(dispatcher: Any) -> None:
    """Drop what a dispatcher of tokens to experts keeps of a forward pass; Megatron lists the attributes.

    The router's probabilities are part of the layer's graph. With full recompute it is built in the backward
    pass, and they would keep the layer's input and its gradient.
    """
    for name in dispatcher.cudagraph_attrs:
        path, _, attribute = name.rpartition(".")
        owner = attrgetter(path)(dispatcher) if path else dispatcher
        setattr(owner, attribute, None)

"""Runs inside SGLang's schedulers: loads weights from shared memory, patches and shards from process groups.

SGLang calls `receive` as a custom weight loader (`--custom-weight-loader megatron_gvpo_sglang.receive`, with
this folder on the server's PYTHONPATH) for each request to /update_weights_from_tensor that names it. The one
tensor of the request holds an order in JSON. The weights themselves are in shared memory, or come by
broadcast from the trainer's rank 0.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from megatron_gvpo_group import join, next_broadcast
from megatron_gvpo_memory import BucketLayout, opened, tell_gpus
from megatron_gvpo_patches import apply_patches, check_patched
from megatron_gvpo_shards import Shards

# By name of a group: the group, if this rank is in it, the store that keeps it alive, and the order to join
# it.
_groups: dict[str, tuple[Any, Any, dict[str, Any]]] = {}
_broken: list[str] = []  # the errors of broadcasts in the present group
_shards: list[Shards] = []  # this rank's part in the group's sharded pushes, if any


def receive(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Carry out one order of the trainer.

    "join" joins a process group, "apply" applies the patches of its next broadcast, "check" checks them after
    the last, "load" loads a bucket from shared memory, "tell" writes which GPUs this rank sees, "read_layout"
    learns this rank's layout, "shards" takes part in a sharded push, and "leave" leaves its group.
    """
    order = json.loads(bytes(named_tensors[0][1].cpu().numpy()))
    match order["op"]:
        case "join":
            _join(order)
        case "load":
            _load(model, order)
        case "tell":
            tell_gpus(order["file"])
        case "check":
            _check(model)
        case "read_layout":
            _part_in(model, order).read_layout(model.load_weights)
        case "shards":
            _receive_shards(model)
        case "leave":
            if order["name"] in _groups:  # the order may come late, when this rank is in another group
                _leave_shards()
        case _:
            _apply(model, order)


def _join(order: dict[str, Any]) -> None:
    options = ("address", "port", "rank", "world_size", "backend", "timeout", "max_ctas", "memory")
    store, group = join(**{option: order[option] for option in options})
    _groups.clear()  # the trainer uses one group at a time, and may never have left the last
    _shards.clear()
    _broken.clear()
    _groups[order["name"]] = (group, store, order)


def _apply(model: torch.nn.Module, order: dict[str, Any]) -> None:
    try:
        wire = next_broadcast(_groups[order["name"]][0], order["bytes"], next(model.parameters()).device)
    # torch raises it if the trainer or another server has died; SGLang would end, too
    except RuntimeError as error:
        _broken.append(str(error))
        return
    apply_patches(model, wire, order["patches"])


def _check(model: torch.nn.Module) -> None:
    # the trainer takes these broadcasts for received: SGLang ends, and restarts with its first weights
    if _broken:
        raise RuntimeError(f"a broadcast of weight patches failed: {_broken[0]}")
    check_patched(model)


def _part_in(model: torch.nn.Module, order: dict[str, Any]) -> Shards:
    group, store, joined = _groups[order["name"]]
    device = next(model.parameters()).device
    _shards[:] = [Shards(group, store, order["rank"], device, joined["memory"], joined["timeout"])]
    return _shards[0]


def _receive_shards(model: Any) -> None:
    try:
        _shards[0].receive(model.load_weights)
    # SGLang ends when a loader raises, so the trainer gets the error in another way
    except Exception as error:
        _shards[0].report(error)
        _leave_shards()  # other ranks wait for this one until its connections end


def _leave_shards() -> None:
    while _shards:
        _shards.pop().close()
    _groups.clear()


def _load(model: Any, order: dict[str, Any]) -> None:
    """Load a bucket from a file in shared memory, or from a GPU's memory."""
    layout = BucketLayout(*zip(*order["tensors"], strict=True))
    mapped = opened(order["handle"], layout.nbytes) if "handle" in order else layout.mapped(order["file"])
    model.load_weights(layout.views(mapped.to(next(model.parameters()).device)))
    if mapped.is_cuda:  # the trainer overwrites this memory after the answer
        torch.cuda.synchronize()

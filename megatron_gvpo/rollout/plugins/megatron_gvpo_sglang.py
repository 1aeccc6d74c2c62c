"""Runs inside SGLang's schedulers: weights from shared memory, and patches over a torch process group.

SGLang calls `receive` as a custom weight loader (`--custom-weight-loader megatron_gvpo_sglang.receive`, with
this folder on the server's PYTHONPATH) for each `/update_weights_from_tensor` that names it. The one tensor
that comes with the call holds an order in JSON; the weights themselves come by broadcast from the trainer's
rank 0.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import torch
import torch.distributed as dist
from megatron_gvpo_bucket import Layout
from megatron_gvpo_ipc import opened, tell_gpus
from megatron_gvpo_patches import apply_patches, check_patched

_groups: dict[str, tuple[Any, Any]] = {}  # by name: process group and its store, which must live as long


def receive(model: torch.nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Carry out the order: "join" a group, "apply" the patches of its next broadcast, "check" them when all
    have come, "load" a bucket of shared memory, or "tell" which GPUs this rank sees."""
    order = json.loads(bytes(named_tensors[0][1].cpu().numpy()))
    if order["op"] == "join":
        _join(order)
    elif order["op"] == "load":
        _load(model, order)
    elif order["op"] == "tell":
        tell_gpus(order["file"])
    elif order["op"] == "check":
        check_patched(model)
    else:
        _apply(model, order)


def _join(order: dict[str, Any]) -> None:
    timeout = datetime.timedelta(seconds=order["timeout"])
    world = order["world_size"]
    store = dist.TCPStore(order["address"], order["port"], world, False, timeout)
    if order["backend"] == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group: Any = dist.ProcessGroupNCCL(store, order["rank"], world, options)
    else:
        group = dist.ProcessGroupGloo(store, order["rank"], world, timeout)
    _groups.clear()  # of groups that were never left: the trainer uses one at a time
    _groups[order["name"]] = (group, store)


def _apply(model: torch.nn.Module, order: dict[str, Any]) -> None:
    wire = torch.empty(order["bytes"], dtype=torch.uint8, device=next(model.parameters()).device)
    _groups[order["name"]][0].broadcast([wire], dist.BroadcastOptions()).wait()
    apply_patches(model, wire, order["patches"])


def _load(model: Any, order: dict[str, Any]) -> None:
    """Tensors, their bytes one after another, from a file in memory, or from a GPU's memory."""
    layout = Layout(*zip(*order["tensors"], strict=True))
    mapped = opened(order["handle"], layout.nbytes) if "handle" in order else layout.mapped(order["file"])
    model.load_weights(layout.views(mapped.to(next(model.parameters()).device)))
    if mapped.is_cuda:  # the trainer overwrites it after the answer
        torch.cuda.synchronize()

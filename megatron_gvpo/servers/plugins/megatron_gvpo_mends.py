"""Functions of torch, transformers and vLLM that are replaced inside an engine's processes.

Each part below corrects one fault of a released version. The engines call these functions as general
plugins in each of their processes: SGLang by `entry_points.txt`, vLLM by `megatron_gvpo_vllm.register`.
"""

from __future__ import annotations

import functools
import importlib
import socket
from collections.abc import Callable
from typing import Any

import torch

# --- both engines: a config.json whose `model_type` transformers does not have, of a model that it has ------
# Without this the engines require the checkpoint's own Python files. megatron_gvpo.huggingface.architectures
# does the same for the trainer.

SAME_MODEL = {"kimi_k2": "deepseek_v3"}


def add_model_types() -> None:
    """Register the model types in this process. Each process of an engine calls this as a general plugin."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for named, same in SAME_MODEL.items():
        CONFIG_MAPPING.register(named, CONFIG_MAPPING[same], exist_ok=True)


# --- both engines: torch's TCPStore listens at the address that it is given, and not on all of the machine's

rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function of torch has the same name
_TCPStore = rendezvous.TCPStore


def bind_stores() -> None:
    """Make a process that hosts the store of a default process group bind it to its own address."""
    setattr(rendezvous, "TCPStore", bound_store)  # noqa: B010 - a function in place of the class


def bound_store(host_name: str, port: int, *arguments: Any, **named: Any) -> Any:
    """A TCPStore; if this process hosts it, on a socket bound to `host_name` alone."""
    if not named.get("is_master"):
        return _TCPStore(host_name, port, *arguments, **named)
    family, _, _, _, address = socket.getaddrinfo(host_name, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    # the address belongs to this machine only by translation, so the store listens on all, as in torch
    except OSError:
        listening.close()
    else:
        listening.listen(1024)
        port = listening.getsockname()[1]
        named["master_listen_fd"] = listening.detach()  # the store closes it
    return _TCPStore(host_name, port, *arguments, **named)


# --- SGLang without an accelerator: host memory is not pinned -----------------------------------------------
# SGLang (0.5.23) asks torch for pinned memory wherever it copies an adapter, also for its CPU kernels
# (`--lora-backend torch_native`), and a torch without an accelerator refuses that. Pinning changes how fast
# memory is copied, and nothing else.


def leave_unpinned() -> None:
    """Make this process ignore requests to pin memory if it has no accelerator."""
    if torch.accelerator.is_available():
        return
    for name in ("tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # noqa: B010 - torch's is of another type


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return make(*arguments, **named)

    return made


# --- vLLM without CUDA: temperatures of drafted tokens ------------------------------------------------------
# vLLM 0.32.0 without Triton spreads each request's temperature over its drafted tokens by a C++ function that
# writes into a copy of the output. The temperatures were uninitialised memory, and so were the log-probs.


def mend_temperatures() -> None:
    """Replace vLLM's C++ function by `expand` in this process: vLLM registers it after its plugins."""
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

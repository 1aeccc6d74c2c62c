"""Calls a user's function on rank 0 and gives every rank its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron_gvpo.rollout.request import RolloutError
from megatron_gvpo.runtime.collectives import broadcast_msgpack
from megatron_gvpo.runtime.user_functions import UserFunctionError, described


def call_on_rank0(where: str, call: Callable[[], Any]) -> Any:
    """`call()` of rank 0, on every rank, in msgpack's types. A collective.

    Whatever the user's function raises, every rank raises as RolloutError, which begins with `where`: no rank
    waits for another, and the run writes a checkpoint.
    """
    said, cause = None, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            said = {"value": call()}
        except Exception as error:
            text = str(error) if isinstance(error, UserFunctionError) else described(error)
            said, cause = {"error": text}, error
    said = broadcast_msgpack(said)
    if "error" in said:
        raise RolloutError(f"{where}: {said['error']}") from cause
    return said["value"]

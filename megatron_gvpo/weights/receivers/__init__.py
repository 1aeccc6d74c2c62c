"""Receivers, the trainer's HTTP clients in weight pushes: for each engine, a class for each transport."""

from __future__ import annotations

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.weights.receivers import sglang, vllm
from megatron_gvpo.weights.transport import WeightReceiver

RECEIVERS: dict[str, dict[str, type[WeightReceiver]]] = {  # by engine, then by transport
    "sglang": sglang.RECEIVERS,
    "vllm": vllm.RECEIVERS,
}


def receiver_class(engine: str, transport: str) -> type[WeightReceiver]:
    """The receiver for an engine and a transport, by their names. Raises ConfigError if there is none."""
    receivers = RECEIVERS[engine]
    if transport not in receivers:
        raise ConfigError(
            f"rollout.weights.transport={transport} does not reach servers of rollout.engine={engine}; "
            f"these do: {', '.join(receivers)}"
        )
    return receivers[transport]

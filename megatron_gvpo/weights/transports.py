"""The transports by name, as "module:class". Nothing here loads torch, so the configuration may ask.

A new transport needs its module, an entry here, and for each engine a class in
megatron_gvpo.weights.receivers that the engine's RECEIVERS lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_gvpo.runtime.by_name import known, load_class

if TYPE_CHECKING:
    from megatron_gvpo.weights.transport import Transport

TRANSPORTS: dict[str, str] = {
    "broadcast": "megatron_gvpo.weights.broadcast:Broadcast",
    "sharded": "megatron_gvpo.weights.sharded:Sharded",
    "delta": "megatron_gvpo.weights.delta:Delta",
    "shared": "megatron_gvpo.weights.shared:Shared",
    "disk": "megatron_gvpo.weights.disk:Disk",
    "adapter": "megatron_gvpo.weights.adapters.transport:Adapter",
}


def transport_class(name: str) -> type[Transport]:
    """The transport of this name, a key of TRANSPORTS. Imports its module, which loads torch."""
    found: type[Transport] = load_class(TRANSPORTS, name)
    return found


def known_transport(name: str) -> str:
    """Returns a known name. Raises ValueError, which lists the transports, for any other."""
    return known(TRANSPORTS, name)

"""The transports by name, with their traits. Nothing here loads torch, so the configuration may ask.

A new transport needs its module, an entry here, and for each engine a class in
megatron_gvpo.weights.receivers that the engine's RECEIVERS lists.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_gvpo.core.lazy_imports import known


@dataclass(frozen=True)
class Traits:
    """The traits of a transport. Checks use these traits, and never compare a transport's name."""

    implementation: str  # "module:class" of its class; the import loads torch
    forms_group: bool = False  # forms a process group with the servers, over NCCL on GPUs
    colocated_ok: bool = True  # reaches servers on the trainer's own GPUs
    nodes_ok: bool = True  # reaches all parts of a server on several machines
    fp8_ok: bool = True  # can change a model that the servers keep in FP8
    sends_own: bool = False  # every rank sends the weights that it has itself, in place of buckets
    sends_adapter: bool = False  # sends the trained adapter, and no other weights
    sends_changes: bool = False  # sends changed elements with their positions in a checkpoint's tensors
    sends_files: bool = False  # sends files, which the engines read with their own loaders


TRANSPORTS = {
    "broadcast": Traits(
        "megatron_gvpo.weights.broadcast:Broadcast",
        forms_group=True,
        colocated_ok=False,  # NCCL forms no group of two processes on the same GPU
    ),
    "sharded": Traits(
        "megatron_gvpo.weights.sharded:Sharded",
        forms_group=True,
        colocated_ok=False,
        fp8_ok=False,  # blocks of FP8 have scales, which a rank cannot compute from its part alone
        sends_own=True,
    ),
    "colocated": Traits(
        "megatron_gvpo.weights.colocated:Colocated",
        nodes_ok=False,
        fp8_ok=False,  # as for sharded
        sends_own=True,
    ),
    "delta": Traits(
        "megatron_gvpo.weights.delta:Delta",
        forms_group=True,
        colocated_ok=False,
        fp8_ok=False,  # the engines keep FP8 weights in another arrangement than they load
        sends_changes=True,
    ),
    "shared": Traits("megatron_gvpo.weights.shared:Shared", nodes_ok=False),
    "disk": Traits("megatron_gvpo.weights.disk:Disk", sends_files=True),
    "adapter": Traits(
        "megatron_gvpo.weights.adapter:Adapter",
        fp8_ok=False,
        sends_adapter=True,
        sends_files=True,
    ),
}


def known_transport(name: str) -> str:
    """Returns a known name. Raises ValueError, which lists the transports, for any other."""
    return known(TRANSPORTS, name)

"""Predicts the seconds of a weight push, by transport, and its bottleneck."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from megatron_gvpo.planner.architecture import Architecture, Gpu
from megatron_gvpo.planner.memory_model import shard
from megatron_gvpo.planner.workload import NODE, Layout
from megatron_gvpo.weights.shard_plan import LEAST, ROUNDS

# The share of the network that a push reaches, with gathering, copies and loading. With it DeepSeek-V3 to
# servers of 32 GPUs is predicted at 2.5 s; NeMo-RL's resharding took 2.4 to 2.8 s (its
# docs/design-docs/nccl-reshard-refit.md).
PUSH_FRACTION = 0.4
ELEMENT = 2  # bytes of a weight in bf16


@dataclass(frozen=True)
class PushTime:
    """One push. `busiest_trainer` and `server` are the bytes that such a rank sends or receives."""

    seconds: float
    busiest_trainer: float
    server: float


def predicted(model: Architecture, gpu: Gpu, layout: Layout) -> PushTime:
    """A push over the layout's transport."""
    return TRANSPORTS[layout.transport](model, gpu, layout)


def fastest(model: Architecture, gpu: Gpu, layout: Layout) -> str:
    """The fastest of the transports that the layout can have."""
    return min(possible(model, layout), key=lambda name: TRANSPORTS[name](model, gpu, layout).seconds)


def possible(model: Architecture, layout: Layout) -> tuple[str, ...]:
    """The transports that the layout can have: merged adapters are sent whole."""
    complete, by_parts = ("broadcast", "sharded") if layout.rollout_gpus else ("shared", "colocated")
    return (complete,) if model.adapter_rank else (complete, by_parts)


def broadcast(model: Architecture, gpu: Gpu, layout: Layout) -> PushTime:
    """All weights are gathered by the trainer's first rank, then pass through it to every server rank.

    Colocated servers get them through memory (`shared`), from ranks that have all gathered them.
    """
    size = float(ELEMENT * model.parameters)
    link = gpu.network_gb_per_s if layout.rollout_gpus else min(gpu.nvlink_gb_per_s, gpu.network_gb_per_s)
    return PushTime(2 * size / (link * PUSH_FRACTION * 1e9), size, size)


@cache
def sharded(model: Architecture, gpu: Gpu, layout: Layout) -> PushTime:
    """Every trainer rank sends its share once, and the servers pass it on along a chain.

    The trainer rank with the largest share or a server rank with its part sets the pace. Before the last rank
    receives anything, the chain needs one round for each link to that rank.
    """
    copies = layout.dp * layout.cp
    expert_copies = layout.gpus // (layout.pp * layout.ep)
    stages = [shard(model, layout, stage) for stage in range(layout.pp)]
    # In a stage, tp ranks together hold the same dense weights as every other tp ranks, so all send equal
    # shares.
    share = max(stage.dense / copies + stage.experts / expert_copies for stage in stages) * ELEMENT
    one_server = Layout(layout.rollout_tp, tp=layout.rollout_tp, ep=layout.rollout_tp)
    part = shard(model, one_server, 0).total * ELEMENT
    pace = max(share, part) / (gpu.network_gb_per_s * PUSH_FRACTION * 1e9)
    way = layout.engines + layout.rollout_tp  # links from the trainer to the last rank
    rounds = min(ROUNDS * way, max(share, part) / LEAST)
    return PushTime(pace * (1 + way / rounds), share, part)


@cache
def colocated(model: Architecture, gpu: Gpu, layout: Layout) -> PushTime:
    """Every trainer rank gives the server rank on its GPU the weights that this rank needs.

    Weights that some rank of the machine holds move over NVLink at most; the rest comes over the network,
    once for every server rank. `server` is the bytes that a server rank gets in all, `busiest_trainer` the
    bytes that the ranks of the fullest stage send over the network. One round fills before the first is
    loaded.
    """
    of_stage = layout.gpus // layout.pp
    here = min(1.0, max(1, NODE // of_stage) / layout.pp)  # the share of the stages that a machine has
    # Neighbouring ranks, as many as expert parallelism has, hold different experts.
    experts_here = here * min(1.0, min(NODE, of_stage) / (layout.ep * layout.etp))

    def far(dense: float, experts: float) -> float:
        """The bytes of these weights that no rank of a machine holds."""
        return ELEMENT * (dense * (1 - here) + experts * (1 - experts_here))

    one_server = shard(model, Layout(layout.rollout_tp, tp=layout.rollout_tp, ep=layout.rollout_tp), 0)
    part = one_server.total * ELEMENT
    stages = [shard(model, layout, stage) for stage in range(layout.pp)]
    fullest = max(far(s.dense * layout.tp, s.experts * layout.ep * layout.etp) for s in stages)
    sends = fullest * layout.engines / of_stage
    gets = far(one_server.dense, one_server.experts)
    seconds = max(gets, sends) / (gpu.network_gb_per_s * PUSH_FRACTION * 1e9)
    seconds += part / (gpu.nvlink_gb_per_s * PUSH_FRACTION * 1e9)
    return PushTime(seconds * (1 + 1 / ROUNDS), sends, part)


TRANSPORTS: dict[str, Callable[[Architecture, Gpu, Layout], PushTime]] = {
    "broadcast": broadcast,
    "sharded": sharded,
    "shared": broadcast,
    "colocated": colocated,
}

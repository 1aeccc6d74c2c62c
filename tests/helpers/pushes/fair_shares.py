"""The least that the trainer's ranks must send in a push, computed without the planner's choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_gvpo.weights.shard_plan import Layout, PushPlan, _by_box, _union


def fair_shares(plan: PushPlan, sources: Sequence[Layout]) -> list[float]:
    """The least bytes that each trainer rank must send, if ranks with the same parts share them evenly.

    Where the parts that ranks hold in common are nested, as with Megatron's parallelisms, no plan's busiest
    rank among them sends less than the largest of their shares.
    """
    groups: Counter[tuple[int, ...]] = Counter()
    holders = _by_box(sources, 0)
    for parcel in plan.parcels:
        boxes = holders[parcel.cell.tensor]
        groups[_union([ranks for box, ranks in boxes.items() if box.contains(parcel.cell.box)])] += (
            parcel.nbytes
        )
    shares = [0.0] * len(sources)
    for owners in groups:
        inside = set(owners)
        size = sum(size for others, size in groups.items() if inside.issuperset(others))
        for rank in owners:
            shares[rank] = max(shares[rank], size / len(owners))
    return shares

"""Computes from sizes alone the exact bytes that one optimizer update sends between ranks, by operation.

A message is a whole tensor and counts on every rank that takes part. A test counts the
messages of real runs (`benchmarks/lib/scaling/traffic_counter.py`) and compares both byte for byte.

A micro-batch has t tokens, the hidden size is h and an element has e bytes, so H = e t h is one hidden state.
With tp > 1 tensor-parallel ranks, every layer of a dense model exchanges over `tp`:

    plain              forward   2 all-reduces of H, behind attention and MLP (arXiv 1909.08053, section 3)
                       backward  2 all-reduces of H, before them
    sequence parallel  forward   2 all-gathers, 2 reduce-scatters of H (arXiv 2205.05198, section 4.2.2)
                       backward  4 all-gathers, 2 reduce-scatters: inputs are kept as shards, and
                                 gathered again

The embedding all-reduces H in the forward pass. With sequence parallelism it reduce-scatters H forward and
all-gathers H backward. The fused head, over r response tokens, all-gathers its softmax statistics: three
fp32 numbers per token and rank. Its backward pass all-reduces e r h. With sequence parallelism the head
all-gathers H forward and reduce-scatters H backward instead of that all-reduce.

Once an update, ranks sum the fp32 gradients of parameters that all of them hold but each applies to only a
part of the data: the norms of heads, and with sequence parallelism all norms.

A pipeline boundary sends H (with sequence parallelism H / tp) forward and as much backward; both ends know
the shapes from the packs (megatron/pipeline.py). If the head is the embedding, the first and the last stage
sum the fp32 gradients of this table.

With the distributed optimizer, data-parallel ranks reduce-scatter the fp32 gradient buffer and all-gather the
weights. In the buffer every parameter begins at a multiple of 64 elements. The buffer's length is a multiple
of lcm(dp, 128).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_gvpo.planner.architecture import Architecture
from megatron_gvpo.planner.workload import Layout

Bytes = Counter[tuple[str, str]]  # bytes by (operation, group)
STATISTICS = 3 * 4  # bytes per token in the head: maximum, sum, the label's logit


@dataclass(frozen=True)
class Pack:
    """One micro-batch of a data-parallel rank."""

    tokens: int  # padding included
    responses: int  # tokens that the loss is computed on


def update_bytes(
    model: Architecture,
    layout: Layout,
    stage: int,
    packs: Sequence[Pack],
    *,
    element: int = 2,
    sequence_parallel: bool = True,
) -> Bytes:
    """Returns the bytes of a rank of pipeline stage `stage` in one update of a dense model.

    An update is the forward and backward passes over `packs`, then the exchange of gradients and weights.
    `element`: bytes of a weight and of an activation. Raises ValueError for experts, latent attention,
    gated delta nets, context parallelism, interleaving and stages of unequal size, which are not modelled.
    """
    has_other_layers = model.moe_layers or model.latent or model.delta_net
    if has_other_layers or layout.cp > 1 or layout.vpp > 1 or model.layers % layout.pp:
        raise ValueError(
            "traffic is known for dense models without context parallelism, interleaving or unequal stages"
        )
    sequence_parallel = sequence_parallel and layout.tp > 1
    sent: Bytes = Counter()
    first, last = stage == 0, stage == layout.pp - 1
    for pack in packs:
        state = element * pack.tokens * model.hidden
        sent += _times(layer_forward(layout.tp, state, sequence_parallel), model.layers // layout.pp)
        sent += _times(layer_backward(layout.tp, state, sequence_parallel), model.layers // layout.pp)
        if first:
            sent += _embedding(layout.tp, state, sequence_parallel)
        if last:
            sent += _head(model, layout.tp, state, pack.responses, element, sequence_parallel)
        sent += _boundaries(layout, stage, state // (layout.tp if sequence_parallel else 1))
    sizes = parameter_sizes(model, layout, stage)
    if sequence_parallel:
        sent["all_reduce", "tp"] += 4 * sum(_held_by_all(model, layout, stage))
    elif layout.tp > 1 and model.qk_norm:
        sent["all_reduce", "tp"] += 4 * 2 * model.head_dim * (model.layers // layout.pp)
    if model.tied and layout.pp > 1 and (first or last):
        sent["all_reduce", "embedding"] += 4 * _table(model, layout)
    return sent + optimizer_bytes(sizes, layout.dp, element)


def layer_forward(tp: int, state: int, sequence_parallel: bool) -> Bytes:
    """Returns the bytes of one layer's forward pass. `state`: bytes of one hidden state, H."""
    if tp == 1:
        return Counter()
    if sequence_parallel:
        return Counter({("all_gather", "tp"): 2 * state, ("reduce_scatter", "tp"): 2 * state})
    return Counter({("all_reduce", "tp"): 2 * state})


def layer_backward(tp: int, state: int, sequence_parallel: bool) -> Bytes:
    """Returns the bytes of one layer's backward pass. `state`: bytes of one hidden state, H."""
    if tp == 1 or not sequence_parallel:
        return layer_forward(tp, state, sequence_parallel)
    return Counter({("all_gather", "tp"): 4 * state, ("reduce_scatter", "tp"): 2 * state})


def optimizer_bytes(sizes: Sequence[int], dp: int, element: int) -> Bytes:
    """Returns the bytes of the gradients' and weights' exchange among `dp` ranks.

    `sizes`: elements of each parameter on the rank. `element`: bytes of a weight.
    """
    if dp == 1:
        return Counter()
    buffer = 0
    for size in sizes:
        buffer = _up(buffer, 64) + size
    buffer = _up(buffer, math.lcm(dp, 128))
    return Counter({("reduce_scatter", "dp"): 4 * buffer, ("all_gather", "dp"): element * buffer})


def parameter_sizes(model: Architecture, layout: Layout, stage: int) -> list[int]:
    """Returns the elements of each parameter that a rank of the stage holds."""
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    layer = [model.hidden * heads, model.hidden * model.heads * model.head_dim]
    layer += [2 * model.hidden * model.ffn, model.hidden * model.ffn] + [heads] * model.qkv_bias
    split = [size // layout.tp for size in layer] * (model.layers // layout.pp)
    first, last = stage == 0, stage == layout.pp - 1
    tables = first + (last and not (model.tied and first))
    return [*split, *_held_by_all(model, layout, stage), *[_table(model, layout)] * tables]


def on_the_wire(operation: str, size: int, ranks: int) -> float:
    """Returns the least bytes that each of `ranks` ranks sends for whole messages of `size` bytes.

    Ring algorithms reach this minimum (Patarasu and Yuan, 2009, for the all-reduce).
    """
    if operation == "all_reduce":
        return 2 * size * (ranks - 1) / ranks
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return size * (ranks - 1) / ranks
    return 0.0 if operation in ("receive", "barrier") else float(size)


def _held_by_all(model: Architecture, layout: Layout, stage: int) -> list[int]:
    """Returns the elements of each norm: of the layers, of their heads, and the final one."""
    layer = [model.hidden] * 2 + [model.head_dim] * 2 * model.qk_norm
    return layer * (model.layers // layout.pp) + [model.hidden] * (stage == layout.pp - 1)


def _table(model: Architecture, layout: Layout) -> int:
    return _up(model.vocab, layout.tp) // layout.tp * model.hidden


def _embedding(tp: int, state: int, sequence_parallel: bool) -> Bytes:
    if tp == 1:
        return Counter()
    if sequence_parallel:
        return Counter({("reduce_scatter", "tp"): state, ("all_gather", "tp"): state})
    return Counter({("all_reduce", "tp"): state})


def _head(
    model: Architecture, tp: int, state: int, responses: int, element: int, sequence_parallel: bool
) -> Bytes:
    if tp == 1:
        return Counter()
    sent: Bytes = Counter({("all_gather", "tp"): tp * STATISTICS * responses})
    if sequence_parallel:
        sent += Counter({("all_gather", "tp"): state, ("reduce_scatter", "tp"): state})
    else:
        sent["all_reduce", "tp"] += element * responses * model.hidden
    return sent


def _boundaries(layout: Layout, stage: int, state: int) -> Bytes:
    """Returns the bytes of a stage's pipeline boundaries.

    Both ends of a boundary send once and receive once: one end sends forward, the other backward.
    """
    neighbours = (stage > 0) + (stage < layout.pp - 1)
    return Counter({("send", "pp"): neighbours * state, ("receive", "pp"): neighbours * state})


def _times(sent: Bytes, count: int) -> Bytes:
    return Counter({key: value * count for key, value in sent.items()})


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

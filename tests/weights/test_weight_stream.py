"""Every byte of the weight stream arrives in order, in buckets and in patches; without a server."""

from __future__ import annotations

import asyncio
import sys
from itertools import pairwise

import pytest
import torch
from fake_servers import itself
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gvpo.rollout.pool import ServerHandle
from megatron_gvpo.rollout.server import PLUGINS
from megatron_gvpo.weights.bucket import Bucket, DoubleBuffer, TensorSpec, buckets
from megatron_gvpo.weights.delta import Delta

sys.path.insert(0, str(PLUGINS))

from megatron_gvpo_patches import apply_patches, check_patched, unpack

CPU = torch.device("cpu")


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), min_size=1, max_size=12),
    st.integers(1, 400),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_buckets_hold_every_tensor_once_in_order(shapes, limit, dtype):
    tensors = [(f"t{i}", torch.randn(shape)) for i, shape in enumerate(shapes)]
    seen = []
    for bucket in buckets(iter(tensors), DoubleBuffer(2 * limit, CPU), dtype):
        assert bucket.flat.nbytes <= limit or len(bucket.specs) == 1
        seen += [(name, tensor.clone()) for name, tensor in bucket.tensors()]
    assert [name for name, _ in seen] == [name for name, _ in tensors]
    for (_, sent), (_, given_tensor) in zip(seen, tensors, strict=True):
        assert sent.dtype == dtype and torch.equal(sent, given_tensor.to(dtype))


def test_two_buffers_serve_all_buckets_in_turn():
    stream = ((f"t{i}", torch.full((100,), float(i))) for i in range(50))
    halves = DoubleBuffer(2000, CPU)
    places = [bucket.flat.data_ptr() for bucket in buckets(stream, halves, torch.float32)]
    assert len(places) == 25 and len(set(places)) == 2 and all(a != b for a, b in pairwise(places))
    assert halves.next(1).data_ptr() in places, "kept for the next push"


class Fused(torch.nn.Module):
    """A model as the engines have it: q and v are one parameter, of which this rank holds a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.qv = torch.nn.Parameter(torch.randn(4, 6), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            row = {"q": 0, "v": 2}[name]
            self.qv.data.narrow(0, row, 2).copy_(tensor.narrow(0, 2, 2))  # the second of two ranks


class Wire(Delta):
    """A delta transport that keeps what it would send."""

    async def _deliver(self, wire, post):
        self.wire = wire.clone()
        server = _Recorder()
        await post(ServerHandle(server), None)
        self.patches = [[p.spec.name, p.spec.dtype, list(p.spec.shape), p.count] for p in server.patches]


class _Recorder:
    async def receive_patches(self, patches, size, meeting, timeout):
        self.patches, self.size = patches, size


def test_patches_change_the_changed_elements_alone_through_a_fused_sharded_loader():
    torch.manual_seed(0)
    delta, model = Wire(itself, "127.0.0.1", "gloo", 1.0), Fused()
    full = {"q": torch.randn(4, 6), "v": torch.randn(4, 6)}

    def push(sparse: bool) -> None:
        delta._sparse = sparse
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in full.values()])
        specs = [TensorSpec(name, "float32", (4, 6)) for name in full]
        asyncio.run(delta.send(Bucket(specs, flat)))
        apply_patches(model, delta.wire, delta.patches)
        check_patched(model)

    push(sparse=False)
    assert [count for *_, count in delta.patches] == [-1, -1]
    assert torch.equal(model.qv, torch.cat([full["q"][2:], full["v"][2:]]))
    full["q"][3, 1], full["v"][0, 0], full["v"][2, 5] = 7.0, 8.0, -0.0
    push(sparse=True)
    assert [count for *_, count in delta.patches] == [1, 2] and len(delta.wire) == 3 * 8
    assert torch.equal(model.qv, torch.cat([full["q"][2:], full["v"][2:]]))
    full["q"] += 1.0
    push(sparse=True)
    assert [count for *_, count in delta.patches] == [-1, 0], "all of a tensor is smaller without positions"
    assert torch.equal(model.qv, torch.cat([full["q"][2:], full["v"][2:]]))


def test_a_tensor_with_more_elements_than_positions_is_sent_whole(monkeypatch):
    delta = Wire(itself, "127.0.0.1", "gloo", 1.0)
    monkeypatch.setattr("megatron_gvpo.weights.delta._MOST", 23)
    counts = []
    for sparse in (False, True):
        delta._sparse = sparse
        flat = torch.zeros(24 + 23)
        flat[::7] += sparse
        specs = [TensorSpec("above", "float32", (24,)), TensorSpec("at", "float32", (23,))]
        asyncio.run(delta.send(Bucket(specs, flat.view(torch.uint8))))
        counts.append([count for *_, count in delta.patches])
    assert counts == [[-1, -1], [-1, 3]]


def test_a_loader_that_patches_cannot_go_through_is_refused():
    class Adds(Fused):
        def load_weights(self, weights):
            for _, tensor in weights:
                self.qv.data += tensor

    model = Adds()
    apply_patches(model, torch.zeros(0, dtype=torch.uint8), [["q", "float32", [4, 6], 0]])
    with pytest.raises(RuntimeError, match="left NaN in qv"):
        check_patched(model)


def test_a_weight_that_is_not_a_number_is_not_sent():
    delta = Wire(itself, "127.0.0.1", "gloo", 1.0)
    bucket = Bucket([TensorSpec("w", "float32", (1,))], torch.tensor([torch.nan]).view(torch.uint8))
    with pytest.raises(ValueError, match="weight w is not a number"):
        asyncio.run(delta.send(bucket))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_unpacking_undoes_packing_in_bf16(seed):
    generator = torch.Generator().manual_seed(seed)
    delta = Wire(itself, "127.0.0.1", "gloo", 1.0)
    before = torch.randn(300, generator=generator).bfloat16()
    changed = torch.rand(300, generator=generator) < 0.2
    after = torch.where(changed, torch.randn(300, generator=generator).bfloat16(), before)
    for tensor, sparse in ((before, False), (after, True)):
        delta._sparse = sparse
        bucket = Bucket([TensorSpec("w", "bfloat16", (300,))], tensor.clone().view(torch.uint8))
        asyncio.run(delta.send(bucket))
    [(name, patch)] = unpack(delta.wire, delta.patches)
    assert name == "w"
    assert torch.equal(torch.where(patch.isnan(), before, patch).view(torch.int16), after.view(torch.int16))

"""Every byte of the weight stream arrives in order, in buckets and in patches; without a server."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from helpers.servers.fake_servers import itself
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gvpo.groups import Prompt
from megatron_gvpo.megatron.model.own_weights import OwnPart, OwnWeights
from megatron_gvpo.servers.handle import ServerHandle, Serving
from megatron_gvpo.servers.http import ServerGone
from megatron_gvpo.servers.leader import BackgroundLoop
from megatron_gvpo.servers.server import PLUGINS
from megatron_gvpo.weights.bucket import Bucket, DoubleBuffer, TensorSpec, buckets
from megatron_gvpo.weights.delta import Delta
from megatron_gvpo.weights.probe import Probe
from megatron_gvpo.weights.publisher import not_pushed
from megatron_gvpo.weights.shard_plan import Box, Cell, Message
from megatron_gvpo.weights.sharded import Sender
from megatron_gvpo.weights.transport import PushFailed

sys.path.insert(0, str(PLUGINS))

import megatron_gvpo_sglang
from megatron_gvpo_patches import apply_patches, check_patched, unpack

CPU = torch.device("cpu")


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), min_size=1, max_size=12),
    st.integers(1, 400),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_buckets_hold_every_tensor_once_in_order(shapes, limit, dtype):
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16)
    tensors = [(f"t{i}", torch.randn(shape).to(kinds[i % 3])) for i, shape in enumerate(shapes)]
    seen = []
    for bucket in buckets(iter(tensors), DoubleBuffer(2 * limit, CPU), dtype):
        assert bucket.flat.nbytes <= limit or len(bucket.specs) == 1
        seen += [(name, tensor.clone()) for name, tensor in bucket.tensors()]
    assert [name for name, _ in seen] == [name for name, _ in tensors]
    for (_, sent), (_, given_tensor) in zip(seen, tensors, strict=True):
        assert sent.dtype == (torch.float32 if given_tensor.dtype == torch.float32 else dtype)
        assert torch.equal(sent, given_tensor.to(sent.dtype)), "no digit is lost"


@given(st.integers(1, 600), st.permutations(["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj"]))
@settings(max_examples=40, deadline=None)
def test_projections_that_a_server_loads_as_one_come_in_one_bucket(limit, order):
    """SGLang drops either of them where it comes without the other: it would go on with older weights."""
    names = [f"l.{i}.self_attn.{part}.weight" for i in range(3) for part in order]
    stream = [(name, torch.full((10,), float(i))) for i, name in enumerate(names)]
    sent: dict[str, torch.Tensor] = {}
    for bucket in buckets(iter(stream), DoubleBuffer(2 * limit, CPU), torch.float32):
        got = dict(bucket.tensors())
        for name in got:
            other = {"kv_a_proj_with_mqa": "q_a_proj", "q_a_proj": "kv_a_proj_with_mqa"}.get(
                name.split(".")[3]
            )
            assert other is None or name.replace(name.split(".")[3], other) in got
        sent |= {name: tensor.clone() for name, tensor in got.items()}
    assert len(sent) == len(stream) and all(torch.equal(sent[name], tensor) for name, tensor in stream)


def test_a_model_without_one_of_them_sends_the_others_all_the_same():
    stream = [(f"l.{i}.self_attn.kv_a_proj_with_mqa.weight", torch.ones(3)) for i in range(2)]
    [bucket] = buckets(iter([*stream, ("norm", torch.ones(2))]), DoubleBuffer(1000, CPU), torch.float32)
    assert {spec.name for spec in bucket.specs} == {name for name, _ in stream} | {"norm"}


def test_two_buffers_serve_all_buckets_in_turn():
    stream = ((f"t{i}", torch.full((100,), float(i))) for i in range(50))
    halves = DoubleBuffer(2000, CPU)
    addresses = [bucket.flat.data_ptr() for bucket in buckets(stream, halves, torch.float32)]
    assert len(addresses) == 25 and len(set(addresses)) == 2 and all(a != b for a, b in pairwise(addresses))
    assert halves.next(1).data_ptr() in addresses, "kept for the next push"


class Fused(torch.nn.Module):
    """A model as the engines have it: q and v are one parameter, of which this rank holds a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.qv = torch.nn.Parameter(torch.randn(4, 6), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            row = {"q": 0, "v": 2}[name]
            self.write(self.qv.data.narrow(0, row, 2), tensor.narrow(0, 2, 2))  # the second of two ranks

    def write(self, target, source):
        target.copy_(source)


class ByIndex(Fused):
    """Its loader writes as those of convolutions in both engines do."""

    def write(self, target, source):
        target[0:2, ...] = source


class Wire(Delta):
    """A delta transport that keeps what it would send."""

    async def _deliver(self, wire, post):
        self.wire = wire.clone()
        server = _Recorder()
        await post(ServerHandle(server), None)
        self.patches = [[p.spec.name, p.spec.dtype, list(p.spec.shape), p.count] for p in server.patches]


class _Recorder:
    async def receive_patches(self, patches, size, rendezvous, timeout):
        self.patches, self.size = patches, size


@pytest.mark.parametrize("kind", [Fused, ByIndex])
def test_patches_change_the_changed_elements_alone_through_a_fused_sharded_loader(kind: type[Fused]):
    torch.manual_seed(0)
    delta, model = Wire(itself, "127.0.0.1", "gloo", 1.0), kind()
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


def test_a_server_that_got_no_whole_tensors_does_not_serve_them():
    """SGLang would end at an error in a broadcast, so its plugin answers as usual and tells it at the end."""

    class Broken:
        def broadcast(self, *_: object) -> None:
            raise RuntimeError("Connection closed by peer")

    class Server:
        url, version = "http://server", ""

        async def check_patches(self, timeout: float) -> None:
            try:
                megatron_gvpo_sglang.receive(model, order(op="check"))
            except RuntimeError as error:
                raise ServerGone(str(error)) from None

        async def end_update(self, version: str, timeout: float) -> None:
            self.version = version

    def order(**values: object) -> list[tuple[str, torch.Tensor]]:
        return [("order", torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8))]

    model, server = Fused(), Server()
    before = model.qv.clone()
    megatron_gvpo_sglang._groups["weights"] = (Broken(), None, {})
    try:
        patch = ["q", "float32", [4, 6], -1]
        megatron_gvpo_sglang.receive(model, order(op="apply", name="weights", bytes=96, patches=[patch]))
        delta = Delta(itself, "127.0.0.1", "gloo", 1.0)
        delta._handles, delta._version = [ServerHandle(server)], 3
        with pytest.raises(PushFailed, match="a broadcast of weight patches failed: Connection closed"):
            asyncio.run(delta.end())
    finally:
        megatron_gvpo_sglang._groups.clear()
        megatron_gvpo_sglang._broken.clear()
    assert torch.equal(model.qv, before) and server.version == "" and delta._sent_version == -1


@pytest.mark.parametrize("versions", [(0, 0, 1, 2), (0, 1, 2)])
def test_two_versions_of_the_weights_are_proved_however_often_the_first_is_sent(versions: tuple[int, ...]):
    """Fails on the old code: colocated servers get version 0 for an evaluation, and again for step 1."""

    class Policy:
        def score(self, rows: object, temperature: float) -> torch.Tensor:
            return torch.zeros(2)

    class Server:
        url = "http://server"

        async def score(self, token_ids: list[int], timeout: float) -> list[float]:
            return [0.0, 0.0]

    probe, loop = (
        Probe(Policy(), [Prompt("p", (1, 2, 3), "")], tolerance=1e-3, timeout=30.0),
        BackgroundLoop("test"),
    )
    proved = []
    for version in versions:
        handle = ServerHandle(Server(), state=Serving(version))
        probe.servers = SimpleNamespace(pool=SimpleNamespace(handles=[handle]), loop=loop)
        if (expected := probe.expected()) is not None:
            probe.prove(version, expected)
            proved.append(version)
    assert proved == [version for version in versions if version < 2]
    loop.close()


def test_all_servers_are_compared_at_once():
    """Fails on the old code: one server after the other, and each that does not answer took the timeout."""
    count, limit = 3, 30.0

    class Server:
        url = "http://server"

        async def score(self, token_ids: list[int], timeout: float) -> list[float]:
            await asyncio.wait_for(everyone.wait(), limit)
            return [0.0, 0.0]

    everyone = asyncio.Barrier(count)
    probe, loop = (
        Probe(None, [Prompt("p", (1, 2, 3), "")], tolerance=1e-3, timeout=30.0),
        BackgroundLoop("test"),
    )
    handles = [ServerHandle(Server(), state=Serving(0)) for _ in range(count)]
    probe.servers = SimpleNamespace(pool=SimpleNamespace(handles=handles), loop=loop)
    probe.prove(0, torch.zeros(2))
    assert probe.proved == 1
    loop.close()


def test_the_routers_biases_keep_all_digits_in_a_run_in_bfloat16():
    """GLM-4.5's lie near 34 and differ by 0.1, where bfloat16 has a step of 0.25: other experts would do."""
    torch.manual_seed(0)
    bias, weight = 34.5 + 0.14 * torch.randn(16), torch.randn(3).bfloat16()
    assert len(bias.bfloat16().unique()) < len(bias.unique())
    own = OwnWeights([weight, bias], [OwnPart("w", 0, 3, 0, 1, 0, 0, 1), OwnPart("b", 0, 16, 0, 1, 1, 0, 1)])
    sender = Sender(None, torch.bfloat16, 1.0, lambda: False)  # it needs no group to fill a message
    assert [sender._wire(own, part) for part in own.parts] == ["bfloat16", "float32"]
    sender._parts = {0: own.parts[:1], 1: own.parts[1:]}
    message = Message(0, 1, [Cell(0, Box(0, 3, 0, 1)), Cell(1, Box(0, 16, 0, 1))])
    assert torch.equal(sender._fill(own, message, 0)[6:].clone().view(torch.float32), bias)

    delta = Wire(itself, "127.0.0.1", "gloo", 1.0)
    for delta._sparse in (False, True):
        weight[1] += delta._sparse  # an odd number of patched elements before those of four bytes
        bias[::5] += delta._sparse
        got: dict[str, torch.Tensor] = {}
        for bucket in buckets([("w", weight), ("b", bias)], DoubleBuffer(1000, CPU), torch.bfloat16):
            asyncio.run(delta.send(bucket))
            got |= dict(unpack(delta.wire, delta.patches))
        assert got["b"].dtype == torch.float32
        assert torch.equal(got["b"][::5] if delta._sparse else got["b"], bias[::5] if delta._sparse else bias)


def test_patches_of_elements_of_other_sizes_lie_at_any_byte():
    values = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([34.53, 34.47])
    parts = [torch.tensor([2, 0, 3], dtype=torch.int32), *values]
    wire = torch.cat([part.view(torch.uint8) for part in parts])
    [(_, w), (_, b)] = unpack(wire, [["w", "bfloat16", [3], 1], ["b", "float32", [4], 2]])
    assert w[2] == 1.0 and torch.equal(b[[0, 3]], values[1])


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


def test_a_push_need_not_have_what_never_changes():
    """Heads for further tokens are in the servers' checkpoint, and the trainer has none."""
    layers = [f"model.layers.{i}.enorm.weight" for i in (9, 10, 11)]
    stored = ["lm_head.weight", "mtp.fc.weight", *layers]
    deepseek = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 10}
    assert not_pushed(deepseek, stored) == frozenset()
    assert not_pushed(deepseek | {"num_nextn_predict_layers": 1}, stored) == {layers[1]}
    qwen = {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 10, "tie_word_embeddings": True}
    assert not_pushed(qwen, stored) == {"lm_head.weight", "mtp.fc.weight"}
    exaone = {"architectures": ["ExaoneMoeForCausalLM"], "num_hidden_layers": 10}
    assert not_pushed(exaone | {"num_nextn_predict_layers": 1}, stored) == {"mtp.fc.weight"}
    old = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.q_proj.weight"]
    assert not_pushed({"architectures": ["LlamaForCausalLM"]}, old) == {old[0]}

"""References of attention, rotary embedding and shared packs against fp64 and autograd, on the CPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_gvpo.emulation.transformer_engine import install  # noqa: F401 - it fills the table
from megatron_gvpo.emulation.transformer_engine.references import TABLE

Tensor = torch.Tensor
ENDS = [0, 5, 6, 14]  # of three sequences


def named(name: str) -> Any:
    """A member of one of Transformer Engine's enumerations."""
    return SimpleNamespace(name=f"NVTE_{name}")


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def assert_close(computed: Tensor, exact: Tensor, bound: float = 3e-6) -> None:
    error = (computed.double() - exact.double()).abs().max() / exact.double().abs().max()
    assert error <= bound, error.item()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


class Attention:
    """The arguments of both passes, and their results."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, ends: list[int], **options: Any) -> None:
        self.inputs, self.ends = (q, k, v), ends
        self.options = {
            "layout": "THD_THD_THD",
            "format": "THD",
            "mask": "PADDING_CAUSAL_MASK",
            "softmax": "VANILLA_SOFTMAX",
            "window": (-1, -1),
            "bottom_right": False,
            "key_ends": ends,
            "padded": None,
            "key_padded": None,
            "sink": None,
            "scale": 0.25,
        } | options

    def _ends(self) -> list[Tensor | None]:
        options = self.options
        both = (self.ends, options["key_ends"])
        padded = (options["padded"], options["key_padded"] or options["padded"])
        return [*(int32(*one) for one in both), *(None if one is None else int32(*one) for one in padded)]

    def forward(self, out: Tensor, stats: Tensor) -> None:
        o, ends = self.options, self._ends()
        TABLE["fused_attn_fwd"](
            [out, stats, int32(0, 0)],
            *(9, 9, True, o["scale"], 0.0, True, named(o["layout"]), named(o["format"]), None),
            *(named("NO_BIAS"), named(o["mask"]), named(o["softmax"]), o["window"], o["bottom_right"]),
            *(*ends[:2], *self.inputs, out.dtype, *ends[2:]),
            *(None, None, None, None, None, o["sink"], None, 16, False, False),
        )
        self.out, self.stats = out, stats

    def backward(self, grad: Tensor) -> list[Any]:
        o, ends = self.options, self._ends()
        result = [torch.full_like(tensor, torch.nan) for tensor in self.inputs]
        sink = torch.full((1, grad.shape[-2], 1, 1), torch.nan)
        saved = [self.stats, int32(0, 0), *([] if o["sink"] is None else [o["sink"]])]
        format = named(o["format"])
        TABLE["fused_attn_bwd"](
            [*result, None, sink],
            *(
                9,
                9,
                o["scale"],
                0.0,
                True,
                named(o["layout"]),
                format,
                format,
                named(o["layout"]),
                None,
                None,
            ),
            *(named("NO_BIAS"), named(o["mask"]), named(o["softmax"]), o["window"], o["bottom_right"], True),
            *(*ends[:2], *self.inputs, self.out, grad, grad.dtype, saved, *ends[2:]),
            *(None, None, None, False),
        )
        return [*result, sink]


def exact_of(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """[q, h, dv] of one sequence by PyTorch, in fp64."""
    parts = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(*parts, attn_mask=~hidden, scale=scale, enable_gqa=True)[0].transpose(
        0, 1
    )


def hidden_of(queries: int, keys: int, window: int | None = None, shift: int = 0) -> Tensor:
    i, j = torch.arange(queries)[:, None] + shift, torch.arange(keys)[None]
    return (j > i) | (j < i - (keys + queries if window is None else window))


def inputs(tokens: int = 14, keys: int | None = None) -> list[Tensor]:
    keys = tokens if keys is None else keys
    return [torch.randn(tokens, 4, 16), torch.randn(keys, 2, 16), torch.randn(keys, 2, 8)]


@pytest.mark.parametrize("window", [None, 2])
def test_packs(window: int | None) -> None:
    """Grouped heads, values of another width, causal, with and without a window."""
    tensors = inputs()
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    sequences = [
        exact_of(*(t[begin:end] for t in exact), hidden_of(end - begin, end - begin, window), 0.25)
        for begin, end in itertools.pairwise(ENDS)
    ]
    exact_out, grad = torch.cat(sequences), torch.randn(14, 4, 8)
    exact_out.backward(grad.double())
    kernel = Attention(*tensors, ENDS, window=(-1 if window is None else window, 0))
    kernel.forward(torch.empty(14, 4, 8), torch.empty(14, 4, 1))
    assert_close(kernel.out, exact_out)
    for gradient, tensor in zip(kernel.backward(grad), exact, strict=False):
        assert_close(gradient, tensor.grad)
    scores = torch.einsum("hd,hkd->hk", exact[0][4], exact[1][:5].repeat_interleave(2, 1).transpose(0, 1))
    if window is None:
        assert_close(kernel.stats[4, :, 0], (scores * 0.25).logsumexp(1))


def test_padding_in_a_pack_gets_zeros() -> None:
    tensors, padded = inputs(20), [0, 8, 10, 20]
    kernel = Attention(*tensors, ENDS, padded=padded)
    kernel.forward(torch.full((20, 4, 8), torch.nan), torch.full((20, 4, 1), torch.nan))
    index = torch.cat(
        [torch.arange(p, p + e - b) for p, (b, e) in zip(padded, itertools.pairwise(ENDS), strict=False)]
    )
    dense = Attention(*(tensor[index] for tensor in tensors), ENDS)
    dense.forward(torch.empty(14, 4, 8), torch.empty(14, 4, 1))
    assert torch.equal(kernel.out[index], dense.out) and torch.equal(kernel.stats[index], dense.stats)
    rest = torch.ones(20, dtype=torch.bool)
    rest[index] = False
    assert kernel.out[rest].eq(0).all() and kernel.stats[rest].isnan().all()
    grad = torch.randn(20, 4, 8)
    for gradient, wanted in zip(kernel.backward(grad)[:3], dense.backward(grad[index])[:3], strict=True):
        assert torch.equal(gradient[index], wanted) and gradient[rest].eq(0).all()


def test_queries_of_the_second_half_at_the_bottom_right() -> None:
    """Context parallelism's steps: fewer queries than keys, whose diagonals end together, and no mask."""
    tensors = inputs(6, 12)
    kernel = Attention(
        *tensors, [0, 6], key_ends=[0, 12], mask="PADDING_CAUSAL_BOTTOM_RIGHT_MASK", bottom_right=True
    )
    kernel.forward(torch.empty(6, 4, 8), torch.empty(6, 4, 1))
    exact = [tensor.double() for tensor in tensors]
    assert_close(kernel.out, exact_of(*exact, hidden_of(6, 12, shift=6), 0.25))
    kernel = Attention(*tensors, [0, 6], key_ends=[0, 12], mask="PADDING_MASK")
    kernel.forward(torch.empty(6, 4, 8), torch.empty(6, 4, 1))
    assert_close(kernel.out, exact_of(*exact, torch.zeros(6, 12, dtype=torch.bool), 0.25))


def test_sinks() -> None:
    """A sink is one more key, with a learned score and without a value."""
    tensors, sink, grad = inputs(9), torch.randn(1, 4, 1, 1), torch.randn(9, 4, 8)
    q, k, v = exact = [tensor.double().requires_grad_() for tensor in tensors]
    exact_sink = sink.double().requires_grad_()
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.25
    scores = scores.masked_fill(hidden_of(9, 9), -torch.inf)
    with_sink = torch.cat([scores, exact_sink[0].expand(4, 9, 1)], -1).softmax(-1)[..., :-1]
    exact_out = torch.einsum("hqk,khd->qhd", with_sink, v.repeat_interleave(2, 1))
    exact_out.backward(grad.double())
    kernel = Attention(*tensors, [0, 9], softmax="LEARNABLE_SOFTMAX", sink=sink)
    kernel.forward(torch.empty(9, 4, 8), torch.empty(9, 4, 1))
    assert_close(kernel.out, exact_out)
    for gradient, tensor in zip(kernel.backward(grad), [*exact, exact_sink], strict=True):
        assert_close(gradient, tensor.grad)


@pytest.mark.parametrize("format", ["BSHD", "SBHD"])
def test_batches(format: str) -> None:
    """Two sequences of seven tokens, all of which see each other."""
    tensors = [torch.randn(2, 7, 4, 16) for _ in range(3)]
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    seen = torch.zeros(7, 7, dtype=torch.bool)
    exact_out = torch.stack([exact_of(*(t[i] for t in exact), seen, 0.25) for i in range(2)])
    grad = torch.randn(2, 7, 4, 16)
    exact_out.backward(grad.double())

    def ordered(tensor: Tensor) -> Tensor:
        return tensor if format == "BSHD" else tensor.transpose(0, 1).contiguous()

    layout = "_".join([format] * 3)
    kernel = Attention(*map(ordered, tensors), [0, 7, 14], layout=layout, format=format, mask="NO_MASK")
    kernel.forward(torch.empty_like(ordered(grad)), torch.empty(2, 4, 7, 1))
    assert_close(ordered(kernel.out) if format == "BSHD" else kernel.out.transpose(0, 1), exact_out)
    for gradient, tensor in zip(kernel.backward(ordered(grad)), exact, strict=False):
        assert_close(gradient, ordered(tensor.grad))


def test_what_attention_cannot_do_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="bias NVTE_ALIBI"):
        TABLE["fused_attn_fwd"](
            [], 9, 9, True, 1.0, 0.0, True, named("THD_THD_THD"), named("THD"), None, named("ALIBI"),
            *[named("NO_MASK"), named("VANILLA_SOFTMAX"), (-1, -1), False, int32(0, 9), int32(0, 9)],
            *inputs(9), torch.float32, *[None] * 9, 16, False, False,
        )  # fmt: skip


def rotated(x: Tensor, angle: Tensor, is_interleaved: bool) -> Tensor:
    """As complex numbers: each pair is multiplied by exp(i angle)."""
    width = angle.shape[-1]
    part = x[..., :width].double()
    if is_interleaved:
        pairs = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.exp(1j * angle[..., ::2].double())[..., None, :]).flatten(
            -2
        )
    else:
        first, second = part.chunk(2, -1)
        pairs = torch.complex(first, second) * torch.exp(1j * angle[..., : width // 2].double())[..., None, :]
        turned = torch.cat([pairs.real, pairs.imag], -1)
    return torch.cat([turned, x[..., width:].double()], -1)


def angles(count: int, width: int, is_interleaved: bool) -> Tensor:
    each = torch.arange(count)[:, None] / 10.0 ** (torch.arange(width // 2) / 4)
    both = each.repeat_interleave(2, -1) if is_interleaved else torch.cat([each, each], -1)
    return both[:, None, None]


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_rotary_embedding_of_packs(is_interleaved: bool, rank: int | None) -> None:
    """With ranks of context parallelism, a rank's two chunks have their positions in the sequence."""
    ends, ranks = [0, 8, 12], 1 if rank is None else 2
    freqs, pack = angles(8, 12, is_interleaved), torch.randn(13, 3, 16)
    position = torch.cat([torch.arange(8), torch.arange(4)])
    index = torch.arange(12)
    if rank is not None:
        chunks = {0: [0, 1, 6, 7, 8, 11], 1: [2, 3, 4, 5, 9, 10]}[rank]
        index, position = index[chunks], position[chunks]
    x = torch.cat([pack[:12][index], pack[12:]])
    out = torch.full_like(x, torch.nan)
    arguments = (freqs, None, named("THD"), is_interleaved, int32(*ends), ranks, rank or 0)
    TABLE["fused_rope_forward"](out, x, *arguments)
    exact_x = x[:-1].double().requires_grad_()
    exact = rotated(exact_x, freqs[position, 0, 0], is_interleaved)
    assert_close(out[:-1], exact)
    assert out[-1].isnan().all()  # behind the last sequence
    grad, dx = torch.randn_like(x), torch.full_like(x, torch.nan)
    TABLE["fused_rope_backward"](dx, grad, *arguments)
    exact.backward(grad[:-1].double())
    assert_close(dx[:-1], exact_x.grad)


def test_rotary_embedding_of_batches() -> None:
    x, freqs = torch.randn(5, 2, 3, 16), angles(9, 16, False)
    out = torch.empty_like(x)
    arguments = (freqs, int32(0, 4), named("SBHD"), False, None, 1, 0)
    TABLE["fused_rope_forward"](out, x, *arguments)
    assert_close(out[:, 0], rotated(x[:, 0], freqs[:5, 0, 0], False))
    assert_close(out[:, 1], rotated(x[:, 1], freqs[4:, 0, 0], False))


def test_steps_of_two_ranks_make_the_whole_attention() -> None:
    """The ring of context parallelism, by hand: each rank's three kinds of steps, and their sums."""
    ends = [0, 8, 20]
    tensors, grad = inputs(20), torch.randn(20, 4, 8)
    full = Attention(*tensors, ends)
    full.forward(torch.empty(20, 4, 8), torch.empty(20, 4, 1))
    exact = full.backward(grad)[:3]
    shares = []
    for rank in range(2):
        index = torch.empty(10, dtype=torch.int32)
        TABLE["thd_get_partitioned_indices"](index, int32(*ends), 20, 2, rank)
        shares.append(index.long())
    assert shares[0].tolist() == [0, 1, 6, 7, 8, 9, 10, 17, 18, 19]
    share_ends, own = int32(0, 4, 10), [tensor[shares[1]] for tensor in tensors]
    local = [0, 4, 10]
    diagonal = Attention(*own, local)
    diagonal.forward(torch.empty(10, 4, 8), torch.empty(10, 4, 1))
    # Rank 1 sees the first chunk of rank 0 with all of its queries, and all of rank 0's keys with none more.
    halves = []
    for tensor in (tensors[1], tensors[2]):
        half = torch.empty(5, *tensor.shape[1:])
        TABLE["thd_read_half_tensor"](half, tensor[shares[0]], share_ends, 0)
        halves.append(half)
    step = Attention(own[0], *halves, local, key_ends=[0, 2, 5], mask="PADDING_MASK")
    step.forward(torch.empty(10, 4, 8), torch.empty(10, 4, 1))
    lse = [kernel.stats[..., 0].T.contiguous() for kernel in (diagonal, step)]
    total = torch.logaddexp(*lse)
    out = diagonal.out.clone()
    TABLE["thd_out_correction"](None, out, step.out, lse[0], total, lse[1], share_ends, False, True)
    assert_close(out, full.out[shares[1]])
    assert_close(total, full.stats[shares[1], :, 0].T)
    # Rank 0's second chunk sees all keys of rank 1.
    own = [tensor[shares[0]] for tensor in tensors]
    diagonal = Attention(*own, local)
    diagonal.forward(torch.empty(10, 4, 8), torch.empty(10, 4, 1))
    half_q, half_grad = torch.empty(5, 4, 16), torch.empty(5, 4, 8)
    TABLE["thd_read_half_tensor"](half_q, own[0], share_ends, 1)
    TABLE["thd_read_half_tensor"](half_grad, grad[shares[0]], share_ends, 1)
    others = [tensor[shares[1]] for tensor in tensors]
    step = Attention(half_q, *others[1:], [0, 2, 5], key_ends=local, mask="PADDING_MASK")
    step.forward(torch.empty(5, 4, 8), torch.empty(5, 4, 1))
    lse = [kernel.stats[..., 0].T.contiguous() for kernel in (diagonal, step)]
    total = lse[0].clone()
    TABLE["thd_second_half_lse_correction"](None, total, lse[1], share_ends, True)
    out = diagonal.out.clone()
    TABLE["thd_out_correction"](None, out, step.out, lse[0], total, lse[1], share_ends, True, True)
    assert_close(out, full.out[shares[0]])
    assert_close(total, full.stats[shares[0], :, 0].T)
    # The backward of both steps, with the sums of all of them.
    diagonal.out, diagonal.stats = out, total.T[..., None].contiguous()
    half_stats = torch.full((4, 6), torch.nan)
    TABLE["thd_read_second_half_lse"](half_stats, total, share_ends, True, 6)
    assert half_stats[:, 5].eq(0).all()
    step.stats = half_stats[:, :5].T[..., None].contiguous()
    TABLE["thd_read_half_tensor"](step.out, out, share_ends, 1)
    d_q = diagonal.backward(grad[shares[0]])[0]
    TABLE["thd_grad_correction"](None, d_q, step.backward(half_grad)[0], share_ends, "none", "add")
    assert_close(d_q, exact[0][shares[0]])


def test_gradients_are_added_and_copied_by_halves() -> None:
    ends, grad, step = int32(0, 4, 10), torch.arange(10.0).view(10, 1, 1), torch.full((10, 1, 1), 100.0)
    TABLE["thd_grad_correction"](None, grad, step, ends, "copy", "add")
    assert grad.flatten().tolist() == [100, 100, 102, 103, 100, 100, 100, 107, 108, 109]
    TABLE["thd_grad_correction"](None, grad, step[:5] / 2, ends, "add", "none")
    assert grad.flatten().tolist() == [150, 150, 102, 103, 150, 150, 150, 107, 108, 109]


def test_packs_change_their_order_among_ranks() -> None:
    pack, ends = torch.arange(20).view(20, 1), int32(0, 8, 20)
    ordered, back = torch.empty_like(pack), torch.empty_like(pack)
    TABLE["thd_sequence_order_to_cp_rank_order"](ordered, pack, ends, 2, 20)
    assert ordered.flatten().tolist()[:10] == [0, 1, 6, 7, 8, 9, 10, 17, 18, 19]
    TABLE["thd_cp_rank_order_to_sequence_order"](back, ordered, ends, 2, 20)
    assert torch.equal(back, pack)


def test_a_splits_tokens_come_to_their_places_without_padding() -> None:
    """Two sequences of 2 and 3 tokens, which begin at 1 and at 5."""
    out, split = torch.zeros(10, 2, 3), torch.randn(10, 2, 3)
    TABLE["thd_copy_valid_tokens_from_per_split_to_rank_local"](
        None, out, split, int32(1, 5, 9), int32(0, 2, 5)
    )
    is_valid = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0, 0]).bool()
    assert torch.equal(out[is_valid], split[is_valid]) and out[~is_valid].eq(0).all()


def test_packs_become_batches_and_come_back() -> None:
    pack, batch, back = torch.randn(14, 2, 3), torch.empty(3, 8, 2, 3), torch.empty(14, 2, 3)
    TABLE["convert_thd_to_bshd"](batch, pack, int32(*ENDS), 3, 8)
    for number, (begin, end) in enumerate(itertools.pairwise(ENDS)):
        assert torch.equal(batch[number, : end - begin], pack[begin:end])
        assert batch[number, end - begin :].eq(0).all()
    TABLE["convert_bshd_to_thd"](back, batch, int32(*ENDS), 14)
    assert torch.equal(back, pack)


def test_rows_of_experts_are_padded_with_zeros() -> None:
    rows, padded, back = torch.randn(7, 3), torch.full((12, 3), torch.nan), torch.empty(7, 3)
    TABLE["fused_multi_row_padding"](None, rows, padded, [3, 0, 4], [4, 0, 8])
    assert torch.equal(padded[:3], rows[:3]) and torch.equal(padded[4:8], rows[3:])
    assert padded[3].eq(0).all() and padded[8:].eq(0).all()
    TABLE["fused_multi_row_unpadding"](None, padded, back, [4, 0, 8], [3, 0, 4])
    assert torch.equal(back, rows)

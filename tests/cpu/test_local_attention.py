"""The CPU's packed attention against dense attention under a block-diagonal causal mask, in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

HEADS, KV_HEADS, CHANNELS = 4, 2, 8

lengths_of_packs = st.lists(st.one_of(st.integers(1, 6), st.integers(1, 60)), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def attention() -> Iterator[Any]:
    from megatron_gvpo.megatron import parallel
    from megatron_gvpo.settings.parallel import ParallelConfig

    parallel.initialize(ParallelConfig(), seed=0)
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gvpo.megatron.cpu.packed_attention import LocalAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        use_cpu_initialization=True,
    )
    yield LocalAttention(config, 1, AttnMaskType.causal, "self")
    parallel.shut_down()


def packed_params(lengths: list[int]) -> Any:
    from megatron_gvpo.megatron.attention.core import OwnPackedSeqParams
    from megatron_gvpo.megatron.attention.merged import Sequences

    sequences = Sequences.of(lengths, [], torch.device("cpu"))
    return OwnPackedSeqParams(qkv_format="thd", sequences=sequences)


def dense(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int = 10**9) -> Tensor:
    """Attention of the whole pack with itself under the mask."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(sequence))
    distance = position[:, None] - position
    visible = (sequence[:, None] == sequence) & (distance >= 0) & (distance < window)
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = torch.einsum("qnd,knd->nqk", query, key) / CHANNELS**0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("nqk,knd->qnd", weights, value).flatten(1)


@settings(max_examples=40, deadline=None)
@given(lengths_of_packs)
def test_output_and_gradients_are_those_of_dense_masked_attention(attention: Any, lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(lengths))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    total = sum(lengths)
    inputs = [normal(total, heads, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    upstream = normal(total, HEADS * CHANNELS).detach()

    output = attention(*inputs, None, packed_seq_params=packed_params(lengths))
    wanted = dense(*inputs, lengths)
    torch.testing.assert_close(output, wanted, rtol=1e-10, atol=1e-12)
    gradients = zip(
        torch.autograd.grad(output, inputs, upstream),
        torch.autograd.grad(wanted, inputs, upstream),
        strict=True,
    )
    for of_packed, of_dense in gradients:
        torch.testing.assert_close(of_packed, of_dense, rtol=1e-10, atol=1e-12)


def test_a_sequence_does_not_see_its_neighbours(attention: Any) -> None:
    """Even a neighbour of NaNs changes nothing."""
    lengths = [3, 5, 4, 5]
    query, key, value = (torch.randn(17, heads, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS))
    alone = attention(query[3:8], key[3:8], value[3:8], None, packed_seq_params=packed_params([5]))
    for x in (query, key, value):
        x[:3], x[8:] = torch.nan, torch.nan
    packed = attention(query, key, value, None, packed_seq_params=packed_params(lengths))
    torch.testing.assert_close(packed[3:8], alone)


@pytest.mark.parametrize(
    "lengths", [[64] * 16, [10] * 63 + [1000], [1000] + [1] * 200], ids=["equal", "one long", "many short"]
)
def test_cost_is_the_sum_of_squares_not_the_square_of_the_sum(
    attention: Any, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost is counted in attention scores of one head, where the kernel is called."""
    from megatron_gvpo.megatron.cpu import packed_attention as module

    scores, flash = [], module._flash

    def counting(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> Any:
        scores.append(q.shape[0] * q.shape[2] * k.shape[2])
        return flash(q, k, *rest, **options)

    monkeypatch.setattr(module, "_flash", counting)
    inputs = [torch.zeros(sum(lengths), heads, CHANNELS) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    attention(*inputs, None, packed_seq_params=packed_params(lengths))
    assert sum(scores) == sum(n * n for n in lengths)


def test_a_sliding_window_hides_what_is_further_back(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, window = [3, 17, 8, 40], 8
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(lengths), heads, CHANNELS, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    monkeypatch.setattr(attention, "window", (window - 1, 0))  # megatron-core counts what is behind
    output = attention(*inputs, None, packed_seq_params=packed_params(lengths))
    wanted = dense(*inputs, lengths, window)
    torch.testing.assert_close(output, wanted, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(wanted, dense(*inputs, lengths))
    gradients = [torch.autograd.grad(out.square().sum(), inputs) for out in (output, wanted)]
    for of_packed, of_dense in zip(*gradients, strict=True):
        torch.testing.assert_close(of_packed, of_dense, rtol=1e-10, atol=1e-12)

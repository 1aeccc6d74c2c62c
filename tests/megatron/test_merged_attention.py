"""Attention to shared prompts equals that of responses with copies of their prompts, with every kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.on_cpu import flash_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_gvpo.megatron.attention.core import FlashAttention
from megatron_gvpo.megatron.attention.merged import PartialAttention, Sequences, merged_attention

CPU, CHANNELS = torch.device("cpu"), 8
Group = tuple[int, list[int]]  # tokens of a prompt, and of each response to it


@pytest.fixture(params=["PyTorch's for CPUs", "FlashAttention"], scope="module")
def kernel(request: pytest.FixtureRequest) -> PartialAttention:
    from megatron_gvpo.megatron.cpu.packed_attention import LocalKernel

    flash_on_cpu.install()
    return FlashAttention() if request.param == "FlashAttention" else LocalKernel()


def sequences_of(groups: list[Group], alone: list[int]) -> tuple[list[int], list[int]]:
    """Lengths and followers of a pack of these groups, and of sequences that share nothing."""
    lengths = [prompt for prompt, _ in groups] + [n for _, answers in groups for n in answers] + alone
    return lengths, [len(answers) for _, answers in groups]


def copies(
    q: Tensor, k: Tensor, v: Tensor, groups: list[Group], alone: list[int], scale: float | None
) -> Tensor:
    """The pack's output, where every response is computed behind a copy of its prompt."""
    factor = CHANNELS**-0.5 if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = torch.zeros_like(q)

    def attend(positions: Tensor, output_rows: Tensor) -> None:
        nonlocal out
        seen = torch.ones(len(positions), len(positions), dtype=torch.bool).tril()
        scores = torch.einsum("qnd,knd->nqk", q[positions], k[positions]) * factor
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        output = torch.einsum("nqk,knd->qnd", weights, v[positions])
        out = out.index_add(0, output_rows, output[len(positions) - len(output_rows) :])

    begin, behind = 0, sum(prompt for prompt, _ in groups)
    for prompt, answers in groups:
        prefix = torch.arange(begin, begin + prompt)
        attend(prefix, prefix)
        for n in answers:
            response = torch.arange(behind, behind + n)
            attend(torch.cat([prefix, response]), response)
            behind += n
        begin += prompt
    for n in alone:
        response = torch.arange(behind, behind + n)
        attend(response, response)
        behind += n
    return out


lengths = st.integers(1, 9)
groups_of_packs = st.lists(st.tuples(lengths, st.lists(lengths, min_size=1, max_size=4)), max_size=4)


@settings(max_examples=40, deadline=None)
@given(
    groups_of_packs,
    st.lists(lengths, min_size=1, max_size=3),
    st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    st.sampled_from([None, 0.4]),
)
def test_output_and_gradients_are_those_of_copied_prompts(
    kernel: PartialAttention,
    groups: list[Group],
    alone: list[int],
    heads: tuple[int, int],
    scale: float | None,
) -> None:
    pack = sequences_of(groups, alone)
    generator = torch.Generator().manual_seed(sum(pack[0]))
    inputs = [
        (
            3 * torch.randn(sum(pack[0]), n, CHANNELS, generator=generator, dtype=torch.float64)
        ).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    ]
    output = merged_attention(*inputs, Sequences.of(*pack, CPU), kernel, scale)
    wanted = copies(*inputs, groups, alone, scale)
    torch.testing.assert_close(output, wanted, rtol=1e-10, atol=1e-12)
    upstream = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad(out, inputs, upstream) for out in (output, wanted)]
    for gradient, of_copies in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, of_copies, rtol=1e-9, atol=1e-11)


def test_scores_that_differ_by_hundreds_stay_finite(kernel: PartialAttention) -> None:
    """One part then has all of the softmax, and the other's exponentials vanish."""
    pack = sequences_of([(3, [2, 2])], [])
    for sign in (1, -1):
        inputs = [torch.ones(7, 1, CHANNELS, dtype=torch.float64) for _ in range(3)]
        inputs[1][:3] *= 100 * sign  # the prompt's keys
        inputs[1][3:] *= -100 * sign
        inputs[2][:3] = 5.0
        inputs = [x.requires_grad_() for x in inputs]
        output = merged_attention(*inputs, Sequences.of(*pack, CPU), kernel, None)
        assert (output[3:] - (5.0 if sign > 0 else 1.0)).abs().max() < 1e-12
        wanted = copies(*inputs, [(3, [2, 2])], [], None)
        for gradient, of_copies in zip(
            *(torch.autograd.grad(x.sum(), inputs) for x in (output, wanted)), strict=True
        ):
            torch.testing.assert_close(gradient, of_copies)


def test_in_bf16_merging_costs_less_than_rounding_does(kernel: PartialAttention) -> None:
    """The inputs' own rounding is left out: both are compared with fp64 of the rounded inputs."""
    groups: list[Group] = [(40, [30, 20, 30]), (25, [50, 10])]
    pack = sequences_of(groups, [])
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(sum(pack[0]), n, 64, generator=generator).bfloat16() for n in (4, 2, 2)]
    upstream = torch.randn(sum(pack[0]), 4, 64, generator=generator).bfloat16()

    def results(dtype: torch.dtype, followers: bool) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        sequences = Sequences.of(*pack, CPU) if followers else Sequences.of([sum(pack[0])], [], CPU)
        out = merged_attention(*leaves, sequences, kernel, None)
        return [out, *torch.autograd.grad(out, leaves, upstream.to(dtype))]

    def errors(followers: bool) -> list[float]:
        pairs = zip(results(torch.bfloat16, followers), results(torch.float64, followers), strict=True)
        return [float((result - exact).norm() / exact.norm()) for result, exact in pairs]

    for merged, plain in zip(errors(True), errors(False), strict=True):
        assert merged < 2 * plain and merged < 6e-3


@pytest.fixture
def core() -> Iterator[Any]:
    from megatron_gvpo.megatron import parallel
    from megatron_gvpo.settings.parallel import ParallelConfig

    parallel.initialize(ParallelConfig(), seed=0)
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_gvpo.megatron.attention.core import SharedPromptAttention

    config = TransformerConfig(
        num_layers=1,
        hidden_size=4 * CHANNELS,
        num_attention_heads=4,
        num_query_groups=2,
        use_cpu_initialization=True,
    )
    yield SharedPromptAttention(
        config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self"
    )
    parallel.shut_down()


def test_the_core_attention_brings_no_number_to_the_host(core: Any) -> None:
    """PyTorch's own descriptions of its kernels, without numbers: shapes and dtypes of a bf16 pass."""
    from megatron_gvpo.megatron.attention.core import OwnPackedSeqParams

    meta = torch.device("meta")
    pack = sequences_of([(3, [2, 4]), (5, [1])], [6])
    sequences = Sequences.of(*pack, meta)
    freqs_t = torch.empty(sum(pack[0]), 1, 1, CHANNELS, device=meta)
    inputs = [
        torch.empty(sum(pack[0]), n, CHANNELS, device=meta, dtype=torch.bfloat16, requires_grad=True)
        for n in (4, 2, 2)
    ]
    params = OwnPackedSeqParams(qkv_format="thd", sequences=sequences, freqs_t=freqs_t)
    out = core(*inputs, None, attn_mask_type=None, attention_bias=None, packed_seq_params=params)
    assert out.shape == (sum(pack[0]), 4 * CHANNELS) and out.dtype == torch.bfloat16
    for x, gradient in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert gradient.shape == x.shape and gradient.dtype == torch.bfloat16


def test_the_layers_of_gpu_runs_get_the_core_attention(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Bridge's own function for GPUs, with local classes for Transformer Engine's."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron_gvpo.megatron.attention.core import SharedPromptAttention, with_core_attention
    from megatron_gvpo.megatron.cpu.bridge import import_bridge
    from megatron_gvpo.megatron.cpu.spec import local_block_spec

    import_bridge()
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", LocalSpecProvider, raising=False)
    provider = GPTModelProvider(num_layers=2, hidden_size=32, num_attention_heads=4)
    plain = provider.transformer_layer_spec(provider)
    changed = with_core_attention(provider.transformer_layer_spec, SharedPromptAttention)(provider)
    stage = with_core_attention(local_block_spec, SharedPromptAttention)(provider, vp_stage=None)
    for layer in (changed, *stage.layer_specs):
        assert layer.submodules.self_attention.submodules.core_attention is type(core)
    assert plain.submodules.self_attention.submodules.core_attention is not type(core)
    assert repr(plain.submodules.mlp) == repr(changed.submodules.mlp)  # partials are equal to nothing

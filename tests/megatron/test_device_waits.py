"""A micro-batch never makes the host wait for a device that is busy.

The meta device has shapes and no numbers, so it refuses every operation that brings a number to the host.
"""

from __future__ import annotations

import pytest
import torch
from helpers.inputs.rows import make_logp, make_rows

from megatron_gvpo.algorithms.base import Loss
from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.algorithms.losses.gvpo_plus_plus import GVPOPlusPlus
from megatron_gvpo.algorithms.losses.pg import CISPO, PolicyGradient
from megatron_gvpo.algorithms.losses.ppo import PPO
from megatron_gvpo.algorithms.losses.supervised import NLL
from megatron_gvpo.kernels.divergence import Divergence
from megatron_gvpo.kernels.linear_divergence import TeacherLogits, linear_divergence
from megatron_gvpo.kernels.linear_logprob import linear_logprob
from megatron_gvpo.kernels.supports import Supports
from megatron_gvpo.kernels.truncated_logprob import truncated_logprob
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.types import BatchTotals, LossInputs

META = torch.device("meta")
ROWS = make_rows([[1.0, 0.0, 0.5], [0.0, 1.0]])


@pytest.mark.parametrize(
    "loss",
    [
        GVPO(),
        GVPOPlusPlus(),
        GVPOPlusPlus(alpha=0.5, terms=("cov",)),
        PPO(entropy_coef=0.01),
        CISPO(),
        PolicyGradient(),
        NLL(),
    ],
    ids=lambda loss: loss.name,
)
def test_a_loss_brings_no_number_to_the_host(loss: Loss):
    rows = ROWS.to(META).with_columns(ref_logp_r=make_logp(ROWS).to(META))
    logp_r = make_logp(ROWS).to(META).requires_grad_()
    value, metrics = loss(LossInputs(rows, logp_r, BatchTotals.of(ROWS)))
    value.backward()
    assert all(metric.is_meta for metric in (value, logp_r.grad, *metrics.values()))


HIDDEN, VOCABULARY = 8, 512  # of a head on the meta device


def head_inputs(vocabulary: int = VOCABULARY) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, an output weight and labels of ROWS' response tokens, without numbers."""
    tokens = ROWS.offsets[-1]
    hidden_rh = torch.randn(tokens, HIDDEN, device=META, requires_grad=True)
    weight_vh = torch.randn(vocabulary, HIDDEN, device=META, requires_grad=True)
    return hidden_rh, weight_vh, torch.zeros(tokens, dtype=torch.int64, device=META)


def supports(*counts: int) -> Supports:
    """Supports of ROWS' tokens with these numbers of members in turn."""
    count_r = torch.tensor(counts).repeat(ROWS.offsets[-1])[: ROWS.offsets[-1]]
    return Supports(torch.zeros(int(count_r.sum()), dtype=torch.int64, device=META), count_r)


@pytest.mark.parametrize("entropy", [False, True], ids=["", "with entropy"])
@pytest.mark.parametrize("support_sizes", [None, (3,), (VOCABULARY,), (3, VOCABULARY, 0)], ids=str)
def test_a_head_brings_no_number_to_the_host(support_sizes: tuple[int, ...] | None, entropy: bool):
    """Without supports, and with narrow and wide ones and both."""
    hidden_rh, weight_vh, label_r = head_inputs()
    of_head = {"temperature": 0.7, "entropy": entropy, "stash_bytes": 2**20}
    if support_sizes is None:
        output = linear_logprob(hidden_rh, weight_vh, label_r, **of_head)
    else:
        output = truncated_logprob(hidden_rh, weight_vh, label_r, supports(*support_sizes), **of_head)
    results = [output.logp_r, *([output.entropy_r] if entropy else [])]
    torch.stack([result.sum() for result in results]).sum().backward()
    assert all(tensor.is_meta for tensor in (*results, hidden_rh.grad, weight_vh.grad))


@pytest.mark.parametrize(
    "divergence", [Divergence(kind="forward"), Divergence(kind="js", top_k=4)], ids=lambda d: d.kind
)
def test_a_divergence_brings_no_number_to_the_host(divergence: Divergence):
    hidden_rh, weight_vh, label_r = head_inputs()
    teacher_rh, teacher_vh, _ = head_inputs(VOCABULARY - 1)
    weight_r = torch.ones(len(label_r), device=META)
    teacher = TeacherLogits(teacher_rh, teacher_vh, VOCABULARY - 1)
    output = linear_divergence(hidden_rh, weight_vh, teacher, label_r, weight_r, divergence)
    output.surrogate.backward()
    assert all(tensor.is_meta for tensor in (*output, hidden_rh.grad, weight_vh.grad))


def test_what_rows_derive_of_themselves_comes_along():
    meta_rows = PackedBatch.pack(ROWS).to(META).rows.with_columns(weight_r=None)
    assert meta_rows.offsets == ROWS.offsets
    for name in ("length_n", "seq_r"):
        column = getattr(meta_rows, name)
        assert column.is_meta and column.shape == getattr(ROWS, name).shape
    assert [tensor.shape for tensor in meta_rows.groups] == [tensor.shape for tensor in ROWS.groups]


def test_other_groups_are_derived_anew():
    assert len(ROWS.groups[1]) == 2
    alone = ROWS.with_columns(group_n=torch.arange(len(ROWS)))
    assert alone.groups[1].tolist() == [1] * len(ROWS)

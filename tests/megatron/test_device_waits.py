"""A micro-batch never makes the host wait for a device that is busy.

The meta device has shapes and no numbers, so it refuses every operation that brings a number to the host.
"""

from __future__ import annotations

import pytest
import torch
from helpers.inputs.rows import make_logp, make_rows

from megatron_gvpo.algorithms.base import Loss
from megatron_gvpo.algorithms.losses.gvpo import GVPO
from megatron_gvpo.algorithms.losses.pg import CISPO, PolicyGradient
from megatron_gvpo.algorithms.losses.ppo import PPO
from megatron_gvpo.algorithms.losses.supervised import NLL
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.types import BatchTotals, LossInputs

META = torch.device("meta")
ROWS = make_rows([[1.0, 0.0, 0.5], [0.0, 1.0]])


@pytest.mark.parametrize(
    "loss", [GVPO(), PPO(), CISPO(), PolicyGradient(), NLL()], ids=lambda loss: loss.name
)
def test_a_loss_brings_no_number_to_the_host(loss: Loss):
    rows = ROWS.to(META).with_columns(ref_logp_r=make_logp(ROWS).to(META))
    logp_r = make_logp(ROWS).to(META).requires_grad_()
    value, metrics = loss(LossInputs(rows, logp_r, BatchTotals.of(ROWS)))
    value.backward()
    assert all(metric.is_meta for metric in (value, logp_r.grad, *metrics.values()))


def test_what_rows_derive_of_themselves_comes_along():
    there = PackedBatch.pack(ROWS).to(META).rows.with_columns(weight_r=None)
    assert there.offsets == ROWS.offsets
    for name in ("length_n", "seq_r"):
        assert getattr(there, name).is_meta and getattr(there, name).shape == getattr(ROWS, name).shape
    assert [tensor.shape for tensor in there.groups] == [tensor.shape for tensor in ROWS.groups]


def test_other_groups_are_derived_anew():
    assert len(ROWS.groups[1]) == 2
    alone = ROWS.with_columns(group_n=torch.arange(len(ROWS)))
    assert alone.groups[1].tolist() == [1] * len(ROWS)

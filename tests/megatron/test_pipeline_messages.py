"""Pipeline stages know the shapes of their messages from the packs, and exchange none."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.distributed import launch
from helpers.inputs.rows import make_rows
from helpers.tiny_run import configure


@pytest.mark.parametrize("layout", ["pp=2", "pp=2 vpp=2", "pp=2 tp=2 sequence_parallel=true"])
def test_the_gradients_are_those_of_megatrons_own_messages(layout: str, task: Path, tmp_path: Path) -> None:
    ranks = 4 if "tp" in layout else 2
    launch("test_pipeline_messages:compare", [ranks], str(task), str(tmp_path), layout)


def compare(task: str, out: str, layout: str) -> None:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron_gvpo.megatron import forward
    from megatron_gvpo.megatron.policy import Policy

    keys = [f"parallel.{key}" for key in layout.split()]
    # Few tokens a pack: packs of several lengths.
    config = configure(Path(task), Path(out), "algorithm=gvpo", *keys, "train.max_tokens_per_micro_batch=24")
    policy = Policy.of(config)
    rows = make_rows([[1.0, 0.0, 0.5, 0.2], [0.0, 1.0, 0.5, 0.1]])
    exchanged: list[int] = []
    exchange = P2PCommunicator._communicate_shapes

    def counted(self: Any, *args: Any) -> Any:
        exchanged.append(1)
        return exchange(self, *args)

    P2PCommunicator._communicate_shapes = counted
    gradients: list[list[torch.Tensor]] = []

    def take() -> Any:  # in place of the optimizer's step, which would change the weights
        gradients.append([buffer.clone() for buffer in policy.model.gradient_buffers()])
        return SimpleNamespace(grad_norm=0.0, skipped=False)

    policy.optimizer.apply = take
    planned = forward.planned_messages
    for messages in (planned, lambda *_: {}):
        before = len(exchanged)
        forward.planned_messages = messages
        policy.update(copy.copy(rows), at_step_start=False)
        assert (len(exchanged) > before) == (messages is not planned)
    forward.planned_messages = planned
    with_plan, without_plan = gradients
    assert any(buffer.any() for buffer in with_plan)
    for one, other in zip(with_plan, without_plan, strict=True):
        assert torch.equal(one, other)
    dist.barrier()


def test_a_message_of_another_shape_is_found_where_it_is_sent() -> None:
    """The stage that waits for it would take its bytes for another tensor's, or wait for ever."""
    from megatron_gvpo.megatron.pipeline import PlannedMessages

    messages = PlannedMessages.__new__(PlannedMessages)
    messages._plan({key: [[3, 1, 4], [5, 1, 4]] for key in ("previous", "next")})
    first, second = torch.zeros(3, 1, 4), torch.zeros(5, 1, 4)
    assert messages._communicate_shapes(first, None, True, False) == ([3, 1, 4], [0, 0, 0])
    assert messages._communicate_shapes(second, first, True, True) == ([5, 1, 4], [3, 1, 4])
    with pytest.raises(
        AssertionError, match=r"\[3, 1, 4\] to the previous stage, which waits for \[5, 1, 4\]"
    ):
        messages._communicate_shapes(None, first, False, False)

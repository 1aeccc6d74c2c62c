"""Messages between pipeline stages whose shapes every rank knows beforehand.

Packs differ in length, so megatron-core's stages send each other the shape of every message first, and wait
for the GPU to read it. But every rank of a pipeline has the same micro-batches, and the schedules say in
which order hidden states and their gradients come: in the order of the packs, or, with virtual stages, in
that of the schedule's table, so that every message has the shape of a pack that each side knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

Shape = list[int]
_NOTHING: Shape = [0, 0, 0]


class PlannedMessages(P2PCommunicator):
    """The messages of one pass; `shapes` are those of the hidden states [t, 1, h] between two stages.

    Shapes are by direction, "previous" and "next", in the messages' order, which is the same in both
    directions.
    """

    def __init__(self, group: Any, config: Any, shapes: Mapping[str, Sequence[Shape]]) -> None:
        super().__init__(group, config)
        self._plan(shapes)

    def _plan(self, shapes: Mapping[str, Sequence[Shape]]) -> None:
        self._received = {direction: iter(of_direction) for direction, of_direction in shapes.items()}
        self._sent = {direction: iter(of_direction) for direction, of_direction in shapes.items()}

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        """Return the shapes of messages from the previous and from the next stage; send nothing.

        Raises AssertionError for a message that has another shape than planned: the other stage would wait.
        """
        for direction, tensor in (("next", tensor_send_next), ("previous", tensor_send_prev)):
            if tensor is not None and list(tensor.shape) != (planned := next(self._sent[direction])):
                raise AssertionError(
                    f"{list(tensor.shape)} to the {direction} stage, which waits for {planned}"
                )
        return (
            next(self._received["previous"]) if recv_prev else _NOTHING,
            next(self._received["next"]) if recv_next else _NOTHING,
        )


def planned_messages(config: Any, lengths: Sequence[int], chunks: int) -> dict[str, Any]:
    """Return arguments of megatron-core's schedules; `lengths`: this rank's tokens of every pack.

    `config` is the model's TransformerConfig; `chunks`: a rank's number of virtual stages.
    """
    shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shapes = [[tokens // shards, 1, config.hidden_size] for tokens in lengths]
    group = parallel_state.get_pipeline_model_parallel_group()
    of_direction = {}
    for direction, is_end in (("previous", group.rank() == 0), ("next", group.rank() == group.size() - 1)):
        order = _order(len(lengths), chunks, config.microbatch_group_size_per_vp_stage, is_end)
        of_direction[direction] = [shapes[i] for i in order]
    return {
        "p2p_communicator": PlannedMessages(group, config, of_direction),
        "pg_collection": _process_groups(),
    }


def _order(micro_batches: int, chunks: int, together: int, is_end: bool) -> list[int]:
    """Return the micro-batches of the messages between a stage and one beside it, in their order.

    `together`: how many micro-batches go through a chunk before the next chunk's turn. `is_end`: the stage is
    the first or the last one in this direction. It then has a chunk without messages there: the model's first
    or last one.
    """
    if chunks == 1:
        return list(range(micro_batches))
    table = get_schedule_table(micro_batches, chunks, together)
    return [micro_batch for micro_batch, chunk in table if chunk or not is_end]


def _process_groups() -> ProcessGroupCollection:
    """Return the groups that the schedule would take by itself."""
    state, groups = parallel_state, ProcessGroupCollection()
    groups.tp = state.get_tensor_model_parallel_group()
    groups.cp = state.get_context_parallel_group()
    groups.pp = state.get_pipeline_model_parallel_group()
    groups.embd = state.get_embedding_group(check_initialized=False)
    groups.pos_embd = state.get_position_embedding_group(check_initialized=False)
    groups.dp = state.get_data_parallel_group()
    groups.dp_cp = state.get_data_parallel_group(with_context_parallel=True)
    groups.tp_dp_cp = state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups

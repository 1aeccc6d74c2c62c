"""Writing a checkpoint's tensors: now, or while training goes on, straight from the memory they are in.

Nothing is copied beforehand. A save in the background runs beside generation and scoring, which change no
weight; whatever changes weights or optimizer first waits for what is left of it (`Model.about_to_change`).
So the host never holds more than a file's worth of it besides what it had, wherever the optimizer is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_gvpo.megatron.checkpoint.all_ranks import everywhere, on_rank_0

FILE_BYTES = 256 << 20  # a file has that much, or a single tensor


class _SmallFiles(torch_checkpoint.FileSystemWriter):
    """PyTorch's writer holds the copies of all tensors that a file gets until it is complete (2.13): several
    files, one after the other, where it would write one.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        files: list[list[WriteItem]] = [[]]
        held = 0
        for item in plan.items:
            data = item.tensor_data
            size = 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
            if files[-1] and held + size > FILE_BYTES:
                files.append([])
                held = 0
            files[-1].append(item)
            held += size
        written: list[WriteResult] = []
        for i, items in enumerate(files):
            names = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{i}_")
            written += super().write_data(replace(plan, items=items, storage_data=names), planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done


class Writer(TorchDistSaveShardedStrategy):
    """Writes with PyTorch's own writer; `later`: not before `write` is called.

    megatron-core's asynchronous one, which it uses in every case, copies all tensors to the host and starts
    a process by `spawn`: that takes seconds, and runs the user's script a second time.
    """

    def __init__(self, later: bool = False) -> None:
        super().__init__()
        self._later = later
        self._waiting: list[tuple[dict[str, Any], Path]] = []

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        renamed, *_ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        self._waiting.append((mcore_to_pyt_state_dict(renamed, False), checkpoint_dir))
        if not self._later:
            self.write()

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write what waits. A collective over `group`; raises the same on all ranks where one cannot."""
        for state, directory in self._waiting:
            torch_checkpoint.save(
                state,
                storage_writer=_SmallFiles(directory),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=group,
            )
        self._waiting.clear()


def save_shards(what: str, state: Callable[[], dict[str, Any]], directory: Path, writer: Writer) -> None:
    """What megatron-core's dist_checkpointing.save does to what `state` makes, step by step.

    In one call (0.19.2), a rank that fails in one of the steps leaves the others in the next one's collective
    until the timeout. A collective; raises CheckpointError on all ranks, with that rank's error.
    """
    made: list[dict[str, Any]] = []

    def make() -> None:
        sharded, common = save_preprocess(state(), validate_access_integrity=False)
        made.extend((sharded, common))

    everywhere(what, make)
    sharded, common = made
    _, of_all = determine_global_metadata(sharded)
    everywhere(what, lambda: validate_sharding_integrity(of_all))
    rank = dist.get_rank()
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=rank)
    everywhere(what, lambda: writer.save(sharded, directory))
    config = CheckpointingConfig(writer.backend, writer.version)
    on_rank_0(what, lambda: save_config(config, str(directory)))


class Background:
    """`work` in a thread of its own, until `wait` is called."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what is to be read has been written
            self._device: int | None = torch.cuda.current_device()
        else:
            self._device = None
        # A daemon: a run that fails elsewhere must not wait for ranks that are gone.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._problem: BaseException | None = None
        self._thread.start()

    def wait(self) -> None:
        """Until it is done. Raises what it raised."""
        self._thread.join()
        if (problem := self._problem) is not None:
            self._problem = None
            raise problem

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._work()
        except BaseException as error:  # for the thread that waits
            self._problem = error

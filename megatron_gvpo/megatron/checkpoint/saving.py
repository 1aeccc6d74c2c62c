"""Writes a checkpoint's tensors, now or in the background of training, without a copy of them.

A background save runs beside generation and scoring, which do not change weights. Code that changes weights
or optimizer waits for it first (`Model.finish_background_work`). So the save needs host memory for one tensor
at a time only, wherever the optimizer is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
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

from megatron_gvpo.megatron.checkpoint.loading import run_on_all_ranks, run_on_rank_0
from megatron_gvpo.megatron.checkpoint.storage import FilesWriter


class Writer(TorchDistSaveShardedStrategy):
    """Writes with PyTorch's own writer; `deferred`: only when `write` is called.

    megatron-core always uses its asynchronous writer. That one copies all tensors to the host and starts a
    process by `spawn`, which takes seconds and runs the user's script a second time.
    """

    def __init__(self, deferred: bool = False) -> None:
        super().__init__()
        self._deferred = deferred
        self._waiting: list[tuple[dict[str, Any], Path]] = []

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        renamed, *_ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        self._waiting.append((mcore_to_pyt_state_dict(renamed, False), checkpoint_dir))
        if not self._deferred:
            self.write()

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write what `save` deferred. A collective over `group`; an error of one rank is raised on all."""
        for state, directory in self._waiting:
            torch_checkpoint.save(
                state,
                storage_writer=FilesWriter(directory),
                planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=group,
            )
        self._waiting.clear()


def save_shards(what: str, state: Callable[[], dict[str, Any]], directory: Path, writer: Writer) -> None:
    """Save the sharded state that `state` returns, with the steps of megatron-core's dist_checkpointing.save.

    megatron-core (0.19.2) takes the steps in one call: a rank that fails in one step leaves the others in the
    next step's collective until the timeout. Here, all ranks raise CheckpointError with that rank's error. A
    collective.
    """
    made: list[dict[str, Any]] = []

    def make() -> None:
        sharded, common = save_preprocess(state(), validate_access_integrity=False)
        made.extend((sharded, common))

    run_on_all_ranks(what, make)
    sharded, common = made
    _, all_metadata = determine_global_metadata(sharded)
    run_on_all_ranks(what, lambda: validate_sharding_integrity(all_metadata))
    rank = dist.get_rank()
    sharded["common_state"] = ShardedObject("common_state", common, (1,), (0,), replica_id=rank)
    run_on_all_ranks(what, lambda: writer.save(sharded, directory))
    config = CheckpointingConfig(writer.backend, writer.version)
    run_on_rank_0(what, lambda: save_config(config, str(directory)))


class BackgroundThread:
    """Runs `work` in a thread; call `wait` for its end."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # all tensors that the thread reads are complete
            self._device: int | None = torch.cuda.current_device()
        else:
            self._device = None
        # A daemon: if the run fails elsewhere, exit must not wait for ranks that are gone.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._problem: BaseException | None = None
        self._thread.start()

    def wait(self) -> None:
        """Wait until the work is done. Raises its error."""
        self._thread.join()
        if (problem := self._problem) is not None:
            self._problem = None
            raise problem

    def _run(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
            self._work()
        except BaseException as error:  # `wait` raises it
            self._problem = error

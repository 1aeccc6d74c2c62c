"""Saves sharded checkpoints by megatron-core's dist_checkpointing; none is ever incomplete.

A checkpoint is a directory `step_00000042/`. It holds the model, optimizer, schedule and random states,
sharded, and `state.json`, the trainer's own small state. It is written under another name and renamed when
all ranks are done. So a full disk or a kill leaves the previous checkpoint unchanged. A previous checkpoint
of the same step is renamed first, and counts under its new name until the new checkpoint has the old name.

A background save runs beside generation and scoring, which do not change weights. Code that changes weights
or optimizer waits for it first (`Model.finish_background_work`). So the save copies nothing in advance, and
needs host memory for one tensor at a time only, wherever the optimizer is.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
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

from megatron_gvpo.core.errors import CheckpointError
from megatron_gvpo.megatron.checkpoint.directory import (
    PARTIAL,
    RECORD,
    REPLACED,
    bound_text,
    complete_checkpoints,
    record_text,
    run_on_all_ranks,
    run_on_rank_0,
)
from megatron_gvpo.megatron.checkpoint.state import (
    TrainedModel,
    layout_of,
    sharded_state,
    trained_models,
    weights_state,
)
from megatron_gvpo.megatron.checkpoint.storage import FilesWriter
from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.runs.written import json_object, step_name


def save_policy(
    root: Path,
    step: int,
    policy: Policy,
    state: dict[str, Any],
    keep: int,
    asynchronous: bool = False,
    best: int | None = None,
) -> Path:
    """Write `root`/step_<step> and remove all but the newest `keep` checkpoints. A collective.

    `best`: the step whose checkpoint stays, too. `state` holds JSON values. `asynchronous`: return before the
    write is done. The directory gets its name when it is complete, before the next change of weights or
    optimizer. If any rank fails to write, every rank raises CheckpointError: here or, if asynchronous, in
    `Model.finish_background_work`.
    """
    for model in policy.models:  # waits for an earlier save: only one runs at a time
        model.finish_background_work()
    final = root / step_name(step)
    partial = final.with_suffix(PARTIAL)
    record = record_text(step, layout_of(policy), {**state, **_method_state(policy)})
    writer = Writer(deferred=True)
    run_on_rank_0(f"cannot write {final}", lambda: _make_empty(partial))
    for trained in trained_models(policy, partial):
        _prepare(f"cannot write {final}", trained, writer)

    def partial_to_final() -> None:
        _finish(partial, final, record, keep, best)

    def write(group: dist.ProcessGroup | None = None) -> None:
        try:
            run_on_all_ranks(f"cannot write {final}", lambda: writer.write(group), group)
        except CheckpointError as error:
            free = shutil.disk_usage(root).free / (1 << 20)
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            limited = "" if limit == resource.RLIM_INFINITY else f"; ulimit -f: no file above {limit} bytes"
            raise CheckpointError(f"{error} ({free:.0f} MiB are free there{limited})") from None
        run_on_rank_0(f"cannot finish {final}", partial_to_final, group)

    if asynchronous:
        group = policy.background_group()  # scoring uses the other groups meanwhile
        thread = BackgroundThread(lambda: write(group))
        for model in policy.models:
            model.add_background_work(thread.wait)
    else:
        write()
    return final


def _method_state(policy: Policy) -> dict[str, Any]:
    """Return the state that a run must share to load the checkpoint: reference policy, model, adapters."""
    adapters = policy.model.adapters
    identity = {} if adapters is None else {"adapter": adapters.identity()}
    return {"reference": policy.kept_reference, "model": policy.model.facts, **identity}


def _prepare(what: str, trained: TrainedModel, writer: Writer) -> None:
    """Write the small state; `writer` keeps the tensors for later, as views of model and optimizer."""
    model, optimizer, reference = trained.model, trained.optimizer, trained.reference

    def state_with_step() -> dict[str, Any]:
        state = sharded_state(trained, randomness=True)
        state["optimizer"]["step"] = optimizer.steps
        return state

    model.finish_param_gather()
    run_on_rank_0(what, lambda: trained.directory.mkdir(exist_ok=True))
    with megatron_device():
        save_shards(what, state_with_step, trained.directory, writer)
        if reference is not None:
            target = trained.directory / "reference"
            run_on_rank_0(what, target.mkdir)
            save_shards(what, lambda: reference.sharded(weights_state(model)), target, writer)


def _finish(partial: Path, final: Path, record: str, keep: int, best: int | None) -> None:
    """Give a written checkpoint its name, and remove the checkpoints that are not to be kept."""
    run = json_object(final.parent.parent / "run.json").get("id")
    (partial / RECORD).write_text(bound_text(record, partial, run))
    _flush(partial)
    if final.exists():  # this step was saved before, and is saved again because the run is interrupted
        replaced = final.with_suffix(REPLACED)
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(final, replaced)
    os.replace(partial, final)
    root = final.parent
    _sync(root)  # the new name must be on the disk before older checkpoints go
    complete = complete_checkpoints(root)
    to_keep = set(complete[-keep:])
    if best is not None:
        to_keep |= {path for path in complete if path.stem == step_name(best)}
    unfinished = [path for path in root.glob("step_*") if path.suffix in (PARTIAL, REPLACED)]
    # This also removes the files of runs that were killed while saving.
    for path in {*complete, *unfinished} - to_keep:
        _remove(path)


def _make_empty(partial: Path) -> None:
    """Make an empty directory, and remove files of failed saves and killed runs, which may fill the disk."""
    for unfinished in partial.parent.glob(f"step_*{PARTIAL}"):
        shutil.rmtree(unfinished, ignore_errors=True)
    partial.mkdir(parents=True)


def _flush(directory: Path) -> None:
    """Sync all small files to the disk, so that they are complete even if the node fails.

    The ranks have already done this for their tensors.
    """
    for folder, _, names in os.walk(directory):
        for name in names:
            if not name.endswith(".distcp"):
                _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # this file system cannot sync a directory
            raise
    finally:
        os.close(descriptor)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no complete name ever lacks files."""
    if checkpoint.is_symlink():  # the files behind a link belong to the user, who moved them
        checkpoint.unlink()
        return
    partial = checkpoint.with_suffix(PARTIAL)
    if partial != checkpoint:
        shutil.rmtree(partial, ignore_errors=True)
        os.replace(checkpoint, partial)
    shutil.rmtree(partial, ignore_errors=True)  # files that another node has open stay until the next save


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
        """Write the files that `save` deferred.

        A collective over `group`; all ranks raise an error of one.
        """
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
    parts: list[dict[str, Any]] = []  # sharded values, and values that all ranks share
    run_on_all_ranks(what, lambda: parts.extend(save_preprocess(state(), validate_access_integrity=False)))
    sharded, common = parts
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
        # The thread is a daemon: if the run fails elsewhere, exit must not wait for ranks that have ended.
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

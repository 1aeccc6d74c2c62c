"""Saves and loads sharded checkpoints by megatron-core's dist_checkpointing; none is ever incomplete.

A checkpoint is a directory `step_00000042/`. It holds the model, optimizer, schedule and random states,
sharded, and `state.json`, the trainer's own small state. It is written under another name and renamed when
all ranks are done. So a full disk or a kill leaves the previous checkpoint unchanged. A previous checkpoint
of the same step is renamed first, and counts under its new name until the new checkpoint has the old name.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_gvpo.core.errors import CheckpointError as CheckpointError
from megatron_gvpo.megatron.adapters.tensors import is_adapter
from megatron_gvpo.megatron.checkpoint.loading import load_shards, run_on_all_ranks, run_on_rank_0
from megatron_gvpo.megatron.checkpoint.newest import PARTIAL, REPLACED, complete, read_record, record_text
from megatron_gvpo.megatron.checkpoint.newest import load_newest as load_newest
from megatron_gvpo.megatron.checkpoint.newest import newest as newest
from megatron_gvpo.megatron.checkpoint.optimizer_checkpoint import optimizer_shards
from megatron_gvpo.megatron.checkpoint.saving import BackgroundThread, Writer, save_shards
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.optimizer import Optimizer
from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.megatron.reference_weights import ReferenceWeights


def save(
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
    for model in policy.models:  # only one save at a time
        model.finish_background_work()
    final = root / f"step_{step:08d}"
    partial = final.with_suffix(PARTIAL)
    state = {**state, "reference": policy.kept_reference}
    adapters = policy.model.adapters
    if adapters is not None:
        state = {**state, "adapter": adapters.identity()}
    text = record_text(step, _layout(policy), state)
    writer = Writer(deferred=True)
    run_on_rank_0(f"cannot write {final}", lambda: _fresh_directory(partial))
    for part in _parts(policy, partial):
        _prepare(f"cannot write {final}", part, writer)

    def finish() -> None:
        (partial / "state.json").write_text(text)
        _flush(partial)
        if final.exists():  # this step was saved before, and is saved again because the run is interrupted
            replaced = final.with_suffix(REPLACED)
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(final, replaced)
        os.replace(partial, final)
        _sync(root)  # before the checkpoints go that this one replaces
        found = complete(root)
        unfinished = [path for path in root.glob("step_*") if path.suffix in (PARTIAL, REPLACED)]
        kept = {*found[-keep:], *(path for path in found if path.stem == f"step_{best or 0:08d}")}
        for path in {*found, *unfinished} - kept:  # also those of runs killed while saving
            _remove(path)

    def write(group: dist.ProcessGroup | None = None) -> None:
        try:
            run_on_all_ranks(f"cannot write {final}", lambda: writer.write(group), group)
        except CheckpointError as error:
            free = shutil.disk_usage(root).free / (1 << 20)
            raise CheckpointError(f"{error} ({free:.0f} MiB are free there)") from None
        run_on_rank_0(f"cannot finish {final}", finish, group)

    if asynchronous:
        group = policy.background_group()  # scoring uses the other groups meanwhile
        writing = BackgroundThread(lambda: write(group))
        for model in policy.models:
            model.add_background_work(writing.wait)
    else:
        write()
    return final


def load(directory: Path, policy: Policy) -> dict[str, Any]:
    """Restore the policy from a checkpoint of any layout; returns the trainer's state. A collective.

    If any rank cannot read a part of it, every rank raises CheckpointError.
    """
    records: list[dict[str, Any]] = []

    def read() -> None:
        records.append(read_record(directory))
        check_adapters(directory, records[0], policy.model)
        _check_reference(directory, records[0].get("reference"), policy.kept_reference)

    run_on_all_ranks("", read)
    [state] = records
    for part in _parts(policy, directory):
        _read(f"cannot read {directory}", part, same_layout=state["layout"] == _layout(policy))
    return state


@dataclass(frozen=True)
class _Part:
    """One trained model of a checkpoint: the policy, or the critic, which has a directory inside."""

    directory: Path
    model: Model
    optimizer: Optimizer
    reference: ReferenceWeights | None = None


def _parts(policy: Policy, directory: Path) -> list[_Part]:
    parts = [_Part(directory, policy.model, policy.optimizer, policy.reference)]
    if (critic := policy.critic) is not None:
        parts.append(_Part(directory / "critic", critic.model, critic.optimizer))
    return parts


def _prepare(what: str, part: _Part, writer: Writer) -> None:
    """Write the small state; `writer` keeps the tensors for later, as views of model and optimizer."""
    model, optimizer, reference = part.model, part.optimizer, part.reference

    def own() -> dict[str, Any]:
        state = _sharded_state(part, randomness=True)
        state["optimizer"]["step"] = optimizer.steps
        return state

    model.finish_param_gather()
    run_on_rank_0(what, lambda: part.directory.mkdir(exist_ok=True))
    with megatron_device():
        save_shards(what, own, part.directory, writer)
        if reference is not None:
            run_on_rank_0(what, (part.directory / "reference").mkdir)
            target = part.directory / "reference"
            save_shards(what, lambda: reference.sharded(weights_state(model)), target, writer)


def _read(what: str, part: _Part, same_layout: bool) -> None:
    model, optimizer, reference = part.model, part.optimizer, part.reference
    with megatron_device(), torch.no_grad():
        if reference is not None:
            weights: dict[str, Any] = {}

            def other() -> dict[str, Any]:
                weights.update(weights_state(model))
                return reference.sharded(weights)

            loaded_reference = load_shards(what, other, part.directory / "reference")
            run_on_all_ranks(what, lambda: load_weights(model, loaded_reference))
            run_on_all_ranks(what, lambda: reference.restore(weights, loaded_reference))

        def own() -> dict[str, Any]:
            return _sharded_state(part, randomness=same_layout)

        loaded = load_shards(what, own, part.directory)

        def take() -> None:
            load_weights(model, loaded)  # the optimizer's tensors were loaded in place
            optimizer.steps = loaded["optimizer"]["step"]
            optimizer.scheduler.num_steps = 0  # Megatron adds the loaded number to it
            optimizer.scheduler.load_state_dict(loaded["schedule"])
            if same_layout:  # other layouts have other ranks' generators; no trained number depends on them
                _restore_random_state(loaded["random"])

        run_on_all_ranks(what, take)


def _sharded_state(part: _Part, randomness: bool) -> dict[str, Any]:
    weights = weights_state(part.model)
    state = {
        **weights,
        "optimizer": {"tensors": optimizer_shards(part.optimizer.megatron, weights)},
        "schedule": part.optimizer.scheduler.state_dict(),
    }
    if randomness:
        rank, world = dist.get_rank(), dist.get_world_size()
        state["random"] = ShardedObject("random", _random_state(), (world,), (rank,))
    return state


def check_adapters(directory: Path, record: dict[str, Any], model: Model) -> None:
    """Raise CheckpointError unless a checkpoint is of the model's adapters, on the same base. No collective.

    `record`: its state.json.
    """
    saved, ours = record.get("adapter"), None if model.adapters is None else model.adapters.identity()
    if (saved is None) != (ours is None):
        holds, given = ("whole weights", "set") if saved is None else ("adapters", "missing")
        raise CheckpointError(f"{directory} holds {holds}, and model.adapter is {given}: make them agree")
    for key, value in (ours or {}).items():
        if saved is not None and value is not None and saved[key] != value:
            if key != "base":
                raise CheckpointError(
                    f"{directory} has adapters with {key}={saved[key]}, and model.adapter has {value}"
                )
            raise CheckpointError(
                f"{directory} has adapters for another base model than model.path: its config.json and "
                f"weights are {_short(saved[key])}, and those here are {_short(value)}"
            )


def _check_reference(directory: Path, saved: str | None, ours: str) -> None:
    """Raise CheckpointError if the method compares with other weights than before. No collective.

    `saved`: the kept reference in state.json; None if an earlier version wrote it.
    """
    if ours == "base" and saved == "fixed":
        raise CheckpointError(
            f"{directory}: its run compared with the adapters that it began with, and model.adapter.path is "
            "missing: the reference would be the base model. Name their directory again"
        )
    if ours == "fixed" and saved == "average":
        raise CheckpointError(
            f"{directory}: its run compared with a moving average, and a fixed reference is the policy that "
            "the run began with, of which no weights are left: keep the reference ema, or start a new run "
            "from these weights (megatron-gvpo export)"
        )
    if ours in ("fixed", "average") and saved in ("none", "base"):
        began = ", or began without model.adapter.path" if saved == "base" else ""
        raise CheckpointError(
            f"{directory} has no weights of a reference policy, which the method needs: its run had another "
            f"method{began}. Start a new run from its weights (megatron-gvpo export)"
        )


def _short(base: dict[str, Any]) -> str:
    return f"{base['bytes']} bytes with sha256 {base['sha256'][:8]}"


def _layout(policy: Policy) -> dict[str, int]:
    model = policy.model.config
    return {
        "parallel.tp": model.tensor_model_parallel_size,
        "parallel.pp": model.pipeline_model_parallel_size,
        "parallel.vpp": model.virtual_pipeline_model_parallel_size or 1,
        "parallel.cp": model.context_parallel_size,
        "parallel.ep": model.expert_model_parallel_size,
        "parallel.etp": model.expert_tensor_parallel_size,
        "processes": dist.get_world_size(),
    }


def _bare(model: Model) -> dict[str, Any]:
    """Return the model's chunks by name, without the wrappers for data parallelism and mixed precision."""
    chunks = {}
    for i, chunk in enumerate(model.chunks):
        while hasattr(chunk, "module"):  # Megatron's wrappers hold the wrapped module
            chunk = chunk.module
        chunks["model" if len(model.chunks) == 1 else f"model{i}"] = chunk
    return chunks


def weights_state(model: Model) -> dict[str, Any]:
    """Return the model's weights, or its adapters alone, for dist_checkpointing, to save or to load."""
    states = {name: chunk.sharded_state_dict() for name, chunk in _bare(model).items()}
    if model.adapters is None:
        return states
    return {
        name: {key: value for key, value in state.items() if is_adapter(key)}
        for name, state in states.items()
    }


def load_weights(model: Model, loaded: dict[str, Any]) -> None:
    """Load into the model what dist_checkpointing loaded for `weights_state`."""
    for name, chunk in _bare(model).items():
        # The wrappers of adapters write the base's weights under other names than they look for. The names of
        # the adapters have been compared with the checkpoint's.
        found = chunk.load_state_dict(loaded[name], strict=model.adapters is None)
        if wrong := [key for key in found.missing_keys if is_adapter(key)] + found.unexpected_keys:
            raise RuntimeError(f"adapters that cannot be loaded: {wrong[0]} and {len(wrong) - 1} more")


def _random_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def _restore_random_state(state: dict[str, Any]) -> None:
    get_cuda_rng_tracker().set_states(state["megatron"])
    torch.cuda.set_rng_state(state["cuda"])
    torch.set_rng_state(state["torch"])


def _flush(directory: Path) -> None:
    """Have the disk take all small files: if the node fails, no named checkpoint lacks what is in them.

    The ranks have done so with their tensors.
    """
    for place, _, names in os.walk(directory):
        for name in names:
            if not name.endswith(".distcp"):
                _sync(Path(place, name))
        _sync(Path(place))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has no such thing
            raise
    finally:
        os.close(descriptor)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that no complete name ever lacks files."""
    partial = checkpoint.with_suffix(PARTIAL)
    if partial != checkpoint:
        shutil.rmtree(partial, ignore_errors=True)
        os.replace(checkpoint, partial)
    shutil.rmtree(partial, ignore_errors=True)  # files that another node has open stay until the next save


def _fresh_directory(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)

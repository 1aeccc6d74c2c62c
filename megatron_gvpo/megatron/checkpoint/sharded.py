"""Sharded checkpoints by megatron-core's dist_checkpointing: complete or absent, never half.

A checkpoint is a directory `step_00000042/`: the model, optimizer, schedule and random states, sharded,
and `state.json`, the trainer's own small state. It is written aside and renamed when all ranks are done,
so a full disk or a kill leaves the previous checkpoint as it was. Where that is one of the same step, it is
renamed first, and counts under that name until the new one has its place.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_gvpo.megatron.checkpoint.all_ranks import CheckpointError as CheckpointError
from megatron_gvpo.megatron.checkpoint.all_ranks import everywhere, on_rank_0
from megatron_gvpo.megatron.checkpoint.loading import load_shards
from megatron_gvpo.megatron.checkpoint.optimizer_checkpoint import optimizer_shards
from megatron_gvpo.megatron.checkpoint.saving import Background, Writer, save_shards
from megatron_gvpo.megatron.critic import Critic
from megatron_gvpo.megatron.model.build import Model
from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.runtime.collectives import broadcast_msgpack

_FORMAT = 2  # of the optimizer's part
_PARTIAL, _REPLACED = ".partial", ".replaced"


def save(
    root: Path, step: int, policy: Policy, state: dict[str, Any], keep: int, asynchronous: bool = False
) -> Path:
    """Write `root`/step_<step> and remove all but the newest `keep`. A collective.

    `state` holds JSON values. `asynchronous`: return before it is written; the directory gets its name when
    it is complete, which is before the next change of weights or optimizer. Raises CheckpointError on every
    rank when any rank fails to write; where that is later, from `Model.about_to_change`.
    """
    for model in policy.models:  # one at a time
        model.about_to_change()
    final = root / f"step_{step:08d}"
    aside = final.with_suffix(_PARTIAL)
    record = {"format": _FORMAT, "step": step, "layout": _layout(policy), **state}
    # Prompts carry their data record, in which Parquet may have dates: nothing that a run reads again.
    text = json.dumps(record, default=str)
    writer = Writer(later=True)
    on_rank_0(f"cannot write {final}", lambda: _fresh_directory(aside))
    _prepare(f"cannot write {final}", aside, policy, writer)

    def finish() -> None:
        with (aside / "state.json").open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # as the tensors are: a node that fails leaves no name without content
        if final.exists():  # saved before, at the end of the step that is now interrupted
            replaced = final.with_suffix(_REPLACED)
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(final, replaced)
        os.replace(aside, final)
        found = complete(root)
        unfinished = [path for path in root.glob("step_*") if path.suffix in (_PARTIAL, _REPLACED)]
        for path in {*found, *unfinished} - {*found[-keep:]}:  # also of runs that were killed while saving
            _remove(path)

    def write(group: dist.ProcessGroup | None = None) -> None:
        try:
            everywhere(f"cannot write {final}", lambda: writer.write(group), group)
        except CheckpointError as error:
            free = shutil.disk_usage(root).free / (1 << 20)
            raise CheckpointError(f"{error} ({free:.0f} MiB are free there)") from None
        on_rank_0(f"cannot finish {final}", finish, group)

    if asynchronous:
        group = policy.group_aside()  # the others are in use meanwhile
        writing = Background(lambda: write(group))
        for model in policy.models:
            model.before_change.append(writing.wait)
    else:
        write()
    return final


def load(directory: Path, policy: Policy) -> dict[str, Any]:
    """Restore the policy from a checkpoint, of whatever layout; returns the trainer's state. A collective.

    Raises CheckpointError, on every rank, for anything that cannot be read on one.
    """
    records: list[dict[str, Any]] = []
    everywhere("", lambda: records.append(_record(directory)))
    [state] = records
    _read(f"cannot read {directory}", directory, policy, same_layout=state["layout"] == _layout(policy))
    return state


def complete(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, oldest first."""
    found = [path for path in root.glob("step_*") if (path / "state.json").is_file()]
    of_step = {path.stem: path for path in found if path.suffix == _REPLACED}
    of_step |= {path.name: path for path in found if not path.suffix}
    return [of_step[step] for step in sorted(of_step)]


def newest(root: Path) -> Path | None:
    """The newest complete checkpoint under `root` that rank 0 sees, on every rank. A collective.

    A shared file system may for a while show an older state of itself to other nodes. Raises CheckpointError,
    on every rank, where one may not look.
    """
    found: list[Path] = []
    everywhere(f"cannot read {root}", lambda: found.extend(complete(root)))
    name = broadcast_msgpack(found[-1].name if found else None)
    return None if name is None else root / name


def _record(directory: Path) -> dict[str, Any]:
    """What state.json says, if this version can read what is beside it."""
    try:
        state: dict[str, Any] = json.loads((directory / "state.json").read_text())
        found = state.get("format", 1) if state["layout"] else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory / 'state.json'} is no state of a checkpoint of this program: "
            f"{type(error).__name__}: {error}"
        ) from None
    if found != _FORMAT:
        raise CheckpointError(
            f"{directory} has format {found}, and this version reads format {_FORMAT}: go on with the "
            "version that wrote it, or begin with its weights (megatron-gvpo convert)"
        )
    return state


def _prepare(what: str, directory: Path, policy: Policy | Critic, writer: Writer) -> None:
    """Write what is small; `writer` has the rest, as views of the weights and the optimizer."""

    def own() -> dict[str, Any]:
        policy.optimizer.allocate()  # it may be saved before its first update
        state = _sharded_state(policy, randomness=True)
        state["optimizer"]["step"] = policy.optimizer.steps
        return state

    def reference() -> dict[str, Any]:
        assert policy.shadow is not None
        return policy.shadow.sharded(weights_state(policy.model))

    policy.model.settle()
    with megatron_device():
        save_shards(what, own, directory, writer)
        if policy.shadow is not None:
            on_rank_0(what, (directory / "reference").mkdir)
            save_shards(what, reference, directory / "reference", writer)
    if isinstance(policy, Policy) and policy.critic is not None:
        on_rank_0(what, (directory / "critic").mkdir)
        _prepare(what, directory / "critic", policy.critic, writer)


def _read(what: str, directory: Path, policy: Policy | Critic, same_layout: bool) -> None:
    model, optimizer, shadow = policy.model, policy.optimizer, policy.shadow
    with megatron_device(), torch.no_grad():
        if shadow is not None:
            weights: dict[str, Any] = {}

            def other() -> dict[str, Any]:
                weights.update(weights_state(model))
                return shadow.sharded(weights)

            reference = load_shards(what, other, directory / "reference")
            everywhere(what, lambda: load_weights(model, reference))
            everywhere(what, lambda: shadow.restore(weights, reference))

        def own() -> dict[str, Any]:
            optimizer.allocate()
            return _sharded_state(policy, randomness=same_layout)

        loaded = load_shards(what, own, directory)

        def take() -> None:
            load_weights(model, loaded)  # the optimizer's tensors were loaded in place
            optimizer.steps = loaded["optimizer"]["step"]
            optimizer.scheduler.load_state_dict(loaded["schedule"])
            if same_layout:  # a rank of another has no generator to go on with; nothing that is trained draws
                _restore_random_state(loaded["random"])

        everywhere(what, take)
    if isinstance(policy, Policy) and policy.critic is not None:
        _read(what, directory / "critic", policy.critic, same_layout)


def _sharded_state(policy: Policy | Critic, randomness: bool) -> dict[str, Any]:
    weights = weights_state(policy.model)
    state = {
        **weights,
        "optimizer": {"tensors": optimizer_shards(policy.optimizer.megatron, weights)},
        "schedule": policy.optimizer.scheduler.state_dict(),
    }
    if randomness:
        rank, world = dist.get_rank(), dist.get_world_size()
        state["random"] = ShardedObject("random", _random_state(), (world,), (rank,))
    return state


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
    """The model's chunks without the wrappers for data parallelism and mixed precision, by name."""
    chunks = {}
    for i, chunk in enumerate(model.chunks):
        while hasattr(chunk, "module"):
            chunk = chunk.module
        chunks["model" if len(model.chunks) == 1 else f"model{i}"] = chunk
    return chunks


def weights_state(model: Model) -> dict[str, Any]:
    """The model's weights for dist_checkpointing, to save or to be loaded."""
    return {name: chunk.sharded_state_dict() for name, chunk in _bare(model).items()}


def load_weights(model: Model, loaded: dict[str, Any]) -> None:
    """Take what dist_checkpointing loaded for `weights_state`."""
    for name, chunk in _bare(model).items():
        chunk.load_state_dict(loaded[name])


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


def _remove(checkpoint: Path) -> None:
    """It stops being one at once, not when some of its files are gone."""
    doomed = checkpoint.with_suffix(_PARTIAL)
    if doomed != checkpoint:
        shutil.rmtree(doomed, ignore_errors=True)
        os.replace(checkpoint, doomed)
    shutil.rmtree(doomed, ignore_errors=True)  # files that another node has open stay until the next save


def _fresh_directory(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)

"""Sharded checkpoints by megatron-core's dist_checkpointing: complete or absent, never half.

A checkpoint is a directory `step_00000042/`: the model, optimizer, schedule and random states, sharded,
and `state.json`, the trainer's own small state. It is written aside and renamed when all ranks are done,
so a full disk or a kill leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from megatron_gvpo.config import ConfigError
from megatron_gvpo.exchange import all_gather_msgpack
from megatron_gvpo.megatron.critic import Critic
from megatron_gvpo.megatron.model import Model
from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.megatron.policy import Policy

# By parameter, with the model's own sharding: any layout can read it, and saving gathers each rank's part.
# By buffer: every rank writes what it has, and only the same model-parallel layout finds it again.
_BY_PARAMETER = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_BY_BUFFER = {"distrib_optim_sharding_type": "dp_reshardable"}
_PARTIAL, _REPLACED = ".partial", ".replaced"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; what was on disk before is untouched."""


def save(
    root: Path, step: int, policy: Policy, state: dict[str, Any], keep: int, any_layout: bool = False
) -> Path:
    """Write `root`/step_<step> and remove all but the newest `keep`. A collective.

    `state` holds JSON values. `any_layout`: so that another layout can resume from it.
    Raises CheckpointError on every rank when any rank fails to write.
    """
    final = root / f"step_{step:08d}"
    aside = final.with_name(final.name + _PARTIAL)
    _on_rank_0("prepare", lambda: _fresh_directory(aside))
    try:
        everywhere(f"cannot write {final}", lambda: _write(aside, policy, any_layout))
    except CheckpointError as error:
        free = shutil.disk_usage(root).free / (1 << 20)
        raise CheckpointError(f"{error} ({free:.0f} MiB are free there)") from None

    def finish() -> None:
        record = {"step": step, "layout": _layout(policy), "any_layout": any_layout, **state}
        # Prompts carry their data record, in which Parquet may have dates: nothing that a run reads again.
        (aside / "state.json").write_text(json.dumps(record, default=str))
        replaced = final.with_name(final.name + _REPLACED)
        if final.exists():  # saved before, at the end of the step that is now interrupted
            os.replace(final, replaced)
        os.replace(aside, final)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in complete(root)[:-keep]:
            shutil.rmtree(old)

    _on_rank_0(f"cannot finish {final}", finish)
    return final


def load(directory: Path, policy: Policy) -> dict[str, Any]:
    """Restore the policy from a checkpoint; returns the trainer's state. A collective.

    Raises ConfigError for another layout where the checkpoint was not saved for any, and CheckpointError for
    anything that cannot be read.
    """
    try:
        state: dict[str, Any] = json.loads((directory / "state.json").read_text())
        theirs, ours = state["layout"], _layout(policy)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory / 'state.json'} is no state of a checkpoint of this program: "
            f"{type(error).__name__}: {error}"
        ) from None
    any_layout = bool(state.get("any_layout"))
    if theirs != ours and not any_layout:
        raise ConfigError(
            f"{directory} was written with {_named(theirs)} and checkpoint.any_layout=false, "
            f"and this run has {_named(ours)}: resume with the same layout"
        )
    pipelines = theirs["parallel.pp"] > 1 or ours["parallel.pp"] > 1
    tied = getattr(policy.model.config, "share_embeddings_and_output_weights", False)
    if theirs != ours and (pipelines or tied):
        raise ConfigError(
            f"{directory} was written with {_named(theirs)}, and this run has {_named(ours)}: across "
            "layouts, neither pipelines nor tied embeddings go on exactly; resume with the same layout"
        )
    everywhere(
        f"cannot read {directory}",
        lambda: _read(directory, policy, any_layout, same_layout=theirs == ours),
    )
    return state


def complete(root: Path) -> list[Path]:
    """The complete checkpoints under `root`, oldest first."""
    return sorted(p for p in root.glob("step_*") if not p.suffix and (p / "state.json").is_file())


def _sharded_state(policy: Policy | Critic, optimizer: dict[str, Any], randomness: bool) -> dict[str, Any]:
    state = {
        **weights_state(policy.model),
        "optimizer": optimizer,
        "schedule": policy.optimizer.scheduler.state_dict(),
    }
    if randomness:
        rank, world = dist.get_rank(), dist.get_world_size()
        state["random"] = ShardedObject("random", _random_state(), (world,), (rank,))
    return state


def _optimizer_state(policy: Policy | Critic, loading: bool, any_layout: bool) -> dict[str, Any]:
    """As Megatron has it, and takes it back."""
    state: dict[str, Any] = policy.optimizer.megatron.sharded_state_dict(
        weights_state(policy.model),
        is_loading=loading,
        metadata=_BY_PARAMETER if any_layout else _BY_BUFFER,
    )
    return state


def _of_any_layout(state: dict[str, Any]) -> dict[str, Any]:
    """Its tensors and Adam's step alone: what else it has is this layout's, and settings of the present run.

    (Megatron has an optimizer for all parameters, or, where experts are spread, one for them and one for the
    others.)
    """
    parts = _parts(state)
    steps = [group.get("step", 0) for part in parts for group in part["optimizer"]["param_groups"]]
    return {"tensors": {str(i): p["param_state"] for i, p in enumerate(parts)}, "step": max(steps)}


def _of_this_layout(state: dict[str, Any], loaded: dict[str, Any]) -> dict[str, Any]:
    """`state` with the tensors and the step of what `_of_any_layout` stored."""
    for i, part in enumerate(_parts(state)):
        part["param_state"] = loaded["tensors"][str(i)]
        for group in part["optimizer"]["param_groups"]:
            group["step"] = loaded["step"]
    return state


def _parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [state] if "param_state" in state else list(state.values())


def _write(directory: Path, policy: Policy | Critic, any_layout: bool) -> None:
    policy.model.settle()
    with megatron_device():
        optimizer = _optimizer_state(policy, loading=False, any_layout=any_layout)
        if any_layout:
            optimizer = _of_any_layout(optimizer)
        state = _sharded_state(policy, optimizer, randomness=True)
        dist_checkpointing.save(state, str(directory), InThisProcess())
        if policy.shadow is not None:
            ema = directory / "reference"
            if dist.get_rank() == 0:
                ema.mkdir()
            dist.barrier()
            with policy.shadow.lent():
                dist_checkpointing.save(weights_state(policy.model), str(ema), InThisProcess())
        if isinstance(policy, Policy) and policy.critic is not None:
            if dist.get_rank() == 0:
                (directory / "critic").mkdir()
            dist.barrier()
            _write(directory / "critic", policy.critic, any_layout)


def _read(directory: Path, policy: Policy | Critic, any_layout: bool, same_layout: bool) -> None:
    with megatron_device(), torch.no_grad():
        if policy.shadow is not None:
            reference = dist_checkpointing.load(weights_state(policy.model), str(directory / "reference"))
            load_weights(policy.model, reference)
            policy.shadow.capture()
        optimizer = _optimizer_state(policy, loading=True, any_layout=any_layout)
        wanted = _of_any_layout(optimizer) if any_layout else optimizer
        loaded = dist_checkpointing.load(_sharded_state(policy, wanted, same_layout), str(directory))
        load_weights(policy.model, loaded)
        found = loaded["optimizer"]
        policy.optimizer.load_state_dict(_of_this_layout(optimizer, found) if any_layout else found)
        policy.optimizer.scheduler.load_state_dict(loaded["schedule"])
        if same_layout:  # a rank of another has no generator to go on with; nothing that is trained draws
            _restore_random_state(loaded["random"])
    if isinstance(policy, Policy) and policy.critic is not None:
        _read(directory / "critic", policy.critic, any_layout, same_layout)


class InThisProcess(TorchDistSaveShardedStrategy):
    """Writes with PyTorch's own writer.

    megatron-core's asynchronous one, which it uses in every case, starts a process by `spawn`: that takes
    seconds, and runs the user's script a second time.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        renamed, *_ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


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


def _named(layout: dict[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in layout.items())


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


def _fresh_directory(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _on_rank_0(what: str, action: Any) -> None:
    everywhere(what, action if dist.get_rank() == 0 else lambda: None)


def everywhere(what: str, action: Any) -> None:
    """Run on this rank; if it failed on any, raise CheckpointError on all, so that none waits for another."""
    problem = None
    try:
        action()
    except CheckpointException as error:  # some rank's, with its traceback around it
        problem = _described(next(cause for cause, _ in error.failures.values()))
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = _described(error)
    problems = [p for p in all_gather_msgpack(problem) if p]
    if problems:
        raise CheckpointError(f"{what}: {problems[0]}")


def _described(error: BaseException) -> str:
    """Its first cause: PyTorch's writer covers a full disk with a complaint of its own."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"

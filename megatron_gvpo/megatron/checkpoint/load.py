"""Loads a run's newest checkpoint under any layout, or an older one if the newest is damaged.

If one rank cannot read its part, all ranks raise its error.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron_gvpo.core.collectives import broadcast_msgpack
from megatron_gvpo.core.errors import CheckpointError, DamagedCheckpointError
from megatron_gvpo.huggingface.card import first_difference
from megatron_gvpo.huggingface.checksums import FILE as CHECKSUMS
from megatron_gvpo.huggingface.complete_weights import shown_names
from megatron_gvpo.megatron.checkpoint.directory import (
    DAMAGED,
    RECORD,
    check_files,
    complete_checkpoints,
    incomplete_checkpoints,
    read_record,
    run_on_all_ranks,
    run_on_rank_0,
)
from megatron_gvpo.megatron.checkpoint.state import (
    CRITIC,
    TrainedModel,
    layout_of,
    load_weights,
    restore_random_state,
    sharded_state,
    trained_models,
    weights_state,
)
from megatron_gvpo.megatron.checkpoint.storage import FilesReader, SafeLoadPlanner, plain_values
from megatron_gvpo.megatron.critic import Critic
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.runs.written import step_name

log = logging.getLogger(__name__)

_COMMON = ShardedObject("common_state", None, (1,), (0,)).unique_key  # values that all ranks share


def load_newest[Loaded](
    root: Path, load: Callable[[Path], Loaded], put_aside: bool = False, step: int | None = None
) -> Loaded | None:
    """Load the newest checkpoint under `root` that is not damaged; returns the result of `load`.

    A collective.

    `step`: load only the checkpoint of this step, whose damage does not make another one the newest.

    `load` is a collective that raises DamagedCheckpointError on every rank, or on none; a later call must
    replace everything that a failed one has loaded. Every damaged checkpoint is named in a warning. If a
    living run removes a checkpoint that is being read, the checkpoints that it has then are tried.
    `put_aside`: rename the damaged ones to step_*.damaged, so that they are not counted as the newest.
    Returns None if there is no checkpoint. Raises CheckpointError if all are damaged, and other errors of
    `load`.
    """
    paths: list[Path] = []
    run_on_all_ranks(f"cannot read {root}", lambda: paths.extend(complete_checkpoints(root)))
    wanted = [path.name for path in paths if step is None or path.stem == step_name(step)]
    names = broadcast_msgpack(wanted)
    damaged: list[Path] = []
    problem = ""
    while names:
        name = names.pop()
        directory = root / name
        try:
            run_on_rank_0("", partial(check_files, directory))
            loaded = load(directory)
        except CheckpointError as error:
            if not broadcast_msgpack((directory / RECORD).is_file()):
                if dist.get_rank() == 0:
                    log.warning("%s was removed while it was read: a run writes there", directory)
                return load_newest(root, load, put_aside, step)
            if not isinstance(error, DamagedCheckpointError):
                raise
            damaged.append(directory)
            problem = problem or str(error)
            if names and dist.get_rank() == 0:
                log.warning("%s; trying %s, the checkpoint before it", error, names[-1])
            continue
        if step is None:
            damaged.extend(_incomplete_after(root, name))
        if put_aside:
            run_on_rank_0(f"cannot rename damaged checkpoints in {root}", lambda: _put_aside(damaged))
        if damaged and dist.get_rank() == 0:
            newest_first = sorted(damaged, reverse=True)
            log.warning("%s is used; %s newer, and damaged", directory, _names(newest_first))
        return loaded
    if damaged:
        others = [path for path in paths if path not in damaged]
        raise CheckpointError(f"{problem}; {_remedy(root, damaged, step, others)}")
    return None


def _incomplete_after(root: Path, name: str) -> list[Path]:
    """Return the incomplete checkpoints of later steps than `name`'s; each is named in a warning."""
    incomplete = [path for path in incomplete_checkpoints(root) if path.name > name]
    if dist.get_rank() == 0:
        for path in incomplete:
            log.warning("%s is not a complete checkpoint: it has no file %s", path, RECORD)
    return incomplete


def _remedy(root: Path, damaged: list[Path], step: int | None, others: list[Path]) -> str:
    """The end of the error where no checkpoint was loaded. `others`: the checkpoints of other steps."""
    if step is None:
        return (
            f"no checkpoint in {root} is intact ({_names(damaged)} damaged): copy one from a backup, or "
            "start the run again with --overwrite"
        )
    steps = ", ".join(str(int(path.stem.removeprefix("step_"))) for path in others)
    choice = f"there are checkpoints of the steps {steps}" if steps else "there is no other checkpoint"
    return f"copy it from a backup, or give another --step: {choice}"


def _names(damaged: list[Path]) -> str:
    return f"{', '.join(path.name for path in damaged)} {'is' if len(damaged) == 1 else 'are'}"


def _put_aside(damaged: list[Path]) -> None:
    for path in damaged:
        target = path.with_suffix(DAMAGED)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(path, target)


def load_policy(directory: Path, policy: Policy) -> dict[str, Any]:
    """Restore the policy from a checkpoint of any layout; returns the trainer's state. A collective.

    A critic stays as it was built if the checkpoint is of a method without one.

    If any rank cannot read a part of it, every rank raises CheckpointError.
    """
    records: list[dict[str, Any]] = []

    def read() -> None:
        records.append(read_record(directory))
        check_model(directory, records[0], policy.model)
        check_adapters(directory, records[0], policy.model)
        check_reference(directory, records[0].get("reference"), policy.kept_reference)
        check_critic(directory, records[0], policy.critic)

    run_on_all_ranks("", read)
    [state] = records
    is_same_layout = state["layout"] == layout_of(policy)
    for trained in trained_models(policy, directory):
        if policy.critic is not None and trained.model is policy.critic.model:
            if not _has_critic(state):
                if dist.get_rank() == 0:
                    log.warning(
                        "%s has no critic, because its run had none: a new one is trained, with the learning "
                        "rate of this step, without the first steps of algorithm.critic.warmup_steps",
                        directory,
                    )
                continue
            policy.critic.checkpoint = directory
        _load_model(f"cannot read {directory}", trained, is_same_layout)
    return state


def _load_model(what: str, trained: TrainedModel, is_same_layout: bool) -> None:
    """Load weights, optimizer, schedule and reference of one trained model. A collective."""
    model, optimizer = trained.model, trained.optimizer
    with megatron_device(), torch.no_grad():
        if trained.reference is not None:
            _load_reference(what, trained)
        # The optimizer's tensors are loaded in place.
        loaded = load_shards(what, lambda: sharded_state(trained, is_same_layout), trained.directory)

        def restore() -> None:
            load_weights(model, loaded)
            optimizer.steps = loaded["optimizer"]["step"]
            optimizer.scheduler.num_steps = 0  # Megatron adds the loaded number to it
            optimizer.scheduler.load_state_dict(loaded["schedule"])
            # Another layout has other ranks; no trained number depends on their generators.
            if is_same_layout:
                restore_random_state(loaded["random"])

        run_on_all_ranks(what, restore)
        optimizer.quantize_weights()


def _load_reference(what: str, trained: TrainedModel) -> None:
    """Load the reference weights by way of the model, whose own weights are loaded afterwards."""
    model, reference = trained.model, trained.reference
    assert reference is not None
    weights: dict[str, Any] = {}

    def reference_state() -> dict[str, Any]:
        weights.update(weights_state(model))
        return reference.sharded(weights)

    loaded = load_shards(what, reference_state, trained.directory / "reference")
    run_on_all_ranks(what, lambda: load_weights(model, loaded))
    run_on_all_ranks(what, lambda: reference.restore(weights, loaded))


def check_model(directory: Path, record: dict[str, Any], model: Model) -> None:
    """Raise CheckpointError if a checkpoint is of a model with another config.json. Not a collective.

    Weights of another vocabulary may fit, because the rows are padded, and a value such as rope_theta has no
    weight at all. `record`: its state.json; without `model`, an earlier version wrote it.
    """
    difference = first_difference(record.get("model", {}), model.facts)
    if difference is not None:
        key, saved, own = difference
        raise CheckpointError(
            f"{directory} is of a model with {key}={saved} in its config.json, and the model here has {own}: "
            "name the model that the run began with"
        )


def check_adapters(directory: Path, record: dict[str, Any], model: Model) -> None:
    """Raise CheckpointError unless a checkpoint is of the model's adapters, on the same base.

    Not a collective.

    `record`: its state.json.
    """
    saved = record.get("adapter")
    own = None if model.adapters is None else model.adapters.identity()
    if (saved is None) != (own is None):
        content, key = ("whole weights", "set") if saved is None else ("adapters", "missing")
        raise CheckpointError(
            f"{directory} holds {content}, and model.adapter is {key}: the settings of the run that wrote it "
            f"are in {directory.parent.parent / 'config.yaml'}, which every command takes"
        )
    for key, value in (own or {}).items():
        if saved is not None and value is not None and saved[key] != value:
            if key != "base":
                raise CheckpointError(
                    f"{directory} has adapters with {key}={saved[key]}, and model.adapter has {value}"
                )
            raise CheckpointError(
                f"{directory} has adapters for another base model than model.path: its config.json and "
                f"weights are {_short(saved[key])}, and those here are {_short(value)}"
            )


def _short(base: dict[str, Any]) -> str:
    return f"{base['bytes']} bytes with sha256 {base['sha256'][:8]}"


def check_reference(directory: Path, saved: str | None, own: str) -> None:
    """Raise CheckpointError if the method compares with another reference than the checkpoint's method.

    No collective.

    `saved`: the kept reference in state.json; None if an earlier version wrote it.
    """
    if own == "base" and saved == "fixed":
        raise CheckpointError(
            f"{directory}: its run compared with the adapters that it began with, and model.adapter.path is "
            "missing: the reference would be the base model. Name their directory again"
        )
    if own == "fixed" and saved == "average":
        raise CheckpointError(
            f"{directory}: its run compared with a moving average, and a fixed reference is the policy that "
            "the run began with, of which no weights are left: keep the reference ema, or start a new run "
            "from these weights (megatron-gvpo export)"
        )
    if own in ("fixed", "average") and saved in ("none", "base"):
        began = ", or began without model.adapter.path" if saved == "base" else ""
        raise CheckpointError(
            f"{directory} has no weights of a reference policy, which the method needs: its run had another "
            f"method{began}. Start a new run from its weights (megatron-gvpo export)"
        )


def check_critic(directory: Path, record: dict[str, Any], critic: Critic | None) -> None:
    """Raise CheckpointError if a critic should start anew that has read a part of a damaged checkpoint.

    No collective.

    `record`: the state.json of `directory`.
    """
    if critic is not None and critic.checkpoint is not None and not _has_critic(record):
        raise CheckpointError(
            f"{directory} has no critic, and a part of the one in {critic.checkpoint}, which is damaged, has "
            f"been read: move {critic.checkpoint} elsewhere, and resume again"
        )


def _has_critic(record: dict[str, Any]) -> bool:
    """False if a checkpoint was saved without a critic, by its state.json; a lost one is damage.

    An earlier version did not list the files with checksums: there, a critic is expected.
    """
    return "lists" not in record or f"{CRITIC}/{CHECKSUMS}" in record["lists"]


def load_shards(what: str, state: Callable[[], dict[str, Any]], directory: Path) -> dict[str, Any]:
    """Load the sharded state that `state` returns, with the steps of megatron-core's dist_checkpointing.load.

    megatron-core (0.19.2) takes the steps in one call: a rank that fails before the exchange of metadata
    leaves the others in it until the timeout, and only rank 0 validates the metadata, so it fails alone. It
    also unpickles `.metadata` and the entries that are not tensors, which runs any code that they name. Here,
    no such code is run, and all ranks raise that rank's error: CheckpointError, or for damage
    DamagedCheckpointError. A collective.
    """
    parts: list[Any] = []

    def prepare() -> None:
        reader = open_checkpoint(directory)
        wanted = state()
        prepared, *_ = load_preprocess(wanted)  # copies `wanted`
        sharded, _ = extract_sharded_base(prepared)
        parts.extend((reader, wanted, sharded))

    run_on_all_ranks(what, prepare)
    reader, wanted, sharded = parts
    if reader.checksums is None and dist.get_rank() == 0:
        log.warning("%s has no checksums: an earlier version wrote it; damage is not noticed", directory)
    _, all_metadata = determine_global_metadata(sharded)
    run_on_all_ranks(what, lambda: validate_sharding_integrity(all_metadata))

    def compare() -> None:
        names = {base.key for metadata in all_metadata for base in metadata}
        if problem := check_names(names, _stored_names(reader)):
            raise CheckpointError(problem)

    run_on_rank_0(what, compare)
    loaded: list[dict[str, Any]] = []
    run_on_all_ranks(what, lambda: loaded.append(read_state(wanted, reader)))
    return loaded[0]


def _stored_names(reader: FilesReader) -> set[str]:
    entries = reader.metadata.state_dict_metadata.items()
    return {
        ShardedObject.empty_from_unique_key(name).key if isinstance(entry, BytesStorageMetadata) else name
        for name, entry in entries
    }


def open_checkpoint(directory: Path) -> FilesReader:
    """Read the content of a checkpoint directory. Raises CheckpointError, DamagedCheckpointError, OSError."""
    file = directory / "metadata.json"
    try:
        backend = json.loads(file.read_text())["sharded_backend"]
    except FileNotFoundError:
        raise DamagedCheckpointError(f"{file} is missing") from None
    except (ValueError, KeyError, TypeError):
        raise DamagedCheckpointError(f"{file} is damaged: it names no sharded_backend") from None
    if backend != "torch_dist":
        raise DamagedCheckpointError(
            f"{file}: sharded_backend={str(backend)[:40]!r}; this version reads torch_dist"
        )
    if (legacy := directory / "common.pt").exists():
        raise CheckpointError(f"{legacy}: no checkpoint of this program has this file; it was not read")
    return FilesReader(directory)


def read_state(wanted: dict[str, Any], reader: FilesReader) -> dict[str, Any]:
    """Load into the sharded state `wanted`. Waits for no other rank.

    Raises CheckpointError, DamagedCheckpointError, OSError.
    """
    prepared, local, factories = load_preprocess(wanted)
    [state] = plain_values(reader.read_bytes(_COMMON), _COMMON)
    merge(state, local)
    sharded, _ = extract_sharded_base(prepared)
    tensors = [base for base in nested_values(sharded) if isinstance(base, ShardedTensor)]
    by_key, paths, names = _replace_state_dict_keys_with_sharded_keys(sharded)
    targets = mcore_to_pyt_state_dict(by_key, True)
    planner = SafeLoadPlanner(
        shapes_validation_sharded_tensors=[base for base in tensors if not base.allow_shape_mismatch],
        allow_shape_mismatch_sharded_tensors={b.key: b for b in tensors if b.allow_shape_mismatch},
        flatten_state_dict=False,
        flatten_sharded_tensors=False,
    )
    torch_checkpoint.load(targets, storage_reader=reader, planner=planner, no_dist=True)
    values = {key: _unwrap_pyt_sharded_tensor(value) for key, value in targets.items()}
    loaded = _replace_sharded_keys_with_state_dict_keys(values, paths, names)
    _restore_dict_types(loaded, sharded)
    merge(state, loaded)
    return dict(apply_factory_merges(state, factories))


def check_names(wanted: Collection[str], stored: Collection[str]) -> str | None:
    """Compare the keys that all ranks want with those of a Megatron checkpoint; returns the problem or None.

    dist_checkpointing ignores tensors in the checkpoint that were not requested. Here, a tensor that is
    missing or unexpected is an error that names it, before any tensor is read. If the optimizer is not
    wanted, the checkpoint may have one.
    """
    weights_only = not any(name.startswith("optimizer.") for name in wanted)

    def compared(names: Collection[str]) -> set[str]:
        return {
            name
            for name in names
            # These are left out: FP8 scales, which a layer on a CPU lacks; values that are not tensors;
            # random states, which only the same layout needs.
            if not name.endswith("_extra_state")
            and name not in ("common_state", "random")
            and not (weights_only and name.startswith("optimizer."))
        }

    missing = compared(wanted) - compared(stored)
    unexpected = compared(stored) - compared(wanted)
    if not missing and not unexpected:
        return None
    if weights := {name for name in missing | unexpected if not name.startswith("optimizer.")}:
        # These also cause the optimizer's mismatches.
        missing, unexpected = missing & weights, unexpected & weights
    problems = []
    if missing:
        problems.append(f"it lacks {shown_names(missing)} of the model")
    if unexpected:
        problems.append(f"it has {shown_names(unexpected)} that the model does not take")
    return f"{', and '.join(problems)}: {_cause(missing, unexpected)}"


def _cause(missing: set[str], unexpected: set[str]) -> str:
    def output_layer(names: set[str]) -> bool:
        return any("output_layer." in name for name in names)

    if output_layer(missing) != output_layer(unexpected):
        checkpoint, model = ("true", "false") if output_layer(missing) else ("false", "true")
        return (
            f"the checkpoint is of a model with tie_word_embeddings={checkpoint}, and this one's config.json "
            f"says {model}"
        )
    if all(name.startswith("optimizer.") for name in missing | unexpected):
        return "model.dtype and the optimizer must be those of the run that wrote it"
    return "the model's config.json must be that of the run that wrote it"

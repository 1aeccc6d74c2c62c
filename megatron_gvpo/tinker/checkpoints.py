"""Saves, lists and loads checkpoints of clients' models.

`tinker://MODEL/KIND/NAME` is OUTPUT_DIR/checkpoints/MODEL/KIND/NAME.

`weights/NAME` holds the trained weights and the optimizer; `sampler_weights/NAME` the trained weights, and
the same in a form for other programs: `adapter/`, in the format of Hugging Face PEFT, or `hf/`, a Hugging
Face checkpoint. Any parallel layout of the same model can load a checkpoint. `info.json` describes the
checkpoint; a directory without it is not complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from megatron_gvpo.core.errors import CheckpointError, ConfigError
from megatron_gvpo.core.json_files import read_json_object
from megatron_gvpo.core.plain_values import finite_number
from megatron_gvpo.huggingface.tokenizer import write_companions
from megatron_gvpo.megatron.checkpoint.directory import PARTIAL, REPLACED, run_on_all_ranks, run_on_rank_0
from megatron_gvpo.megatron.checkpoint.load import check_adapters, check_model, load_shards
from megatron_gvpo.megatron.checkpoint.save import Writer, save_shards
from megatron_gvpo.megatron.checkpoint.state import load_weights, optimizer_shards, weights_state
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.runs.written import json_object
from megatron_gvpo.settings.sections import ModelConfig
from megatron_gvpo.tinker.state import Slot
from megatron_gvpo.tinker.wire import Refusal

Kind = Literal["weights", "sampler_weights"]
INFO = "info.json"
_UNFINISHED = (PARTIAL, REPLACED)  # suffixes of directories beside a checkpoint that is being saved
_NAME = re.compile(r"[A-Za-z0-9][\w.:-]{0,127}", re.ASCII)


class CheckpointPath(NamedTuple):
    """A place where a model is saved."""

    model_id: str
    kind: Kind
    name: str

    @staticmethod
    def parse(uri: str) -> CheckpointPath:
        """Read `tinker://MODEL/KIND/NAME`. Raises Refusal."""
        model_id, kind, name = ([*uri.removeprefix("tinker://").split("/"), "", ""])[:3]
        if (
            not uri.startswith("tinker://")
            or uri.count("/") != 4
            or kind not in ("weights", "sampler_weights")
        ):
            raise Refusal(f"{uri[:200]!r} is not a path of a checkpoint: tinker://MODEL/weights/NAME")
        return CheckpointPath.of(model_id, "weights" if kind == "weights" else "sampler_weights", name)

    @staticmethod
    def of(model_id: str, kind: Kind, name: str) -> CheckpointPath:
        """The path of a checkpoint. Raises Refusal for names that a file must not have."""
        for part in (model_id, name):
            if not _NAME.fullmatch(part):
                raise Refusal(
                    f"{part[:200]!r}: a checkpoint's name has up to 128 letters, digits and . _ : - only"
                )
        if name.endswith(_UNFINISHED):  # a later save would remove such a directory as unfinished
            raise Refusal(f"{name!r}: a checkpoint's name does not end with {' or '.join(_UNFINISHED)}")
        return CheckpointPath(model_id, kind, name)

    @property
    def uri(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def directory(self, root: Path) -> Path:
        return root / self.model_id / self.kind / self.name


def read_info(root: Path, path: CheckpointPath) -> dict[str, Any]:
    """Return the content of info.json. Raises Refusal if there is no such checkpoint, or it has expired."""
    info = _facts(_file(root, path))
    if _has_expired(info):
        raise Refusal(f"the checkpoint {path.uri} has expired", 404)
    return info


def snapshot_name(path: CheckpointPath, info: dict[str, Any]) -> str:
    """The name of a checkpoint's weights, which are others when it is saved again."""
    return f"{path.uri}@{info['time']}"


def check_snapshot(root: Path, path: CheckpointPath, snapshot: str) -> None:
    """Raises Refusal if the checkpoint no longer has the weights of this name."""
    if snapshot_name(path, _facts(_file(root, path))) != snapshot:
        raise Refusal(
            f"{path.uri} was saved again, and the sampler's weights are gone: make a sampler of the new ones"
        )


def remove(root: Path, path: CheckpointPath) -> None:
    """Remove a checkpoint, also one that has expired. Raises Refusal where there is none."""
    shutil.rmtree(_file(root, path).parent)


def remove_expired(root: Path) -> None:
    """Remove the checkpoints of all models whose time is over; one that cannot be read stays."""
    for file in root.glob(f"*/*/*/{INFO}"):
        with suppress(Refusal, OSError):
            if not file.parent.name.endswith(_UNFINISHED) and _has_expired(_facts(file)):
                shutil.rmtree(file.parent)


def _file(root: Path, path: CheckpointPath) -> Path:
    """The info.json. Raises Refusal where there is no such checkpoint."""
    file = path.directory(root) / INFO
    if not file.is_file():
        raise Refusal(f"there is no checkpoint {path.uri}", 404)
    return file


def _has_expired(info: dict[str, Any]) -> bool:
    return info["expires"] is not None and info["expires"] < time.time()


def _facts(file: Path) -> dict[str, Any]:
    """Return the content of an info.json.

    Raises Refusal if the content is not in the form that `save` writes.
    """
    try:
        info = read_json_object(file)
        if not finite_number(info["time"]) or finite_number(info["expires"] or 0.0) is None:
            raise ConfigError(f"{file}: its times are not numbers")
    except (ConfigError, KeyError, TypeError) as error:
        raise Refusal(f"a checkpoint is damaged: {file}: {error}") from None
    return info


def list_checkpoints(root: Path, model_id: str) -> list[tuple[CheckpointPath, dict[str, Any]]]:
    """Return a model's complete checkpoints that have not expired, with their info.json, oldest first."""
    checkpoints: list[tuple[CheckpointPath, dict[str, Any]]] = []
    kinds: tuple[Kind, ...] = ("weights", "sampler_weights")
    for kind in kinds:
        for file in (root / model_id / kind).glob(f"*/{INFO}"):
            is_complete = not file.parent.name.endswith(_UNFINISHED)
            if is_complete and not _has_expired(info := _facts(file)):
                checkpoints.append((CheckpointPath(model_id, kind, file.parent.name), info))
    return sorted(checkpoints, key=lambda item: float(item[1]["time"]))


def save(slot: Slot, source: ModelConfig, root: Path, path: CheckpointPath, info: dict[str, Any]) -> None:
    """Write the model in `slot`, trained from `source`. A collective. Raises CheckpointError on all ranks.

    A save that fails, as on a full disk, leaves no files: no client could remove them. Expired checkpoints of
    all models are removed first.
    """
    final = path.directory(root)
    partial = final.with_name(final.name + PARTIAL)
    run_on_rank_0("", lambda: remove_expired(root))
    try:
        _write(slot, source, partial, path.kind, f"cannot write {final}")
        adapters = {} if slot.model.adapters is None else {"adapter": slot.model.adapters.identity()}
        complete = {**info, "updates": slot.optimizer.steps, "model": slot.model.facts, **adapters}
        run_on_rank_0(f"cannot write {final}", lambda: _finish(partial, final, complete))
    except CheckpointError:
        run_on_rank_0("", lambda: shutil.rmtree(partial, ignore_errors=True))
        raise


def _write(slot: Slot, source: ModelConfig, partial: Path, kind: Kind, what: str) -> None:
    """Write the tensors. `what` begins an error's message."""
    writer = Writer(deferred=True)
    run_on_rank_0(what, lambda: _make_empty(partial))
    model, optimizer = slot.model, slot.optimizer
    model.finish_param_gather()

    def optimizer_state() -> dict[str, Any]:
        tensors = optimizer_shards(optimizer.megatron, weights_state(model))
        return {"optimizer": {"tensors": tensors, "step": optimizer.steps}}

    with megatron_device():
        save_shards(what, lambda: weights_state(model), partial / "weights", writer)
        if kind == "weights":
            save_shards(what, optimizer_state, partial / "optimizer", writer)
    run_on_all_ranks(what, writer.write)
    if kind == "sampler_weights":
        _export(model, source, partial, what)


def _export(model: Model, source: ModelConfig, directory: Path, what: str) -> None:
    """Write the model for other programs. A collective. Raises CheckpointError."""
    if model.adapters is not None:
        run_on_all_ranks(what, lambda: model.save_adapters(directory / "adapter"))
        return
    target = directory / "hf"
    run_on_all_ranks(what, lambda: model.save_hf(target))
    run_on_rank_0(what, lambda: write_companions(source.path, source.trust_remote_code, target))


def load(slot: Slot, root: Path, path: CheckpointPath, with_optimizer: bool) -> None:
    """Load weights, and the optimizer if requested, into `slot`. A collective. Raises CheckpointError."""
    directory = path.directory(root)
    what = f"cannot read {directory}"
    model, optimizer = slot.model, slot.optimizer
    model.finish_background_work()
    run_on_all_ranks("", lambda: _check_function(directory, model))
    with megatron_device(), torch.no_grad():
        loaded = load_shards(what, lambda: weights_state(model), directory / "weights")
        run_on_all_ranks(what, lambda: load_weights(model, loaded))
        if not with_optimizer:
            optimizer.megatron.reload_model_params()  # sets masters that are not the weights themselves
            return

        def wanted() -> dict[str, Any]:
            return {"optimizer": {"tensors": optimizer_shards(optimizer.megatron, weights_state(model))}}

        state = load_shards(what, wanted, directory / "optimizer")  # loads in place
        optimizer.steps = state["optimizer"]["step"]


def _check_function(directory: Path, model: Model) -> None:
    """Raises CheckpointError for weights that fit the model here and belong to another function.

    Tensors of another alpha, or for another base with the same shapes, have the same names and sizes.
    Versions before 30 November 2026 did not write what is compared.
    """
    if "model" in (info := json_object(directory / INFO)):
        check_model(directory, info, model)
        check_adapters(directory, info, model)


def _make_empty(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    for name in ("weights", "optimizer"):
        (partial / name).mkdir(parents=True)


def _finish(partial: Path, final: Path, info: dict[str, Any]) -> None:
    """Put a checkpoint in the place of an earlier one, which is removed last: a kill loses neither."""
    (partial / INFO).write_text(json.dumps(info))
    earlier = final.with_name(final.name + REPLACED)
    shutil.rmtree(earlier, ignore_errors=True)
    if final.exists():
        os.replace(final, earlier)
    os.replace(partial, final)
    shutil.rmtree(earlier, ignore_errors=True)

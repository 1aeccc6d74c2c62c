"""The trainer's numbers of a step, from its rows to the weights after it, in one file a step.

`megatron-gvpo replay` computes these numbers again and names the first that differs. The files have the
responses as token ids, so that a step can be trained again; texts and messages are in the rollout files
alone. A file is a safetensors file: tensors by name, and the rest as JSON in its header.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.core.redaction import hide_secrets
from megatron_gvpo.groups import Group, Image, Routing, image_of, message_text
from megatron_gvpo.runs.written import drop_oldest
from megatron_gvpo.settings.sections import StepRecordsConfig
from megatron_gvpo.supports import Support
from megatron_gvpo.turns import turn_of
from megatron_gvpo.types import TrainBatch

log = logging.getLogger(__name__)

DIRECTORY = "steps"  # folder in the output directory
_NAME = "step_{:06d}.safetensors"
_HEADER = "record"
# By tensor: the sum of its elements, the root of the sum of their squares, their number.
Sums = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class UpdateRecord:
    """An optimizer update: its rows with the policies' log-probs, and its results."""

    # The trained rows: their numbers in the step, [n], and some of their columns, [r].
    place_n: Tensor
    old_logp_r: Tensor | None
    ref_logp_r: Tensor | None
    logp_r: Tensor | None  # the log-probs before the update
    weight_r: Tensor | None  # dL/dlogp
    metrics: dict[str, float]  # includes "loss"
    grad_norm: float
    lr: float
    is_skipped: bool
    gradients: Sums  # the sums over gradients before clipping
    weights: Sums  # the sums over weights after the update


@dataclass(frozen=True)
class StepRecord:
    """A step's rows by mini-batch with their advantages, also those that are not trained, and its updates."""

    step: int
    data_parallel: int  # data-parallel ranks
    has_images: bool  # prompts have images, of which the record has the digests and not the content
    weights: Sums  # the sums over weights before the first update
    mini_batches: list[TrainBatch]
    updates: list[UpdateRecord] = field(default_factory=list)

    def rows_of(self, update: UpdateRecord) -> TrainBatch:
        """The rows that an update trained, with the log-probs that its loss compared with."""
        positions = update.place_n.tolist()
        for rows in self.mini_batches:
            assert rows.place_n is not None
            numbers = {position: i for i, position in enumerate(rows.place_n.tolist())}
            if set(positions) & set(numbers):
                known = [numbers[position] for position in positions if position in numbers]
                marked = rows.trained()
                left_out = marked.left_out if len(marked) == len(positions) else (0, 0)
                chosen = rows.select(known)
                chosen.left_out = left_out
                return chosen.with_columns(old_logp_r=update.old_logp_r, ref_logp_r=update.ref_logp_r)
        raise ValueError("an update without rows")  # the mask has been compared before


def path_of(output_dir: Path | str, step: int) -> Path:
    return Path(output_dir) / DIRECTORY / _NAME.format(step)


def recorded_steps(output_dir: Path | str) -> list[int]:
    """The steps of which the run has a record, in rising order."""
    files = (Path(output_dir) / DIRECTORY).glob("step_*.safetensors")
    return sorted(int(number) for path in files if (number := path.stem.removeprefix("step_")).isdecimal())


def chosen_step(run: Path, step: int | None) -> int:
    """Return `step`, or the last recorded one. Raises DataError if the run has no record of it."""
    if not (steps := recorded_steps(run)):
        raise DataError(f"RUN={run}: no step is recorded (logging.steps.max_gb)")
    if step is not None and step not in steps:
        raise _missing(run, step)
    return steps[-1] if step is None else step


def _missing(run: Path | str, step: int) -> DataError:
    steps = recorded_steps(run)
    listed = f"steps {steps[0]} to {steps[-1]}" if steps else "none (logging.steps.max_gb)"
    return DataError(f"{path_of(run, step)}: the run has no record of step {step}; it has: {listed}")


class StepRecords:
    """Writes the records of a run's last steps; for rank 0.

    An earlier run's records up to `resume_step` stay; with None, none of them.
    """

    def __init__(self, output_dir: Path, settings: StepRecordsConfig, resume_step: int | None) -> None:
        self._output_dir, self._max_gb, self._has_warned = output_dir, settings.max_gb, False
        for step in recorded_steps(output_dir):
            if step > (-1 if resume_step is None else resume_step):
                path_of(output_dir, step).unlink()

    def write(self, record: StepRecord, groups: Sequence[Group]) -> None:
        """Write a step's record, and remove the oldest above the limit. Raises OSError.

        A step in whose texts a secret would be hidden is left out, because token ids spell it.
        """
        if has_secret(groups):
            if not self._has_warned:
                log.warning("step %d: a text has a secret, so the step is not recorded", record.step)
            self._has_warned = True
            return
        path = path_of(self._output_dir, record.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".tmp")
        save(record, aside)
        os.replace(aside, path)
        steps = recorded_steps(self._output_dir)
        drop_oldest({path_of(self._output_dir, step): step for step in steps}, self._max_gb)


def has_secret(groups: Sequence[Group]) -> bool:
    """True where `hide_secrets` changes a prompt, a response or a message of them."""
    texts = {group.prompt.text for group in groups}
    texts |= {rollout.text for group in groups for rollout in group.rollouts}
    texts |= {message_text(m) for group in groups for rollout in group.rollouts for m in rollout.messages}
    return any(hide_secrets(text) != text for text in texts)


def save(record: StepRecord, path: Path) -> None:
    """Write a record to a file. Raises OSError."""
    tensors: dict[str, Tensor] = {}
    header: dict[str, Any] = {
        "step": record.step,
        "data_parallel": record.data_parallel,
        "has_images": record.has_images,
        "mini_batches": [_batch(rows, f"batch{i}", tensors) for i, rows in enumerate(record.mini_batches)],
        "updates": [],
    }
    _sums(record.weights, "weights", header, tensors)
    for i, update in enumerate(record.updates):
        values: dict[str, Any] = {}
        for each in fields(update):
            value, name = getattr(update, each.name), f"update{i}/{each.name}"
            if isinstance(value, Tensor):
                tensors[name] = value
            elif each.name in ("gradients", "weights"):
                _sums(value, name, values, tensors)
            elif value is not None:
                values[each.name] = value
        header["updates"].append(values)
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        save_file(own, path, {_HEADER: json.dumps(header)})
    except SafetensorError as error:  # safetensors raises this for a full disk
        raise OSError(str(error)) from None


def read(output_dir: Path | str, step: int) -> StepRecord:
    """The record of a step. Raises DataError, which names the file, if it is missing or damaged."""
    path = path_of(output_dir, step)
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        updates = [_update(values, f"update{i}", tensors) for i, values in enumerate(header["updates"])]
        batches = [_batch_of(values, f"batch{i}", tensors) for i, values in enumerate(header["mini_batches"])]
        weights = _sums_of("weights", header, tensors)
        ranks, has_images = int(header["data_parallel"]), bool(header["has_images"])
        record = StepRecord(int(header["step"]), ranks, has_images, weights, batches, updates)
    except FileNotFoundError:
        raise _missing(output_dir, step) from None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not the record of a step that can be read: {type(error).__name__}: {error}"
        ) from None
    if record.step != step:
        raise DataError(f"{path}: this is the record of step {record.step}, copied or renamed")
    return record


def _sums(sums: Sums, name: str, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    header[f"{name.rpartition('/')[2]}_names"] = list(sums)
    tensors[name] = torch.tensor([list(values) for values in sums.values()], dtype=torch.float64)


def _sums_of(name: str, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Sums:
    names = header[f"{name.rpartition('/')[2]}_names"]
    return dict(zip(names, tensors[name].tolist(), strict=True)) if names else {}


def _update(values: dict[str, Any], name: str, tensors: Mapping[str, Tensor]) -> UpdateRecord:
    sums: dict[str, Any] = {
        each: _sums_of(f"{name}/{each}", values, tensors) for each in ("gradients", "weights")
    }
    columns: dict[str, Any] = {
        each.name: values.get(each.name, tensors.get(f"{name}/{each.name}")) for each in fields(UpdateRecord)
    }
    return UpdateRecord(**{**columns, **sums})


def _batch(rows: TrainBatch, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Put the columns of rows into `tensors`; returns the rest as JSON values."""
    for each in fields(rows):
        if isinstance(value := getattr(rows, each.name), Tensor):
            tensors[f"{name}/{each.name}"] = value
    for component, value_n in rows.component_n.items():
        tensors[f"{name}/component_n/{component}"] = value_n
    prompts = list(dict.fromkeys(map(tuple, rows.prompt_ids)))
    numbers = {prompt: number for number, prompt in enumerate(prompts)}
    header: dict[str, Any] = {
        "prompt": [numbers[tuple(prompt)] for prompt in rows.prompt_ids],
        "components": list(rows.component_n),
    }
    for column, sequences in (("prompt_ids", prompts), ("response_ids", rows.response_ids)):
        header[f"{column}_lengths"] = [len(ids) for ids in sequences]
        tensors[f"{name}/{column}"] = torch.tensor([i for ids in sequences for i in ids], dtype=torch.int32)
    if rows.turns is not None:
        header["turns"] = [[list(turn) for turn in turns] for turns in rows.turns]
    if rows.images is not None:
        header["images"] = [[_named_image(image) for image in images] for images in rows.images]
    if rows.routing is not None:
        shapes = [None if r is None else [r.layers, r.per_token, r.width, len(r.ids)] for r in rows.routing]
        header["routing"] = shapes
        experts = b"".join(r.ids for r in rows.routing if r is not None)
        tensors[f"{name}/routing"] = torch.frombuffer(bytearray(experts), dtype=torch.uint8)
    if rows.support is not None:
        header["support"] = [support is not None for support in rows.support]
        lengths = map(len, rows.response_ids)
        supports = [s or Support.whole_vocabulary(n) for s, n in zip(rows.support, lengths, strict=True)]
        counts, ids = Support(b"".join(s.counts for s in supports), b"".join(s.ids for s in supports)).arrays
        tensors[f"{name}/support_counts"] = torch.from_numpy(counts.astype(np.int32))
        tensors[f"{name}/support_ids"] = torch.from_numpy(ids.astype(np.int32))
    return header


def _named_image(image: Image) -> Image:
    """The image without its content, which a data: URL is."""
    return image._replace(source="") if image.source.startswith("data:") else image


def _batch_of(header: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]) -> TrainBatch:
    listed = {}
    for column in ("prompt_ids", "response_ids"):
        parts = tensors[f"{name}/{column}"].split(header[f"{column}_lengths"])
        listed[column] = [part.tolist() for part in parts]
    columns: dict[str, Any] = {
        each.name: tensors.get(f"{name}/{each.name}")
        for each in fields(TrainBatch)
        if each.name.endswith(("_n", "_r")) and each.name != "component_n"
    }
    columns["component_n"] = {c: tensors[f"{name}/component_n/{c}"] for c in header["components"]}
    if "turns" in header:
        columns["turns"] = [[turn_of(turn) for turn in turns] for turns in header["turns"]]
    if "images" in header:
        columns["images"] = [tuple(image_of(values) for values in images) for images in header["images"]]
    if "routing" in header:
        columns["routing"] = list(_routing(header["routing"], bytes(tensors[f"{name}/routing"].tolist())))
    if "support" in header:
        counts, ids = (tensors[f"{name}/support_{part}"].numpy() for part in ("counts", "ids"))
        columns["support"] = _supports(counts, ids, header["support"], header["response_ids_lengths"])
    prompts = [listed["prompt_ids"][number] for number in header["prompt"]]
    return TrainBatch(prompt_ids=prompts, response_ids=listed["response_ids"], **columns)


def _supports(
    counts: np.ndarray, ids: np.ndarray, has_support: Sequence[bool], lengths: Sequence[int]
) -> list[Support | None]:
    of_rows = np.split(counts.astype("<i4"), np.cumsum(lengths)[:-1])
    members = np.split(ids.astype("<i4"), np.cumsum([part.sum() for part in of_rows])[:-1])
    rows = zip(has_support, of_rows, members, strict=True)
    return [Support(c.tobytes(), m.tobytes()) if has else None for has, c, m in rows]


def _routing(shapes: Sequence[Sequence[int] | None], experts: bytes) -> Any:
    begin = 0
    for shape in shapes:
        if shape is None:
            yield None
            continue
        layers, per_token, width, length = shape
        yield Routing(layers, per_token, width, experts[begin : begin + length])
        begin += length

"""Names of tensors, compared both ways: what a model has, and what a directory holds for it.

Megatron-Bridge skips a weight that a Hugging Face directory lacks, which then stays as it was initialised,
and never looks at one that it does not know; dist_checkpointing never looks at what nobody asks for.
Here, each is an error that names the tensors, on every rank, before a weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_gvpo.config.schema import ConfigError, read_json_object
from megatron_gvpo.runtime.collectives import first_problem

_SHOWN = 3
_INDEX = "model.safetensors.index.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 4096  # of the vocabulary that are compared at a time

# Tensors that no model has and that change nothing, by their whole names.
_NEEDLESS = {
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "config.json gives RoPE's frequencies",
}
# Parts of the names of tensors that are refused, with what would be right.
_REFUSED = {
    r"_scale(_inv|_2)?$|\.(q?scales|q(weight|zeros)|g_idx|weight_packed|absmax|SCB)$|\.quant_(map|state)": (
        "the model is quantised, and training needs its weights in bfloat16 or float32"
    ),
    r"\.lora_|\.base_layer\.": "merge the adapter into the weights",
}
_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class _Stored:
    file: str
    shape: tuple[int, ...]
    dtype: str


def check_weights(directory: Path, key: str, hf_config: Any, tied: bool) -> None:
    """Compares the safetensors of a directory with the model of `hf_config`. A collective.

    Every rank reads headers; of an output layer beside tied embeddings, rank 0 reads the values, too.

    `key`: where the user gave the directory; `tied`: the model has no output layer of its own. Raises
    ConfigError, on every rank, unless each of the model's tensors is there, whole, and no other.
    """
    problem = None
    try:
        found, listed = _headers(directory)
        _compare(_expected(hf_config, tied), found, listed, hf_config, tied)
        if tied and _HEAD in found and _rank() == 0:
            _check_head(directory, found)
    except (OSError, SafetensorError, ConfigError) as error:
        problem = f"{key}={directory}: {error}"
    if (said := first_problem(problem)) is not None:
        raise ConfigError(said)


def check_names(wanted: Collection[str], stored: Collection[str]) -> str | None:
    """Compares the keys that all ranks want of a Megatron checkpoint with those it has; returns the problem.

    Where nothing of the optimizer is wanted, the checkpoint may have it.
    """
    weights_only = not any(name.startswith("optimizer.") for name in wanted)

    def compared(names: Collection[str]) -> set[str]:
        return {
            name
            for name in names
            # FP8 scales, which a layer on a CPU has not; values that are no tensors; generators, which only
            # the same layout asks for.
            if not name.endswith("_extra_state")
            and name not in ("common_state", "random")
            and not (weights_only and name.startswith("optimizer."))
        }

    ours, theirs = compared(wanted), compared(stored)
    missing, unexpected = ours - theirs, theirs - ours
    if not missing and not unexpected:
        return None
    if weights := {name for name in missing | unexpected if not name.startswith("optimizer.")}:
        missing, unexpected = missing & weights, unexpected & weights  # the optimizer's follow from these
    said = []
    if missing:
        said.append(f"it lacks {_some(missing)} of the model")
    if unexpected:
        said.append(f"it has {_some(unexpected)} that the model does not take")
    return f"{', and '.join(said)}: {_cause(missing, unexpected)}"


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


def _expected(hf_config: Any, tied: bool) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the model, by its name in files. Raises ConfigError."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"), no_init_weights():
            named: dict[str, Tensor] = AutoModelForCausalLM.from_config(deepcopy(hf_config)).state_dict()
    except Exception as error:  # whatever sizes that contradict each other lead to
        first = str(error).partition("\n")[0]
        raise ConfigError(
            f"transformers builds no model of config.json: {type(error).__name__}: {first}"
        ) from None
    expected = dict(shape for name, tensor in named.items() for shape in _in_files(name, tuple(tensor.shape)))
    if tied:
        expected.pop(_HEAD, None)
    return expected


def _in_files(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """In memory, transformers keeps a layer's experts in two tensors, and in files each weight by itself."""
    stem, _, kind = name.rpartition(".")
    if not stem.endswith(".experts") or kind not in ("gate_up_proj", "down_proj"):
        yield name, shape
        return
    experts, rows, columns = shape
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    for expert in range(experts):
        for part in parts:
            yield f"{stem}.{expert}.{part}.weight", (rows // len(parts), columns)


def _headers(directory: Path) -> tuple[dict[str, _Stored], set[str]]:
    """(every tensor in the directory's safetensors, the names that are read); the index says which those are.

    Raises ConfigError, OSError, SafetensorError.
    """
    index, listed = directory / _INDEX, None
    if index.is_file():
        listed = read_json_object(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ConfigError(f"{_INDEX}: its weight_map must give a file's name for every tensor's")
        files = [directory / name for name in sorted(set(listed.values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError("no weights there (*.safetensors)")
    if absent := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{absent[0]} is missing there, and {_INDEX} names it")
    found: dict[str, _Stored] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    if listed is not None and listed.get(name, file.name) != file.name:
                        continue  # the index has another file's in mind
                    if name in found:
                        raise ConfigError(f"{name} is in {found[name].file} and in {file.name}: remove one")
                    header = opened.get_slice(name)
                    found[name] = _Stored(file.name, tuple(header.get_shape()), header.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file.name} is not whole: {error}") from None
    return found, set(found) if listed is None else found.keys() & listed.keys()


def _compare(
    expected: dict[str, tuple[int, ...]],
    found: dict[str, _Stored],
    listed: set[str],
    hf_config: Any,
    tied: bool,
) -> None:
    """Raises ConfigError where the model would not get each of its tensors, or leave one that is there."""
    ignored = _ignored(hf_config)
    extra = {name for name in found.keys() - expected.keys() if not ignored(name)}
    for pattern, remedy in _REFUSED.items():
        if refused := {name for name in extra if re.search(pattern, name)}:
            raise ConfigError(f"it has {_some(refused, found)} that cannot be trained: {remedy}")
    layers = f"num_hidden_layers={hf_config.num_hidden_layers}"
    if missing := expected.keys() - listed:
        where = f", or {_INDEX} does not name them" if missing & found.keys() else ""
        raise ConfigError(
            f"it lacks {_some(missing)}{where}: all {len(expected)} of config.json ({layers}, "
            f"tie_word_embeddings={str(tied).lower()}) must be there"
        )
    if extra := extra - ({_HEAD} if tied else set()):
        raise ConfigError(
            f"it has {_some(extra, found)} that the model of config.json ({layers}) does not take: remove "
            "what is not the model's, or correct config.json"
        )
    for name, shape in expected.items():
        stored = found[name]
        if stored.shape != shape:
            raise ConfigError(
                f"{name} in {stored.file} has shape {list(stored.shape)}, and config.json says {list(shape)}"
            )
        if stored.dtype not in _DTYPES:
            raise ConfigError(
                f"{name} in {stored.file} has dtype {stored.dtype}: training needs {', '.join(_DTYPES)}"
            )


def _ignored(hf_config: Any) -> Callable[[str], bool]:
    patterns = list(_NEEDLESS)
    # DeepSeek-V3's layers behind the last predict further tokens, which is no part of the policy.
    last, further = hf_config.num_hidden_layers, getattr(hf_config, "num_nextn_predict_layers", None) or 0
    patterns += [rf"model\.layers\.{last + i}\..*" for i in range(further)]
    whole = re.compile("|".join(patterns))
    return lambda name: whole.fullmatch(name) is not None


def _check_head(directory: Path, found: dict[str, _Stored]) -> None:
    """Raises ConfigError for an output layer that is not the embedding: the model would lose it."""
    head, embedding = found[_HEAD], found[_EMBEDDING]
    same = head.shape == embedding.shape
    with safe_open(directory / head.file, "pt") as one, safe_open(directory / embedding.file, "pt") as other:
        ours, theirs = one.get_slice(_HEAD), other.get_slice(_EMBEDDING)
        for row in range(0, head.shape[0] if same else 0, _ROWS):
            same = same and torch.equal(ours[row : row + _ROWS].float(), theirs[row : row + _ROWS].float())
    if not same:
        raise ConfigError(
            f"{_HEAD} in {head.file} is not {_EMBEDDING}, and tie_word_embeddings=true in config.json: set "
            "it to false, or remove the tensor"
        )


def _some(names: Collection[str], found: dict[str, _Stored] | None = None) -> str:
    """The count and the first few."""
    first = sorted(names, key=_by_number)[:_SHOWN]
    shown = [name if found is None else f"{name} (in {found[name].file})" for name in first]
    count = f"{len(names)} tensor{'s' * (len(names) > 1)}"
    return f"{count} ({', '.join(shown)}{', ...' * (len(names) > _SHOWN)})"


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0

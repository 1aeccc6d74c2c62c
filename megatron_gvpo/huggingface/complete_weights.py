"""Checks that the weights of a Hugging Face directory are exactly those of the model.

If a directory lacks a weight, Megatron-Bridge leaves that weight at its random initial values. It ignores a
weight that it does not know. Here, both are errors that name the tensors, on every rank, before any weight
is read.

A checkpoint's heads for multi-token prediction (MTP) stay as they are. They are not a part of the policy: the
trainer neither computes with them nor trains them. Every Hugging Face checkpoint that it writes has the heads
of the checkpoint that it started from, for servers that draft with them
(`rollout.speculation.method: mtp`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_gvpo.core.collectives import all_ranks_agree
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.json_files import LFS_POINTER, LFS_REMEDY, read_json_object
from megatron_gvpo.huggingface.image_families import name_in_file, takes_images

_SHOWN = 3  # the most names in an error
_INDEX = "model.safetensors.index.json"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_ROWS = 4096  # rows of the vocabulary to compare at a time

# Tensors (patterns of whole names) that no model needs, with the reasons.
_NEEDLESS = {
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "config.json gives RoPE's frequencies",
}
# Tensors (patterns of parts of names) that are refused, with remedies.
_REFUSED = {
    r"_scale(_inv|_2)?$|\.(q?scales|q(weight|zeros)|g_idx|weight_packed|absmax|SCB)$|\.quant_(map|state)": (
        "the model is quantised, and training needs its weights in bfloat16 or float32"
    ),
    r"\.lora_|\.base_layer\.": "merge the adapter into the weights",
}
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.gguf")
_BEGINNINGS = {  # the first bytes of files that were downloaded in place of weights
    LFS_POINTER.encode(): LFS_REMEDY,
    b"<": "it is a web page, such as the error of a download: fetch the file again",
    b"{": "it is JSON, such as the error of a download: fetch the file again",
}
_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file; `dtype` as the file names it, such as BF16, F32 or F8_E4M3."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def check_weights(directory: Path, key: str, hf_config: Any, tied: bool) -> MtpHeads:
    """Compare the safetensors of a directory with the model of `hf_config`. A collective.

    Every rank reads headers. If there is an output layer beside tied embeddings, rank 0 also reads its
    values.

    `key`: the user's key or option for the directory; `tied`: the model has no output layer of its own.
    Returns the heads for further tokens that the directory has beside the model. Raises ConfigError, on every
    rank, unless the directory has exactly the model's tensors, all complete.
    """
    with all_ranks_agree(ConfigError, OSError, SafetensorError, where=f"{key}={directory}: "):
        stored, listed = _headers(directory)
        _compare(_expected(hf_config, tied), stored, listed, hf_config, tied)
        if tied and _HEAD in stored and _rank() == 0:
            _check_head(directory, stored)
    heads = head_pattern(hf_config.to_dict())
    return MtpHeads(directory, {name: stored[name].file for name in stored if heads.fullmatch(name)})


def has_heads(directory: Path, model: dict[str, Any]) -> bool:
    """True if the directory has heads for further tokens; `model`: its config.json. Raises ConfigError."""
    pattern = head_pattern(model)
    return any(pattern.fullmatch(name) for name in _headers(directory)[0])


def stored_tensors(directory: Path, key: str) -> dict[str, Stored]:
    """The tensors by name in a directory's safetensors: those that its index lists, if it has one.

    Rollout servers load from such a directory; they would also unpickle `*.bin` files. Raises ConfigError
    unless the files are whole, each tensor in one of them. `key`: the user's key or option for the directory.
    """
    try:
        return _headers(directory)[0]
    except (OSError, SafetensorError, ConfigError) as error:
        raise ConfigError(f"{key}={directory}: {error}") from None


def _expected(hf_config: Any, tied: bool) -> dict[str, tuple[int, ...]]:
    """Return {name in files: shape} of the model's tensors. Raises ConfigError."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"), no_init_weights():
            images = takes_images(hf_config.to_dict())
            kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
            model = kind.from_config(deepcopy(hf_config), trust_remote_code=False)
            named: dict[str, Tensor] = model.state_dict()
            if not images:  # in memory some weights have another form, such as all experts in one tensor
                named = revert_weight_conversion(model, named)
    except Exception as error:  # sizes that contradict each other cause errors of any type
        first = str(error).partition("\n")[0]
        raise ConfigError(
            f"transformers builds no model of config.json: {type(error).__name__}: {first}"
        ) from None
    architecture = (hf_config.architectures or [""])[0]
    expected = {name_in_file(name, architecture): tuple(tensor.shape) for name, tensor in named.items()}
    if tied:
        expected.pop(_HEAD, None)
    return expected


def _headers(directory: Path) -> tuple[dict[str, Stored], set[str]]:
    """Return (all tensors in the directory's safetensors, the names that a reader of the index would find).

    Raises ConfigError, OSError, SafetensorError.
    """
    files, listed = _weight_files(directory)
    stored: dict[str, Stored] = {}
    copies: list[tuple[str, Path]] = []  # tensors in a file to which the index does not give them
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - `opened` is not a mapping
                    if listed is not None and listed.get(name, file.name) != file.name:
                        copies.append((name, file))
                        continue
                    if name in stored:
                        raise ConfigError(f"{name} is in {stored[name].file} and in {file.name}: remove one")
                    header = opened.get_slice(name)
                    stored[name] = Stored(file.name, tuple(header.get_shape()), header.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file.name} is not whole: {_beginning(file) or error}") from None
    for name, file in copies:
        if name in stored and not _same(name, directory / stored[name].file, name, file):
            raise ConfigError(
                f"{name} is in {stored[name].file} and, with other values, in {file.name}: remove one"
            )
    return stored, set(stored) if listed is None else stored.keys() & listed.keys()


def _weight_files(directory: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files, and the index's file name for each tensor, if any. Raises ConfigError."""
    index, listed = directory / _INDEX, None
    if index.is_file():
        listed = read_json_object(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ConfigError(f"{_INDEX}: its weight_map must give a file's name for every tensor's")
        files = [directory / name for name in sorted(set(listed.values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        if partial := sorted(file.name for file in directory.glob("*.incomplete")):
            raise ConfigError(f"no weights there (*.safetensors); the download of {partial[0]} has not ended")
        others = sorted(file.name for kind in _OTHER_WEIGHTS for file in directory.glob(kind))
        raise ConfigError(
            "no weights there (*.safetensors)"
            + (f"; {others[0]} is {_unread(others[0])}, which is not read" if others else "")
        )
    if absent := [file.name for file in files if not file.is_file()]:
        problem = "not a file" if listed is None else f"missing there, and {_INDEX} names it"
        raise ConfigError(f"{absent[0]} is {problem}")
    return files, listed


def _unread(name: str) -> str:
    return "a GGUF file" if name.endswith(".gguf") else "a pickle"


def _beginning(file: Path) -> str | None:
    """A sentence about a damaged file, by its first bytes; None for one that may be cut off."""
    try:
        with file.open("rb") as opened:
            start = opened.read(64).lstrip()
    except OSError:
        return None
    if not start:
        return "it is empty"
    return next((text for begin, text in _BEGINNINGS.items() if start.startswith(begin)), None)


def _compare(
    expected: dict[str, tuple[int, ...]],
    tensors: dict[str, Stored],
    listed: set[str],
    hf_config: Any,
    tied: bool,
) -> None:
    """Raise ConfigError if a tensor of the model is missing or unfit, or if a tensor is not the model's."""
    ignored = needless(hf_config.to_dict())
    hf_config = hf_config.get_text_config()
    extra = {name for name in tensors.keys() - expected.keys() if not ignored(name)}
    for pattern, remedy in _REFUSED.items():
        if refused := {name for name in extra if re.search(pattern, name)}:
            raise ConfigError(f"it has {shown_names(refused, tensors)} that cannot be trained: {remedy}")
    layers = f"num_hidden_layers={hf_config.num_hidden_layers}"
    if missing := expected.keys() - listed:
        where = f", or {_INDEX} does not name them" if missing & tensors.keys() else ""
        first = min(missing)
        if renamed := next((name for name in extra if name.endswith(f".{first}")), None):
            where += f", and has {renamed} in place of {first}: rename its tensors"
        raise ConfigError(
            f"it lacks {shown_names(missing)}{where}: all {len(expected)} of config.json ({layers}, "
            f"tie_word_embeddings={str(tied).lower()}) must be there"
        )
    if extra := extra - ({_HEAD} if tied else set()):
        raise ConfigError(
            f"it has {shown_names(extra, tensors)} that the model of config.json ({layers}) does not take: "
            "remove what is not the model's, or correct config.json"
        )
    for name, shape in expected.items():
        stored = tensors[name]
        if stored.shape != shape:
            raise ConfigError(
                f"{name} in {stored.file} has shape {list(stored.shape)}, and config.json says {list(shape)}"
            )
        if stored.dtype not in _DTYPES:
            raise ConfigError(
                f"{name} in {stored.file} has dtype {stored.dtype}: training needs {', '.join(_DTYPES)}"
            )


def needless(model: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a test for names of tensors that the trainer does not hold; `model`: the config.json.

    Such tensors are heads for further tokens, and values that follow from config.json.
    """
    patterns = re.compile("|".join(_NEEDLESS)), head_pattern(model)
    return lambda name: any(pattern.fullmatch(name) for pattern in patterns)


def _check_head(directory: Path, stored: dict[str, Stored]) -> None:
    """Raise ConfigError if the output layer differs from the embedding, because tying would drop it."""
    embedded = next(name for name in stored if name.endswith(_EMBEDDING))
    head, embedding = stored[_HEAD], stored[embedded]
    if not _same(_HEAD, directory / head.file, embedded, directory / embedding.file):
        raise ConfigError(
            f"{_HEAD} in {head.file} is not {embedded}, and tie_word_embeddings=true in config.json: set "
            "it to false, or remove the tensor"
        )


def _same(name: str, file: Path, other_name: str, other_file: Path) -> bool:
    """True if two stored tensors have the same shape and values. It reads a few rows at a time."""
    with safe_open(file, "pt") as one, safe_open(other_file, "pt") as other:
        values, copies = one.get_slice(name), other.get_slice(other_name)
        if (shape := values.get_shape()) != copies.get_shape():
            return False
        if not shape:
            return torch.equal(one.get_tensor(name).float(), other.get_tensor(other_name).float())
        rows = range(0, shape[0], _ROWS)
        return all(
            torch.equal(values[row : row + _ROWS].float(), copies[row : row + _ROWS].float()) for row in rows
        )


def shown_names(names: Collection[str], stored: dict[str, Stored] | None = None) -> str:
    """Return the number of names and the first few, for an error message."""
    first = sorted(names, key=_by_number)[:_SHOWN]
    shown = [name if stored is None else f"{name} (in {stored[name].file})" for name in first]
    count = f"{len(names)} tensor{'s' * (len(names) > 1)}"
    return f"{count} ({', '.join(shown)}{', ...' * (len(names) > _SHOWN)})"


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


_OWN_NAMES = ("ExaoneMoe", "Qwen3Next", "Qwen3_5")  # architectures with these prefixes call their heads mtp
_NONE = re.compile(r"(?!)")


def head_pattern(model: Mapping[str, Any]) -> re.Pattern[str]:
    """A pattern for the names of the heads' tensors, by the model's config.json.

    Most models have further layers after the last one, which `num_nextn_predict_layers` counts.
    """
    text = model.get("text_config") or model
    architecture = next(iter(model.get("architectures") or ()), "")
    if architecture.startswith(_OWN_NAMES):
        return re.compile(r"mtp\..*")
    last, further = text.get("num_hidden_layers"), text.get("num_nextn_predict_layers")
    if type(last) is not int or type(further) is not int or further < 1:
        return _NONE
    numbers = "|".join(str(last + i) for i in range(further))
    return re.compile(rf"model\.layers\.(?:{numbers})\..*")


@dataclass(frozen=True)
class MtpHeads:
    """The tensors of multi-token prediction (MTP) in a checkpoint directory."""

    directory: Path
    files: Mapping[str, str]  # the file of each tensor, by its name

    def __bool__(self) -> bool:
        return bool(self.files)

    def __str__(self) -> str:
        first = min(self.files)
        return (
            f"{self.directory} has {len(self.files)} tensors of heads for further tokens ({first}, ...): "
            "they are not trained, and exported as they are"
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor), file by file. Raises OSError, SafetensorError."""
        for file in sorted(set(self.files.values())):
            with safe_open(self.directory / file, "pt") as opened:
                for name in sorted(name for name, file_of_name in self.files.items() if file_of_name == file):
                    yield name, opened.get_tensor(name)

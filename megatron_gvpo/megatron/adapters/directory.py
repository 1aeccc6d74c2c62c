"""Adapters as Hugging Face PEFT writes and reads them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.json_files import read_json_object
from megatron_gvpo.huggingface.checked_weights import HEADER, sort_metadata
from megatron_gvpo.huggingface.checksums import checksum
from megatron_gvpo.huggingface.complete_weights import shown_names
from megatron_gvpo.settings.adapter import AdapterConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Options of Hugging Face PEFT (0.21.2) that say nothing about the function that an adapter computes. Any
# other option changes it, unless empty: rank-stabilised scale, magnitudes, tokens that switch it on.
_HARMLESS = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "r", "lora_alpha", "lora_dropout", "target_modules", "init_lora_weights"),
    *("megatron_config", "megatron_core", "runtime_config", "eva_config", "loftq_config", "corda_config"),
    *("lora_ga_config", "qalora_group_size", "layers_pattern", "ensure_weight_tying"),
}
# Initialisations that keep the base weights. Others, such as PiSSA's, subtract the adapter from them.
_FIRST_VALUES = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def adapter_config(options: AdapterConfig, selected: tuple[str, ...], base: str) -> dict[str, Any]:
    """Return the content of adapter_config.json. `selected`: the layers with adapters; `base`: the model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(selected),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_dora": False,
        "use_rslora": False,
    }


def write_adapter(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a directory that Hugging Face PEFT, SGLang and vLLM load. Raises OSError, SafetensorError."""
    directory.mkdir(parents=True, exist_ok=True)
    sums = {name: checksum(tensor) for name, tensor in tensors.items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt", HEADER: json.dumps(sums)})
    sort_metadata(directory / WEIGHTS)
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_adapter(directory: Path, options: AdapterConfig, selected: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the tensors of a directory, by name. Raises ConfigError if it is not of `options`."""
    where = f"model.adapter.path={directory}"
    file = directory / CONFIG
    if not file.is_file():
        raise ConfigError(f"{where}: no {CONFIG} there (a directory that Hugging Face PEFT saved)")
    _check_config(read_json_object(file), options, selected, where)
    return _read_tensors(directory / WEIGHTS, where)


def _check_config(
    config: dict[str, Any], options: AdapterConfig, selected: tuple[str, ...], where: str
) -> None:
    """Raise ConfigError if the content of adapter_config.json is not that of an adapter of `options`."""
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{where}: peft_type={config.get('peft_type')!r} in {CONFIG}; supported: LORA")
    for name, value in config.items():
        if value and name not in _HARMLESS and (name, value) != ("bias", "none"):
            raise ConfigError(
                f"{where}: {name}={value!r} in {CONFIG} changes the adapter, and is not supported"
            )
    if (init := config.get("init_lora_weights")) not in _FIRST_VALUES:
        raise ConfigError(
            f"{where}: init_lora_weights={init!r} in {CONFIG}: Hugging Face PEFT changes the base model for "
            "such an adapter, and this run does not: convert it (save_pretrained with "
            "path_initial_model_for_weight_conversion)"
        )
    for name, key, wanted in (("r", "rank", options.rank), ("lora_alpha", "alpha", options.alpha)):
        if config.get(name) != wanted:
            raise ConfigError(
                f"{where}: {name}={config.get(name)!r} in {CONFIG}, and model.adapter.{key}={wanted}"
            )
    named = config.get("target_modules")
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ConfigError(f"{where}: target_modules={named!r} in {CONFIG}: expected a list of layers' names")
    layers = {name.rpartition(".")[2] for name in named}
    if layers != set(selected):
        raise ConfigError(
            f"{where}: target_modules={sorted(layers)} in {CONFIG}, and model.adapter.targets are "
            f"{list(selected)}: set model.adapter.targets={json.dumps(sorted(layers))}"
        )


def _read_tensors(file: Path, where: str) -> dict[str, Tensor]:
    if not file.is_file():
        raise ConfigError(f"{where}: no {file.name} there (adapter_model.bin is a pickle, which is not read)")
    try:
        with safe_open(file, "pt") as opened:
            sums = json.loads((opened.metadata() or {}).get(HEADER, "{}"))
            if not isinstance(sums, dict):
                raise ValueError("the checksums in its header are damaged")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{where}: {file.name} is not whole: {error}") from None
    for name, tensor in tensors.items():
        if name in sums and sums[name] != checksum(tensor):
            raise ConfigError(
                f"{where}: {name} in {file.name} is not what was saved (another checksum): it is damaged"
            )
        if tensor.dtype not in _FLOATS:
            raise ConfigError(
                f"{where}: {name} in {file.name} is of {tensor.dtype}: want float32, bfloat16, float16 or "
                "float64"
            )
        if tensor.numel() and not torch.isfinite(tensor).all():
            raise ConfigError(f"{where}: {name} in {file.name} has values that are NaN or infinite")
    return tensors


def compare_names(wanted: set[str], stored: set[str], where: str) -> str | None:
    """Return the problem with the names of a directory's tensors, or None."""
    problems = []
    if missing := wanted - stored:
        problems.append(f"it lacks {shown_names(missing)}")
    if extra := stored - wanted:
        problems.append(f"it has {shown_names(extra)} that the model does not take")
    return f"{where}: {', and '.join(problems)}" if problems else None

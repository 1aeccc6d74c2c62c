"""Refuses what is not proven for models that take images, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.config_json import read_json_object
from megatron_gvpo.huggingface.image_families import TOKENS, takes_images
from megatron_gvpo.settings.config import Config

# Keys of preprocessor_config.json and the keys of vision_config that say the same.
_PATCHES = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}


def check_images(config: Config, model: dict[str, Any]) -> None:
    """Raises ConfigError for a setting or a config.json that a model with images cannot have.

    `model`: its config.json, as `read_model_config` returns it.
    """
    where, parallel = f"model.path={config.model.path}", config.parallel
    if not takes_images(model):
        if config.model.train_vision:
            raise ConfigError(f"model.train_vision=true: {where} has no vision tower; leave it out")
        return
    _check_model(model, where)
    _check_patches(Path(config.model.path), model["vision_config"], where)
    refused = {
        f"parallel.cp={parallel.cp}": parallel.cp > 1,
        f"parallel.vpp={parallel.vpp}": parallel.vpp > 1,
        "model.fp8": config.model.fp8 is not None,
        "model.adapter": config.model.adapter is not None,
        "train.share_prompts=true": config.train.share_prompts,
        "rollout.conversation": config.rollout.conversation is not None,
        "rollout.speculation": config.rollout.speculation is not None,
        "teacher": config.teacher is not None,
        **{f"algorithm.members: {m.name}": not m.takes_images for m in config.algorithm.members},
        "algorithm.critic": config.algorithm.critic is not None,
        f"parallel.offload_layers={parallel.offload_layers}": bool(parallel.offload_layers),
        f"parallel.offload_modules={list(parallel.offload_modules)}": bool(parallel.offload_modules),
    }
    if found := [name for name, given in refused.items() if given]:
        raise ConfigError(f"{where} takes images, and {found[0]} is not supported with images: leave it out")
    if config.model.train_vision and parallel.overlap_grad_reduce:
        raise ConfigError(
            "model.train_vision=true with parallel.overlap_grad_reduce=true: Megatron expects gradients of "
            "all weights, and a micro-batch without images has none of the vision tower's: set one to false"
        )
    deep = len(model["vision_config"].get("deepstack_visual_indexes") or ())
    if config.model.train_vision and parallel.recompute == "full" and deep:
        raise ConfigError(
            "model.train_vision=true with parallel.recompute=full: Megatron-Bridge loses the gradients of "
            "the features that the vision tower adds to the first layers; leave it out"
        )
    if model["vocab_size"] % parallel.tp:
        raise ConfigError(
            f"parallel.tp={parallel.tp} does not divide vocab_size={model['vocab_size']}: Megatron-Bridge "
            "pads the vocabulary of text models only"
        )
    first = parallel.stage_layers[0] if parallel.stage_layers else model["num_hidden_layers"] // parallel.pp
    if deep > first:
        raise ConfigError(
            f"parallel.pp={parallel.pp}: the first stage has {first} layers, and the vision tower's features "
            f"go into the first {deep}: use fewer stages"
        )


def _check_model(model: dict[str, Any], where: str) -> None:
    if not isinstance(model.get("vision_config"), dict):
        raise ConfigError(f"{where}: no vision_config in config.json")
    for key in TOKENS:
        token = model.get(key)
        if type(token) is not int or not 0 < token < model["vocab_size"]:
            raise ConfigError(f"{where}: {key}={token} in config.json: expected a token above 0")
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if not isinstance(rope.get("mrope_section"), list):
        raise ConfigError(f"{where}: the rope parameters in config.json have no mrope_section")
    if "Qwen3VLForConditionalGeneration" in model["architectures"] and not rope.get("mrope_interleaved"):
        raise ConfigError(
            f"{where}: the rope parameters in config.json lack mrope_interleaved=true, with which "
            "the model is trained; engines would take it for false"
        )
    act = model["vision_config"].get("hidden_act", "gelu_pytorch_tanh")
    if "Qwen3VLForConditionalGeneration" in model["architectures"] and act != "gelu_pytorch_tanh":
        raise ConfigError(
            f"{where}: hidden_act={act} of the vision tower in config.json; Megatron-Bridge builds it with "
            "gelu_pytorch_tanh only"
        )


def _check_patches(directory: Path, vision: dict[str, Any], where: str) -> None:
    """The image processor must cut an image into the patches that the vision tower takes."""
    file = directory / "preprocessor_config.json"
    if not file.is_file():  # reading the data says so, where a prompt has an image
        return
    processor = read_json_object(file)
    for ours, theirs in _PATCHES.items():
        given, wanted = processor.get(ours), vision.get(theirs)
        if None not in (given, wanted) and given != wanted:
            raise ConfigError(
                f"{where}: {ours}={given} in preprocessor_config.json, and vision_config.{theirs}={wanted} "
                "in config.json: take both files from the same model"
            )

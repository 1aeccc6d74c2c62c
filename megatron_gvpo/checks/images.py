"""Refuses settings that are not tested with models that take images; each error names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.json_files import read_json_object
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.image_families import TOKENS, takes_images
from megatron_gvpo.settings.config import Config

# Keys of preprocessor_config.json, and the keys of vision_config with the same meaning.
_PATCHES = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}


def check_images(config: Config, card: ModelCard) -> None:
    """Raises ConfigError for a setting or a config.json that a model with images cannot have."""
    where, parallel = f"model.path={config.model.path}", config.parallel
    if not takes_images(card):
        if config.model.train_vision:
            raise ConfigError(f"model.train_vision=true: {where} has no vision tower; leave it out")
        return
    _check_model(card, where)
    _check_patches(Path(config.model.path), card["vision_config"], where)
    _check_unsupported(config, where)
    if config.model.train_vision and parallel.overlap_grad_reduce:
        raise ConfigError(
            "model.train_vision=true with parallel.overlap_grad_reduce=true: Megatron expects gradients of "
            "all weights, and a micro-batch without images has none of the vision tower's: set one to false"
        )
    deep = len(card["vision_config"].get("deepstack_visual_indexes") or ())
    if config.model.train_vision and parallel.recompute == "full" and deep:
        raise ConfigError(
            "model.train_vision=true with parallel.recompute=full: Megatron-Bridge loses the gradients of "
            "the features that the vision tower adds to the first layers; leave it out"
        )
    if card["vocab_size"] % parallel.tp:
        raise ConfigError(
            f"parallel.tp={parallel.tp} does not divide vocab_size={card['vocab_size']}: Megatron-Bridge "
            "pads the vocabulary of text models only"
        )
    first = parallel.stage_layers[0] if parallel.stage_layers else card["num_hidden_layers"] // parallel.pp
    if deep > first:
        raise ConfigError(
            f"parallel.pp={parallel.pp}: the first stage has {first} layers, and the vision tower's features "
            f"go into the first {deep}: use fewer stages"
        )


def _check_unsupported(config: Config, where: str) -> None:
    """Raises ConfigError for a setting that is not supported for a model with images."""
    parallel = config.parallel
    refused = {
        f"parallel.cp={parallel.cp}": parallel.cp > 1,
        f"parallel.vpp={parallel.vpp}": parallel.vpp > 1,
        "model.fp8": config.model.fp8 is not None,
        "model.adapter": config.model.adapter is not None,
        "train.share_prompts=true": config.train.requires_shared_prompts,
        "rollout.conversation": config.rollout.conversation is not None,
        "rollout.speculation": config.rollout.speculation is not None,
        "teacher": config.teacher is not None,
        **{f"algorithm.members: {m.name}": not m.takes_images for m in config.algorithm.members},
        "algorithm.critic": config.algorithm.critic is not None,
        f"parallel.offload_layers={parallel.offload_layers}": bool(parallel.offload_layers),
        f"parallel.offload_modules={list(parallel.offload_modules)}": bool(parallel.offload_modules),
    }
    for setting, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{where} takes images, and {setting} is not supported with images: leave it out"
            )


def _check_model(card: ModelCard, where: str) -> None:
    if not isinstance(card.get("vision_config"), dict):
        raise ConfigError(f"{where}: no vision_config in config.json")
    for key in TOKENS:
        token = card.get(key)
        if type(token) is not int or not 0 < token < card["vocab_size"]:
            raise ConfigError(f"{where}: {key}={token} in config.json: expected a token above 0")
    rope = card.get("rope_parameters") or card.get("rope_scaling") or {}
    if not isinstance(rope.get("mrope_section"), list):
        raise ConfigError(f"{where}: the rope parameters in config.json have no mrope_section")
    if "Qwen3VLForConditionalGeneration" in card.architectures and not rope.get("mrope_interleaved"):
        raise ConfigError(
            f"{where}: the rope parameters in config.json lack mrope_interleaved=true, with which "
            "the model is trained; engines would take it for false"
        )
    act = card["vision_config"].get("hidden_act", "gelu_pytorch_tanh")
    if "Qwen3VLForConditionalGeneration" in card.architectures and act != "gelu_pytorch_tanh":
        raise ConfigError(
            f"{where}: hidden_act={act} of the vision tower in config.json; Megatron-Bridge builds it with "
            "gelu_pytorch_tanh only"
        )


def _check_patches(directory: Path, vision: dict[str, Any], where: str) -> None:
    """The image processor must cut an image into the patches that the vision tower takes."""
    file = directory / "preprocessor_config.json"
    if not file.is_file():  # the data reader reports it if a prompt has an image
        return
    processor = read_json_object(file)
    for key, key_of_tower in _PATCHES.items():
        size, wanted = processor.get(key), vision.get(key_of_tower)
        if None not in (size, wanted) and size != wanted:
            raise ConfigError(
                f"{where}: {key}={size} in preprocessor_config.json, and "
                f"vision_config.{key_of_tower}={wanted} in config.json: take both files from the same model"
            )

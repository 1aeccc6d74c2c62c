"""Checks that transformers has the model that a config.json names: without it there is nothing to compare."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.config.model_types import SAME_MODEL
from megatron_gvpo.images.families import takes_images


def check_known(config: dict[str, Any], named: str, where: str) -> None:
    """Raise ConfigError, which begins with `where`, unless `model_type` is that of the architecture `named`.

    Loads transformers, and no other large library but torch.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if takes_images(config):
        raise ConfigError(
            f"{where}: {named} takes images, and this command compares models of text alone; "
            "docs/howto/images_in_prompts.md says how models with images were compared"
        )
    kind = config.get("model_type")
    kind = SAME_MODEL.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: model_type={kind!r} in config.json: expected a name, such as qwen3")
    if kind not in CONFIG_MAPPING_NAMES:
        close = get_close_matches(kind, list(CONFIG_MAPPING_NAMES), 1)
        raise ConfigError(
            f"{where}: model_type={kind} in config.json: transformers {transformers.__version__}, with which "
            f"models are compared, has no such model{f'; did you mean {close[0]}?' if close else ''}"
        )
    built = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if built is None:
        raise ConfigError(
            f"{where}: model_type={kind} in config.json: transformers has no causal language model of it, "
            "and this command compares no others"
        )
    if built != named:
        raise ConfigError(
            f"{where}: architectures={named} in config.json, but the causal language model of "
            f"model_type={kind} is {built}"
        )

"""Values of `model_type` in config.json that transformers does not know, of models that it has."""

from __future__ import annotations

# The released config.json has the first, and the architecture and the weights' names of the second.
SAME_MODEL = {"kimi_k2": "deepseek_v3"}


def add_model_types() -> None:
    """Let transformers read these models. Loads transformers."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for named, same in SAME_MODEL.items():
        CONFIG_MAPPING.register(named, CONFIG_MAPPING[same], exist_ok=True)
        files = get_checkpoint_conversion_mapping(same)  # how the files' tensors become those in memory
        register_checkpoint_conversion_mapping(named, files, overwrite=True)

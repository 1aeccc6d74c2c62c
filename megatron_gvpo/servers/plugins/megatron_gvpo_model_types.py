"""Lets both engines read a config.json whose `model_type` transformers does not have, of a model that it has.

Without this they want the checkpoint's own Python files. megatron_gvpo.huggingface.architectures
has the same for
the trainer.
"""

from __future__ import annotations

SAME_MODEL = {"kimi_k2": "deepseek_v3"}


def add_model_types() -> None:
    """Teach this process the model types. Each process of an engine calls this as a general plugin."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for named, same in SAME_MODEL.items():
        CONFIG_MAPPING.register(named, CONFIG_MAPPING[same], exist_ok=True)

"""The vision-language families, and the names of their parts in config.json and in weight files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Architectures, and the changes from a tensor's name in transformers' model to its name in files.
FAMILIES: dict[str, tuple[tuple[str, str], ...]] = {
    "Qwen2_5_VLForConditionalGeneration": (
        ("model.language_model.", "model."),
        ("model.visual.", "visual."),
    ),
    "Qwen3VLForConditionalGeneration": (),
}
TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id")  # keys of config.json


def takes_images(model: Mapping[str, Any]) -> bool:
    """Returns True for a config.json of a model with a vision tower."""
    return bool(set(model.get("architectures") or ()) & FAMILIES.keys())


def text_values(model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with the keys of its language model at the top, as text models have them.

    Files of transformers 5 have them in `text_config`, older ones at the top.
    """
    text = model.get("text_config")
    if not isinstance(text, dict) or "vision_config" not in model:
        return dict(model)
    own = {key: value for key, value in text.items() if key not in ("architectures", "model_type")}
    tied = model.get("tie_word_embeddings", own.get("tie_word_embeddings"))
    return {**model, **own} | ({} if tied is None else {"tie_word_embeddings": tied})


def name_in_file(name: str, architecture: str) -> str:
    """Returns the name that files have for a tensor of transformers' model."""
    for in_memory, in_file in FAMILIES.get(architecture, ()):
        if name.startswith(in_memory):
            return in_file + name.removeprefix(in_memory)
    return name

"""The token ids of a checkpoint's tokenizer.json, read without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.config_json import read_json_object


def vocabulary(directory: Path) -> dict[str, int]:
    """Token to id, added tokens included; empty if there is no tokenizer.json.

    Raises ConfigError for a file with another content.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return {}
    content = read_json_object(file)
    try:
        found: Any = content["model"]["vocab"]
        if isinstance(found, list):  # of a unigram model, [token, score] at the place of its id
            found = {piece[0]: number for number, piece in enumerate(found)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        return {**found, **added}
    except (KeyError, TypeError, IndexError):
        raise ConfigError(f"{file}: this is no tokenizer: it has no vocabulary") from None

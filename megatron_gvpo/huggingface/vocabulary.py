"""The token ids of a checkpoint's tokenizer.json, read without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.json_files import read_json_object


def vocabulary(directory: Path) -> dict[str, int]:
    """Token to id, added tokens included; empty if there is no tokenizer.json.

    Raises ConfigError for a file with another content.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return {}
    content = read_json_object(file)
    try:
        tokens: Any = content["model"]["vocab"]
        if isinstance(tokens, list):  # a unigram model has [token, score] at the index of the id
            tokens = {piece[0]: number for number, piece in enumerate(tokens)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        return {**tokens, **added}
    except (KeyError, TypeError, IndexError):
        raise ConfigError(f"{file}: this is not a tokenizer: it has no vocabulary") from None

"""Reads config.json and other JSON objects of a model's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.yaml_files import each_once
from megatron_gvpo.huggingface.image_families import text_values


def read_model_config(path: str, key: str = "model.path") -> dict[str, Any]:
    """Read the model's Hugging Face config.json.

    That of a model with images has its language model's keys at the top (`text_values`).
    Raises ConfigError, which names `key`, if there is none.
    """
    file = Path(path) / "config.json"
    try:
        is_there = file.is_file()
    except OSError as error:  # no permission, or a name that is too long
        raise ConfigError(f"{file}: {error.strerror}") from None
    if not is_there:
        raise ConfigError(f"{key}={path}: no config.json there (a Hugging Face checkpoint directory)")
    return text_values(read_json_object(file))


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file with one JSON object. Raises ConfigError, which names the file, for any other content."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=each_once)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}, line {error.lineno}: not valid JSON ({error.msg})") from None
    except RecursionError:
        raise ConfigError(f"{file}: not valid JSON (nested too deeply)") from None
    except ValueError as error:  # not UTF-8, a number of more digits than Python reads, or a key given twice
        raise ConfigError(f"{file}: not valid JSON ({error})") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected an object of names and values, found {type(values).__name__}")
    return values

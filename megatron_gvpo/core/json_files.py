"""Reads JSON files that hold one object, and refuses a key that comes twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a file with one JSON object. Raises ConfigError, which names the file, for any other content."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
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


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its pairs: the `object_pairs_hook` of json.loads.

    Raises ValueError for a key that comes twice, of which json.loads alone would take the last.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"field {next(key for key in counts if counts[key] > 1)!r} is given twice")
    return fields

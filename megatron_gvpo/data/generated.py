"""Problems that the package reasoning-gym generates: `reasoning_gym:NAME?option=value` in place of a file.

The options, divided by `&`, are the generator's own, `size` and `seed` among them. Without a seed, the split
decides the seed, so that `split: test` has other problems than `split: train`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from typing import Any
from urllib.parse import parse_qsl
from zlib import crc32

from megatron_gvpo.settings.rewards import check_installed

PREFIX = "reasoning_gym:"
KEY = "reasoning_gym"  # the record's field that identifies the problem


def generated_problems(path: str, split: str) -> Iterator[dict[str, Any]]:
    """The records, with `prompt` and `answer`. Raises ValueError for an unknown name or key."""
    check_installed()
    name, _, query = path.removeprefix(PREFIX).partition("?")
    options: dict[str, Any] = {"seed": crc32(split.encode()) % 2**31}
    for key, text in parse_qsl(query, keep_blank_values=True):
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    _check_options(name, options)
    try:
        problems = problems_of(name, json.dumps(options))
        for index in range(len(problems)):
            entry = problems[index]
            source = {"name": name, "options": json.dumps(options), "index": index}
            yield {"prompt": entry["question"], "answer": str(entry["answer"]), KEY: source}
    except AssertionError as error:  # the generator's message names the wrong option
        raise ValueError(
            " ".join(str(error).split()) or "a generator's check of its options failed"
        ) from None
    except Exception as error:  # the generator's checks missed this option
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())}") from None


@cache
def problems_of(name: str, options: str) -> Any:
    """The generator's data set; `options` are JSON."""
    return _package().create_dataset(name, **json.loads(options))


def _package() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from a package that reasoning_gym imports
        import reasoning_gym

    return reasoning_gym


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a name or an option that reasoning-gym does not have, or a text for a number."""
    generators: Mapping[str, tuple[type, type]] = _package().factory.DATASETS
    if name not in generators:
        near = get_close_matches(name, generators, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"such as {', '.join(sorted(generators)[:5])}"
        raise ValueError(f"reasoning-gym has no generator {name!r}; {hint}")
    kinds = {field.name: field.type for field in fields(generators[name][1])}
    for key, value in options.items():
        if key not in kinds:
            raise ValueError(f"the generator has no option {key!r}; its options: {', '.join(kinds)}")
        if kinds[key] in (int, float) and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{key}={value}: expected a number")


def entry_of(record: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the generator's data set and the record's entry in it.

    Raises ValueError for a record of other data.
    """
    source = record.get(KEY)
    if not isinstance(source, Mapping):
        raise ValueError(f"the record has no field {KEY!r}: data.train.path is not {PREFIX}NAME")
    problems = problems_of(source["name"], source["options"])
    return problems, problems[source["index"]]

"""Hypothesis strategies that spoil valid values and texts in the ways in which users and programs do."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

DEEP: Any = {}
for _ in range(60):
    DEEP = {"a": [DEEP]}
ODD = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e-300, 1e308),
    *(
        float("nan"),
        float("inf"),
        "",
        "x",
        "1",
        "1e-5",
        "true",
        "\x00",
        "\ud83d",
        "\u202e\U0001f600",
        "x" * 3000,
    ),
    *("../..", "/", "~", "a\nb", [], [[]], {}, [None], {"name": "x"}, {"": ""}, [1, "a", {}], DEEP),
]

ODD_BYTES = [
    *(
        b"",
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b'"',
        b"{",
        b"]",
        b"\n",
        b"\r\n",
        b"\t",
        b"NaN",
        b"- ",
        b": ",
    ),
    *(b"[" * 400, b"9" * 5000, b"&a *a", b"!!int ''", b"---\n"),
]


def paths_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values inside a nested value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in inside for path in ((*at, key), *paths_in(item, (*at, key)))]


@st.composite
def mutated(draw: st.DrawFn, valid: Any, most: int = 3) -> Any:
    """A valid nested value with some values dropped, duplicated, moved or replaced by odd ones."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, most))):
        present = paths_in(value)
        if not present:
            return value
        *above, key = draw(st.sampled_from(present))
        parent = value
        for part in above:
            parent = parent[part]
        match draw(st.sampled_from(["odd", "odd", "drop", "rename", "wrap", "text", "negate", "copy"])):
            case "odd":
                parent[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
            case "drop":
                del parent[key]
            case "rename" if isinstance(parent, dict):
                parent[draw(st.sampled_from(["", "x", f"{key} ", f"{key}s", "name", 7]))] = parent.pop(key)
            case "wrap":
                parent[key] = draw(st.sampled_from([[parent[key]], {"x": parent[key]}]))
            case "text":
                parent[key] = str(parent[key])
            case "negate" if isinstance(parent[key], int | float):
                parent[key] = -parent[key] * draw(st.sampled_from([1, 1000, 10**12]))
            case "copy":
                parent[key] = copy.deepcopy(draw(st.sampled_from([parent, [parent[key]] * 2])))
    return value


@st.composite
def spoiled(draw: st.DrawFn, text: bytes) -> bytes:
    """A valid text cut short, or with bytes replaced, repeated, swapped or inserted."""
    where = draw(st.integers(0, len(text)))
    end = min(len(text), where + draw(st.integers(0, 12)))
    odd = draw(st.sampled_from(ODD_BYTES))
    match draw(st.sampled_from(["cut", "replace", "repeat", "insert"])):
        case "cut":
            return text[:where]
        case "replace":
            return text[:where] + odd + text[end:]
        case "repeat":
            return text[:end] + text[where:]
    return text[:where] + odd + text[where:]

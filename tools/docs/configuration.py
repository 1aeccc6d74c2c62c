"""The configuration reference: every section and key, with type, default and meaning."""

from __future__ import annotations

import inspect
import textwrap

from pydantic import BaseModel

from megatron_gvpo.settings.reference import keys, sections

__all__ = ["keys", "page", "sections"]


def page() -> str:
    parts = [_HEAD]
    seen: dict[type[BaseModel], str] = {}
    for path, model in sections():
        if path:
            parts.append(f"## `{path}`")
        if model in seen:
            parts.append(f"The keys of `{seen[model]}`.")
            continue
        seen[model] = path
        if "__doc__" in model.__dict__ and model.__doc__ and path:
            parts.append(_paragraphs(inspect.getdoc(model) or ""))
        rows = [
            f"| `{k.name}` | {_cell(k.type)} | {_cell(k.default)} | {_cell(k.meaning)} |" for k in keys(model)
        ]
        if rows:
            parts.append("\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _paragraphs(doc: str) -> str:
    """Return a docstring as Markdown; its indented lines become blocks of YAML."""
    out: list[str] = []
    for block in doc.split("\n\n"):
        if block.startswith("    "):
            out.append(f"```yaml\n{textwrap.dedent(block)}\n```")
        else:
            out.append(block)
    return "\n\n".join(out)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


_HEAD = """# Configuration

Every section and key, generated from `megatron_gvpo/settings/` and `megatron_gvpo/algorithms/config.py`.

A configuration is one or more YAML files. Later files win, key by key; `key.sub=value` arguments on the
command line win over all files. A key that does not exist is an error that names the nearest one. `required`
keys have no default. The options of a method's blocks are on the page [Recipes](recipes.md).

`key.sub=null` gives none, and `None` is a word. `{}` empties `options` and other mappings whose
keys are yours; the keys of a section are given one by one.

`1e-5` and `1_000` are numbers; `010`, `0x10`, `1:30`, `true` and anything in quotes are not. A number
without a stated bound must lie between -2147483647 and 2147483647 (integers) or between -1e12 and 1e12."""

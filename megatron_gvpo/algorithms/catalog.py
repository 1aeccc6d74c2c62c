"""The recipes for users: a list, one composition with every value, and a page of Markdown, from the code."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_gvpo.algorithms.base import Block
from megatron_gvpo.algorithms.recipe import read_recipe, recipe_names

PROVENANCE = {
    "paper": "formulas read in the paper",
    "code": "formulas read in the authors' code",
    "second-hand": "from notes and implementations of others; the shape is reliable, constants may not be",
    "textbook": "common knowledge of the cited paper",
    "inspired by": "only an abstract was known",
}


def listing() -> list[dict[str, Any]]:
    """Every recipe with its name, title, paper, summary, provenance, choices, requirements and settings."""
    return [{"name": name, **read_recipe(name)[1].model_dump(mode="json")} for name in recipe_names()]


def as_text() -> str:
    """Return a text with one line for each recipe."""
    width = max(map(len, recipe_names()))
    return "\n".join(
        f"{r['name']:<{width}}  {r['provenance']:<11}  {r['summary']}  [{r['paper']}]" for r in listing()
    )


def as_json() -> str:
    return json.dumps(listing(), indent=2)


def show(name: str) -> str:
    """A recipe's composition with every effective value, as YAML. Raises ValueError for an unknown one."""
    # This import loads every block; the list alone does not need them.
    from megatron_gvpo.algorithms.config import AlgorithmConfig

    _, about = read_recipe(name)
    values = _name_first(AlgorithmConfig.model_validate(name).model_dump(mode="json"))
    lines = [about.title, f"{about.paper}; {PROVENANCE[about.provenance]}", about.summary]
    lines += [f"chosen: {about.chosen}"] if about.chosen else []
    lines += [f"needs: {need}" for need in about.needs]
    lines += [
        f"set beside it, which the recipe does not do: {key}={json.dumps(value)}"
        for key, value in about.settings.items()
    ]
    head = "\n".join(f"# {line}" for text in lines for line in textwrap.wrap(text, 108))
    return f"{head}\n{yaml.safe_dump({'algorithm': values}, sort_keys=False)}"


def _name_first(value: Any) -> Any:
    if isinstance(value, list):
        return [_name_first(item) for item in value]
    if not isinstance(value, dict):
        return value
    keys = sorted(value, key=lambda key: key != "name")  # the sort is stable: the other keys keep their order
    return {key: _name_first(value[key]) for key in keys}


def markdown() -> str:
    """The page docs/reference/recipes.md of the site, which is not committed: `make docs` writes it."""
    parts = [_HEAD, "| recipe | what it does | paper | provenance |\n|---|---|---|---|"]
    for recipe in listing():
        notes = [f"chosen: {recipe['chosen']}"] if recipe["chosen"] else []
        notes += [f"needs {need}" for need in recipe["needs"]]
        summary = f"**{recipe['title']}.** {recipe['summary']}" + "".join(f"; {note}" for note in notes)
        parts[-1] += (
            f"\n| `{recipe['name']}` | {_cell(summary)} | {_cell(recipe['paper'])} | {recipe['provenance']} |"
        )
    parts.append("\n".join(f"- *{name}*: {meaning}" for name, meaning in PROVENANCE.items()))
    parts.append("## The blocks")
    for key, annotation in _block_keys().items():
        parts.append(f"### `algorithm.{key}`")
        parts += [_block(block) for block in _blocks(annotation)]
    return "\n\n".join(parts) + "\n"


def _block_keys() -> dict[str, Any]:
    """The keys of `algorithm` that hold blocks, each with the annotation that names its blocks."""
    from megatron_gvpo.algorithms import config as blocks
    from megatron_gvpo.algorithms.losses.pg import AnyImportance

    return {
        "prompts": blocks.AnyPrompts,
        "allocation": blocks.AnyAllocation,
        "tracker": blocks.Tracker,
        "prior": blocks.AnyPrior,
        "members": blocks.AnyMember,
        "shapers": blocks.AnyShaper,
        "batch_policy": blocks.AnyBatchPolicy,
        "estimator": blocks.AnyEstimator,
        "critic": blocks.CriticOptions,
        "loss": blocks.AnyLoss,
        "loss.importance": AnyImportance,
    }


def _blocks(annotation: Any) -> Iterator[type[Block]]:
    """The blocks in a union, in its order."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        yield annotation
    elif typing.get_origin(annotation) is typing.Annotated:
        yield from _blocks(typing.get_args(annotation)[0])
    elif isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        for part in typing.get_args(annotation):
            yield from _blocks(part)


def _block(block: type[Block]) -> str:
    name = block.model_fields["name"].default if "name" in block.model_fields else None
    head = f"#### `{name}`" if name else "#### its options"
    comments = field_comments(block)
    options = [
        f"- `{key}`: {_default(field)}" + (f" ({comments[key]})" if comments.get(key) else "")
        for key, field in block.model_fields.items()
        if key != "name"
    ]
    source = block.__module__.partition(".")[2].replace(".", "/")
    doc = f"```text\n{inspect.getdoc(block)}\n```"
    return "\n\n".join([head, doc, *(["\n".join(options)] if options else []), f"In `{source}.py`."])


@cache
def field_comments(model: type[BaseModel]) -> dict[str, str]:
    """Return the comment of each field of a section, which the reference pages show as its meaning.

    It consists of the comment lines directly above the field and the comment at its end.
    """
    comments: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            comments |= _comments(textwrap.dedent(inspect.getsource(base)))
    return comments


def _comments(source: str) -> dict[str, str]:
    own: dict[int, str] = {}  # comments on lines of their own; `behind` has those after code
    behind: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = re.sub(r"type: ignore\S*", "", token.string.lstrip("#")).strip()
            (behind if token.line[: token.start[1]].strip() else own)[token.start[0]] = text
    comments = {}
    for node in typing.cast(ast.ClassDef, ast.parse(source).body[0]).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            line, above = node.lineno - 1, list[str]()
            while line in own:
                above.insert(0, own[line])
                line -= 1
            end = node.end_lineno or node.lineno
            parts = [*above, *(behind[n] for n in range(node.lineno, end + 1) if n in behind)]
            comments[node.target.id] = " ".join(filter(None, parts))
    return comments


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "to be given"
    if isinstance(value, Block):
        value = value.model_dump(mode="json", exclude_none=True)
    return f"`{json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


_HEAD = """# Recipes

Generated from the code by `megatron-gvpo recipes --markdown`.

A recipe is one method: a short YAML file in `megatron_gvpo/algorithms/recipes/` that names a block for each
place along the pipeline.

```text
prompts -> sampler (engine, dataset, file) -> prior, members -> shapers -> batch policy -> estimator -> loss
```

`megatron-gvpo recipes` lists the recipes. `megatron-gvpo recipes show NAME` prints one with every effective
value. In a configuration, `algorithm: NAME` takes a recipe as it is. This takes `dapo` and changes one key:

```yaml
algorithm:
  recipe: dapo
  loss: {clip_high: 0.3}
```

[How to write your own loss, estimator or shaper](../howto/own_method.md).

## The recipes"""

"""The comments beside the fields of a configuration section, which the reference pages show as meanings."""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize
import typing
from functools import cache

from pydantic import BaseModel


@cache
def field_comments(model: type[BaseModel]) -> dict[str, str]:
    """The comments of every field: own lines directly above it, then the rest of its last line."""
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

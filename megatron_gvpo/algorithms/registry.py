"""The blocks that a configuration may name: those that lie in the folder of their kind."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import reduce
from operator import or_
from types import ModuleType
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from megatron_gvpo.algorithms.base import Block


def choice(*modules: ModuleType, kind: type[Block], default: str | None = None) -> Any:
    """The annotation of an option that holds one block of a kind, which its `name` chooses.

    The blocks are those in the packages and modules `modules`. A plain string is short for `{name: string}`;
    `default` is the name where the settings give none.
    """

    def named(value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        return {"name": default, **value} if default and isinstance(value, Mapping) else value

    blocks: Any = reduce(or_, [block for module in modules for block in blocks_in(module, kind)])
    return Annotated[blocks, Field(discriminator="name"), BeforeValidator(named)]


def blocks_in(parent: ModuleType, kind: type[Block]) -> list[type[Block]]:
    """The blocks of a kind that have a `name`, in a module or in the modules of a package.

    Modules come in alphabetical order, and the blocks of a module in the order of its text.
    """
    package = getattr(parent, "__path__", ())
    inside = [f"{parent.__name__}.{module.name}" for module in pkgutil.iter_modules(package)]
    return [
        value
        for module in [importlib.import_module(name) for name in inside] or [parent]
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, kind)
        and value.__module__ == module.__name__
        and isinstance(value.model_fields["name"].default, str)
    ]

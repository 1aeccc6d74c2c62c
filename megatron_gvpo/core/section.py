"""Base class of all settings, whose numbers have bounds, and the types that settings share."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    field_validator,
)
from pydantic_core import CoreSchema

EVERY_KEY = ("*",)  # `fixed_keys = EVERY_KEY`: all keys, also ones added later, are fixed

# Bounds of fields that set none: a 32-bit counter, and a number whose square float32 can hold.
LARGEST_COUNT = 2**31 - 1
LARGEST_NUMBER = 1e12
MIB = 2**20  # bytes

# the length of a wait; the system's poll takes at most 2^31 ms
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Processes = Annotated[int, Field(gt=0, le=1024)]  # processes to start on one machine
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # numpy's, torch's and the engines' generators take it


def _expand(path: str) -> str:
    if not path:
        raise ValueError("the path is empty; the current directory is `.`")
    if any(ord(letter) < ord(" ") for letter in path):
        raise ValueError("the path has a control character, such as a line break")
    variable = re.search(r"\$(\{\w+\}|[A-Za-z_]\w*)", path)
    if variable is not None and not os.path.lexists(path):
        raise ValueError(
            f"{variable[0]} is not expanded in a configuration: write the path, or give it on the command "
            "line, where the shell expands it"
        )
    path = os.path.expanduser(path)
    if path.startswith("~"):
        raise ValueError(f"there is no user of this name; a directory of that name is ./{path}")
    if len(path) > 4095 or any(len(os.fsencode(part)) > 255 for part in path.split("/")):
        raise ValueError("longer than a path may be: 4095 characters, 255 bytes a name")
    return path


# A file or directory of this machine. A leading ~ is expanded here, since no shell expands it in a YAML file.
LocalPath = Annotated[str, AfterValidator(_expand)]


def _bound_numbers(schema: Any, model: type[BaseModel]) -> None:
    """Make the numbers of a model's core schema strict, in place, and give bounds to those that have none."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _bound_numbers(part, model)
    if not isinstance(schema, dict) or (schema.get("type") == "model" and schema["cls"] is not model):
        return  # an inner section has already checked its own values
    largest = {"int": LARGEST_COUNT, "float": LARGEST_NUMBER}.get(str(schema.get("type")))
    if largest is not None:
        schema["strict"] = True
        if not schema.keys() & {"le", "lt"}:
            schema["le"] = largest
        if not schema.keys() & {"ge", "gt"}:
            schema["ge"] = -largest
    for key, part in schema.items():
        if key not in ("default", "metadata", "serialization"):
            _bound_numbers(part, model)


class Section(BaseModel):
    """Settings: a section of a config file, or a block of an algorithm.

    Unknown keys are errors, and values cannot change after loading. A boolean or a string of digits is not a
    number. Every number has bounds: its field's, else LARGEST_COUNT or LARGEST_NUMBER and its negative.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # Every key has one of two kinds: fixed keys change the numbers that a run computes, and a resumed run
    # keeps them; free keys do not. An inner section that is in neither list declares the kinds of its own
    # keys.
    fixed_keys: ClassVar[tuple[str, ...]] = ()
    free_keys: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _bound_numbers(schema, cls)
        return schema

    @field_validator("*")
    @classmethod
    def _null_for_none(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse the word None in place of null for a text, where it would be a prompt or a project."""
        if isinstance(value, str) and value.lower() == "none" and info.field_name is not None:
            parts = get_args(cls.model_fields[info.field_name].annotation)
            if type(None) in parts and any(getattr(part, "__origin__", part) is str for part in parts):
                raise ValueError("YAML reads this word as a text: write null for none")
        return value

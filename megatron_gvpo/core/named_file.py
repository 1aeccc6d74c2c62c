"""Writes a file that the user names: a new one, or one that the same command wrote before.

Devices, pipes, checkpoints and all files that the command has not written stay as they are.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from megatron_gvpo.core.errors import ConfigError

# The first bytes of a page that `report` writes.
PAGE = "<!doctype html>\n<!-- Written by: megatron-gvpo report -->\n"


def check_named_file(file: Path, name: str, kind: str, begins: str | None) -> None:
    """Raises ConfigError unless `file` is new, or a file that begins with the text `begins`.

    `name` and `kind` are for the message: the option with the file, and the file's content, as in
    `--out FILE: this exists and is not a page`. `begins` None: the file must not exist yet.
    """
    try:
        target = Path(os.path.realpath(file))
        if os.path.exists(file) or os.path.lexists(target):  # `lexists` is false for the path of a pipe
            if begins is None or not begins_with(target, begins):
                raise ConfigError(f"{name}: this exists and is not {kind}; give another name")
        elif not target.parent.is_dir():
            raise ConfigError(f"{name}: there is no directory {file.parent}")
        elif len(os.fsencode(target.name)) > os.pathconf(target.parent, "PC_NAME_MAX"):
            raise ConfigError(f"{name}: the name is too long")
        elif not os.access(target.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{name}: nothing can be written in {target.parent}")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None


def write_named_file(file: Path, name: str, kind: str, begins: str | None, text: str) -> None:
    """Write the file as a whole or not at all. Raises ConfigError as `check_named_file` does.

    Where `file` is a link, the link stays.
    """
    check_named_file(file, name, kind, begins)
    target = Path(os.path.realpath(file))
    aside = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        try:
            with aside.open("x", encoding="utf-8") as content:
                content.write(text)
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None


def begins_with(file: Path, text: str) -> bool:
    """True if this is a regular file that begins with the text; a link is not one."""
    start = text.encode()
    try:
        if file.is_symlink() or not file.is_file():
            return False
        with file.open("rb") as content:
            return content.read(len(start)) == start
    except OSError:
        return False

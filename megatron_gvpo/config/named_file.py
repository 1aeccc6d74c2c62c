"""A file that the user names for a command to write: a new one, or one that the command wrote before.

`report --out`, `plan --write`, `slurm` and the converters write such files. Devices, pipes, checkpoints and
everything else that the command has not written stay as they are.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from megatron_gvpo.config.errors import ConfigError

# How a page of `report` begins.
PAGE = "<!doctype html>\n<!-- Written by: megatron-gvpo report -->\n"


def check_named_file(file: Path, option: str, kind: str, begins: str | None) -> None:
    """Raises ConfigError unless `file` is new, or a file that begins with the text `begins`.

    `option` and `kind` are for the message: the option that names the file, and its content, as in
    `--out FILE: this exists and is not a page that report wrote`. `begins`: None accepts a new file only.
    """
    name = f"{option} {file}"
    try:
        target = Path(os.path.realpath(file))
        if not target.parent.is_dir():
            raise ConfigError(f"{name}: there is no directory {target.parent}")
        if os.path.lexists(target):
            if not (target.is_file() and begins is not None and begins_with(target, begins)):
                raise ConfigError(f"{name}: this exists and is not {kind}; give another name")
        elif len(os.fsencode(target.name)) > os.pathconf(target.parent, "PC_NAME_MAX"):
            raise ConfigError(f"{name[:200]}...: the name is too long")
        elif not os.access(target.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"{name}: nothing can be written in {target.parent}")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None


def write_named_file(file: Path, option: str, kind: str, begins: str | None, text: str) -> None:
    """Write the file as a whole or not at all. Raises ConfigError as `check_named_file` does.

    What a link leads to is written, and the link stays.
    """
    check_named_file(file, option, kind, begins)
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
        raise ConfigError(f"{option} {file}: {error.strerror}") from None


def begins_with(file: Path, text: str) -> bool:
    """True if this is a regular file that begins with the text; a link is none."""
    start = text.encode()
    try:
        if file.is_symlink() or not file.is_file():
            return False
        with file.open("rb") as content:
            return content.read(len(start)) == start
    except OSError:
        return False

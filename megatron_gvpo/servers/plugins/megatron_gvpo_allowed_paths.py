"""The paths of the file system that an order may name, for the plugins in both engines.

A client with a server's key orders weights by a path. The server was started with two directories, in
environment variables, and refuses every path outside them, symbolic links included:
MEGATRON_GVPO_MEMORY, where trainers have directories of shared memory, and MEGATRON_GVPO_WEIGHTS, the
directory of the run's weight files.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

_OF_A_RUN = re.compile(r"megatron_gvpo-[0-9a-f]{16}")  # megatron_gvpo.weights.node.new_name
_FILE = re.compile(r"bucket(\.\d+)?|node|\d+\.told")


def in_memory(file: str) -> Path:
    """A file in a run's directory of shared memory, which need not exist on this node.

    Raises PermissionError for any other path, and for a directory that others could have made or can write.
    """
    root, path = Path(os.environ.get("MEGATRON_GVPO_MEMORY", "/dev/shm")), Path(file)
    directory = path.parent
    if directory.parent != root or not _OF_A_RUN.fullmatch(directory.name) or not _FILE.fullmatch(path.name):
        raise PermissionError(f"{file}: this server takes weights from runs' directories in {root} alone")
    for part, kind, mode in ((directory, stat.S_ISDIR, 0o077), (path, stat.S_ISREG, 0o022)):
        try:
            status = part.lstat()
        except FileNotFoundError:
            break
        if not kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & mode:
            raise PermissionError(f"{part}: not this user's own, or a link, or others can write it")
    return path


def in_weights(directory: str) -> list[Path]:
    """The safetensors files of a directory of the run's weights. Raises PermissionError for any other."""
    root = os.environ.get("MEGATRON_GVPO_WEIGHTS")
    if not root:
        raise PermissionError(
            f"{directory}: this server was started without MEGATRON_GVPO_WEIGHTS, the directory that it may "
            "read weights from"
        )
    files = sorted(Path(directory).glob("*.safetensors"))
    for path in (Path(directory), *files):
        if not path.resolve().is_relative_to(Path(root).resolve()):
            raise PermissionError(
                f"{path}: this server reads weights in {root} alone, as its own configuration has it "
                "(output_dir, rollout.weights.directory)"
            )
    return files

"""Files that a user's file imports from its directory: a run uses and compares those of its start.

A function's value depends on them as on its own file. Installed packages are not among them.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_PACKAGE = __package__.partition(".")[0]
# The beginnings of paths of modules that are not the user's: Python's, other packages' and this package's.
INSTALLED = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]) + os.sep,
    "<frozen ",
)


def imported_files(source: Path) -> list[Path]:
    """The files that a file imports from its directory or the current one, and those that they import.

    Only import statements are read, wherever they stand in the file; no code runs.
    """
    seen: dict[Path, None] = {}
    waiting = [source.absolute()]
    while waiting:
        file = waiting.pop()
        with suppress(OSError, SyntaxError, ValueError, RecursionError):
            for path in _imports(ast.parse(file.read_bytes()), file, (source.absolute().parent, Path.cwd())):
                if path not in seen and path != source.absolute():
                    seen[path] = None
                    waiting.append(path)
    return sorted(seen)


def helpers(source: Path) -> dict[str, Path]:
    """The modules beside a file that it imports, or that those import: each one's file or directory."""
    directory = source.absolute().parent
    files = (file for file in imported_files(source) if file.is_relative_to(directory))
    beside = {directory / file.relative_to(directory).parts[0] for file in files}
    return {path.stem: path for path in sorted(beside)}


def check_helpers(source: Path, earlier: Mapping[str, Path]) -> None:
    """Raises ValueError if another of the user's modules takes the place of one beside the file.

    A process has one module of a name: that of the file that was imported first, or of the current directory.
    `earlier`: the helpers of files that the same process will import before.
    """
    for name, path in helpers(source).items():
        locations = [str(earlier[name])] if name in earlier else _locations(name)
        is_beside = any(Path(other).resolve().is_relative_to(path.resolve()) for other in locations)
        if locations and not is_beside and not locations[0].startswith(INSTALLED):
            raise ValueError(f"it imports {name} from {path}, but {locations[0]} takes its place: rename one")


def _locations(module: str) -> list[str]:
    """The file of a module, or the directories of a package, that an import would take; empty for none."""
    with suppress(ImportError, ValueError):  # ValueError: the module was made by code
        if (spec := find_spec(module)) is not None:
            return [path for path in (spec.origin, *(spec.submodule_search_locations or ())) if path]
    return []


def _imports(tree: ast.Module, file: Path, directories: Sequence[Path]) -> Iterator[Path]:
    for node in ast.walk(tree):
        modules: list[list[str]] = []
        if isinstance(node, ast.Import):
            modules = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = node.module.split(".") if node.module else []
            modules = [
                [*package, alias.name] for alias in node.names
            ]  # a name may be a module of the package
        if isinstance(node, ast.ImportFrom) and node.level:
            for parts in modules:
                yield from module_files(parts, file.parents[node.level - 1 : node.level])
            continue
        for parts in modules:
            if parts[0] not in sys.stdlib_module_names and parts[0] != _PACKAGE:
                yield from module_files(parts, directories)


def module_files(parts: Sequence[str], directories: Sequence[Path]) -> Iterator[Path]:
    """The files of a module and of the packages that it is in, in the first directory that has it."""
    for directory in directories:
        files = []
        for part in parts:
            directory /= part
            both = (directory.with_name(f"{part}.py"), directory / "__init__.py")
            files += [f for f in both if os.path.isfile(f) and not str(f).startswith(INSTALLED)]
        if files:
            yield from files
            return


class KeptFiles(MetaPathFinder):
    """Imports modules from the content that their files had when the run began."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        """`contents`: the content of each file, by its absolute path."""
        self._contents = contents

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            origin = spec.origin or ""
        else:  # the file may have been removed
            stem = name.rpartition(".")[2]
            modules = [
                Path(directory).absolute() / stem for directory in (sys.path if path is None else path)
            ]
            files = (str(file) for module in modules for file in (module / "__init__.py", f"{module}.py"))
            origin = next((file for file in files if file in self._contents), "")
        if origin not in self._contents:
            return None
        loader = _KeptLoader(origin, self._contents[origin])
        is_package = Path(origin).name == "__init__.py"
        within = [str(Path(origin).parent)] if is_package else None
        return spec_from_file_location(name, origin, loader=loader, submodule_search_locations=within)


class _KeptLoader(SourceLoader):
    def __init__(self, path: str, content: bytes) -> None:
        self._path, self._content = path, content

    def get_filename(self, name: str) -> str:
        return self._path

    def get_data(self, path: str) -> bytes:
        if path != self._path:  # the compiled file beside it, which may be of another version
            raise OSError(path)
        return self._content

"""Users' own functions, named as "module:function" or "path/file.py:function"."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import threading
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from megatron_gvpo.core.user_imports import (
    INSTALLED,
    KeptFiles,
    check_helpers,
    imported_files,
    module_files,
)

# Modules whose functions a configuration may name, by their former names, which work for one more release.
MOVED = {
    "megatron_gvpo.algorithms.judged": "megatron_gvpo.algorithms.shapers.judged",
    "megatron_gvpo.teacher": "megatron_gvpo.api_model",
    "megatron_gvpo.rewards.counted": "megatron_gvpo.rewards.conversation_rewards",
}


MESSAGE = 500  # characters of an error's text; the rest is cut off
_PACKAGE = __package__.partition(".")[0]
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_exit = os._exit
_EXITS = ("exit", "_exit", "_Exit", "quick_exit", "abort")  # functions of C
_called = threading.local()  # `process`: the id of the process in which this thread runs users' code
_contents: dict[str, bytes] = {}  # the content of files as the run began with it, by path


def named_files(values: Any, at: str = "") -> Iterator[tuple[str, str]]:
    """The Python files that nested values name, by their dotted keys.

    "path/file.py:function" names one, and so does "path/file.py" if the file exists, as in the command of a
    server. "module:function" names the module's file, and then the `__init__.py` of the packages that it is
    in, if the current directory has them.
    """
    if isinstance(values, str):
        source = values.rpartition(":")[0]
        if values.endswith(".py") and os.path.isfile(values):
            source = values
        if source.endswith(".py"):
            yield at, source
        elif _MODULE.fullmatch(source) and not source.startswith(f"{_PACKAGE}."):
            for file in reversed([*module_files(source.split("."), [Path.cwd()])]):
                yield at, str(file)
    elif isinstance(values, Mapping | list | tuple):
        for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
            yield from named_files(value, f"{at}.{key}" if at else str(key))


def contents(values: Any) -> dict[str, bytes]:
    """The content of the files that `values` name, and of those that they import, for workers.

    Files that cannot be read are left out: an error names them when they are loaded.
    """
    files = {}
    for _, source in named_files(values):
        for file in (source, *map(str, imported_files(Path(source)))):
            with suppress(OSError):
                files[file] = Path(file).read_bytes()
    return files


def hold(files: Mapping[str, bytes]) -> None:
    """Make `load_function` and imports use this content, with which the run began, whatever is on the disk.

    Otherwise a worker that starts later could run another version of a file than the workers before it.
    """
    if not _contents:
        sys.meta_path.insert(0, KeptFiles(_contents))
    _contents.update(files)


def _is_named(value: Any) -> bool:
    """True for an object that a configuration may name: a function or a class."""
    return inspect.isfunction(value) or inspect.isclass(value)


@cache
def load_function(spec: str) -> Callable[..., Any]:
    """The function that `spec` names. Raises ValueError, which names the missing part."""
    source, name = spec_parts(spec)
    if source in MOVED:
        now = f"{MOVED[source]}:{name}"
        warnings.warn(f"{spec} is now {now}: the old name goes away soon", FutureWarning, stacklevel=2)
        return load_function(now)
    try:
        with refusing_exit():
            module = _load_file(source) if source.endswith(".py") else importlib.import_module(source)
    except SystemExit as error:  # such as a script without `if __name__ == "__main__"`
        raise ValueError(f"importing {source} ended the program ({described(error)})") from error
    except Exception as error:
        raise ValueError(f"importing {source} failed: {type(error).__name__}: {message_of(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key for key, f in inspect.getmembers(module, _is_named) if f.__module__ == module.__name__
        ]
        raise ValueError(f"{source} has no function {name!r}; it has: {', '.join(functions) or 'none'}")
    checked: Callable[..., Any] = function
    return checked


def spec_parts(spec: str) -> tuple[str, str]:
    """Return the module or file, and the function.

    Raises ValueError for a spec without both, and for a missing file.
    """
    source, _, name = spec.rpartition(":")
    name = name.strip()
    if not source or not name:
        raise ValueError("expected module:function or path/file.py:function")
    if not source.endswith(".py") and (os.sep in source or ":" in source or Path(source).suffix == ".ipynb"):
        script = Path(f"{source}.py")
        meant = f"{script}:{name}" if script.is_file() else "path/file.py:function"
        raise ValueError(f"{source} is neither a module nor a file that ends with .py: write {meant}")
    if source.endswith(".py") and source not in _contents and not Path(source).is_file():
        where = "" if Path(source).is_absolute() else f" in {Path.cwd()}"
        raise ValueError(f"there is no file {source}{where}")
    return source, name


def check_signature(
    function: Callable[..., Any], shown: str, arguments: int, options: Mapping[str, Any]
) -> None:
    """Raises ValueError if `function` cannot be called with this many arguments and these options."""
    try:
        inspect.signature(function).bind(*range(arguments), **options)
    except TypeError as error:
        raise ValueError(f"it is called as {shown} with options {dict(options)}: {error}") from None


class UserFunctionError(ValueError):
    """A user's function raised, or returned something unusable; one line says which function and where.

    An error of this package that passes through such a function, such as one of the engine, stays as it is.
    """


def call_function(where: str, spec: str, *arguments: Any, **options: Any) -> Any:
    """The value that the function returns. `where` is the configuration's key. Raises UserFunctionError."""
    try:
        with kept_directory(), refusing_exit():
            return load_function(spec)(*arguments, **options)
    except BaseException as error:  # a panic in a Rust library, such as polars, is not an Exception
        if isinstance(error, KeyboardInterrupt) or type(error).__module__.startswith(f"{_PACKAGE}."):
            raise
        raise UserFunctionError(f"{where}={spec}: {described(error)}") from error


def refused(where: str, spec: str, problem: str) -> UserFunctionError:
    """The error for a return value that cannot be used: it has the problem and the function's location."""
    code = getattr(inspect.unwrap(load_function(spec)), "__code__", None)
    location = "" if code is None else f" ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"
    return UserFunctionError(f"{where}={spec}: {problem}{location}")


def message_of(error: BaseException) -> str:
    """The text of an error that users' code raised. Its type may be the user's, and lack a text."""
    try:
        return str(error)
    except Exception:
        return "(its message cannot be shown)"


def described(error: BaseException) -> str:
    """The error that a function raised and its line, for readers who see only the message: one line.

    The line is the last one outside installed packages, which is the user's if there is one.
    """
    message = " ".join(message_of(error).split())
    text = f"{type(error).__name__}: {message[:MESSAGE]}{' ...' if len(message) > MESSAGE else ''}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    own = [f for f in frames if f.filename != __file__ and not f.filename.startswith(INSTALLED)]
    frame = (own or frames)[-1]
    return f"{text} ({os.path.basename(frame.filename)}, line {frame.lineno})"


@contextmanager
def kept_directory() -> Iterator[None]:
    """Restore the current directory after users' code, which may change it (`os.chdir`)."""
    before = os.getcwd()
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def refusing_exit() -> Iterator[None]:
    """Raise SystemExit if users' code ends this process in this thread; forked processes may end.

    Otherwise os._exit, C's exit through ctypes, or os.execv would end the command without a message, and with
    exit code 0 as if its work were done.
    """
    before, _called.process = getattr(_called, "process", None), os.getpid()
    os._exit = _exit_of_user
    _watch_exits()
    try:
        yield
    finally:
        _called.process = before


@cache  # Python never forgets a hook
def _watch_exits() -> None:
    """Refuse other ends of the process than os._exit, which Python announces to its audit hooks."""

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("os.exec", "ctypes.dlsym") or getattr(_called, "process", None) != os.getpid():
            return
        if event == "os.exec":
            raise SystemExit(f"os.exec of {arguments[0]}")
        if arguments[1] in _EXITS:
            raise SystemExit(f"{arguments[1]} of C")

    sys.addaudithook(refuse)


def _exit_of_user(status: int) -> NoReturn:
    if getattr(_called, "process", None) != os.getpid():
        _exit(status)
    raise SystemExit(f"os._exit({status})")


def forget_functions() -> None:
    """Let users' files be read again, because a notebook's next run may have changed them."""
    load_function.cache_clear()
    _load_file.cache_clear()


@cache  # once for all functions of a file, as Python imports a module: they share its state
def _load_file(source: str) -> ModuleType:
    path = Path(source).absolute()
    name = f"user_{path.stem}_{zlib.crc32(os.fsencode(path.parent)):08x}"  # files of one name may be several
    spec = importlib.util.spec_from_file_location(name, source)
    # Importlib returns a loader for every name that ends with .py.
    assert spec is not None and spec.loader is not None
    if (directory := str(path.parent)) not in sys.path:
        # The directory comes last on the path; the file may import modules beside it.
        sys.path.append(directory)
    check_helpers(path, {})
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses, among others, look up their module
    if source in _contents:
        exec(compile(_contents[source], source, "exec", dont_inherit=True), vars(module))
    else:
        spec.loader.exec_module(module)
    return module

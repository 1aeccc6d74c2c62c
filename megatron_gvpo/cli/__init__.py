"""The command line: one module a command; they share `terminal`, `configured` and `with_model`.

A command module has `add_parser(commands)`, which imports nothing heavy, and `run(options)`, which returns
the exit code.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from megatron_gvpo.cli import (
    check,
    convert,
    doctor,
    export,
    k8s,
    keys,
    mismatch,
    plan,
    recipes,
    rehearse,
    replay,
    report,
    runs,
    serve,
    sky,
    slurm,
    train,
    verify,
    watch,
)
from megatron_gvpo.cli import eval as evaluate
from megatron_gvpo.cli.terminal import PrintError, open_standard_streams, outliving_terminal, refuse
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.launch import report as report_to_launcher
from megatron_gvpo.core.native_exit import refusing_native_exit
from megatron_gvpo.core.redaction import hide
from megatron_gvpo.core.versions import own_version

COMMANDS = (
    train,
    check,
    evaluate,
    export,
    runs,
    report,
    watch,
    serve,
    recipes,
    keys,
    slurm,
    k8s,
    sky,
    plan,
    rehearse,
    convert,
    verify,
    replay,
    mismatch,
    doctor,
)

LEAVING = 60.0  # seconds that threads may take to end after the command
# The errors of Gloo and NCCL in a rank that waits for one that has ended.
_OF_COLLECTIVES = re.compile(r"/gloo/|nccl", re.IGNORECASE)
_LOST = re.compile(r"Connection (reset|closed) by peer|remote process exit")
_LATE = re.compile(r"Timed out waiting|timed? ?out", re.IGNORECASE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command as a process's only work; returns the exit code.

    An error that nothing else catches is printed with its traceback, without secrets. Where other ranks may
    wait for this one, it ends the process at once.
    """
    # A thread of OpenMP would spin while it waits for one that the scheduler has taken away: beside one busy
    # process a step took three times as long (docs/explanation/cpu_speed.md). torch reads it when loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with refusing_native_exit():
            code = run_command(arguments)
    except SystemExit:
        raise
    except BaseException as error:  # a panic in a Rust library, such as tokenizers, is not an Exception
        text = _lost_rank(error) or hide(traceback.format_exc())
        print(text, end="", file=sys.stderr, flush=True)
        code = 1
        if os.environ.get("WORLD_SIZE", "1") != "1":
            sys.stdout.flush()
            os._exit(code)  # libraries' exit handlers may wait for the other ranks
    if arguments is None:
        if code == 0:
            report_to_launcher(int(os.environ.get("RANK", "0")))
        _end_without_threads(code)
    return code


def _lost_rank(error: BaseException) -> str | None:
    """The line that replaces the traceback if another rank has ended or hangs; otherwise None."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    rank = os.environ.get("RANK", "0")
    if not _OF_COLLECTIVES.search(text):
        return None
    if _LOST.search(text):
        return f"error: rank {rank} has lost another rank, which ended: see its message, or the launcher's\n"
    if _LATE.search(text):
        return (
            f"error: rank {rank} waited in vain for another rank, which hangs or is much slower "
            f"(parallel.timeout_seconds, rounded up to minutes): {text.splitlines()[0]}\n"
        )
    return None


def _end_without_threads(code: int) -> None:
    """End the process after LEAVING seconds although threads that users' code or a library started never end.

    Python waits for them before it exits: a finished run would keep its GPUs. The exit handlers that come
    after the threads, such as those of tracking services, have as long as they need.
    """
    is_over = threading.Event()

    def end() -> None:
        if not is_over.wait(LEAVING):
            main_one = threading.main_thread()
            names = [t.name for t in threading.enumerate() if not t.daemon and t is not main_one]
            text = f"warning: the command is done; it ends without threads that still run: {', '.join(names)}"
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)
                sys.stdout.flush()
            os._exit(code)

    atexit.register(is_over.set)
    threading.Thread(target=end, daemon=True).start()


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Raises errors that a user cannot mend.

    0: done, or stopped by a signal after a checkpoint was saved; 1: a checkpoint or the records could not be
    written, a checkpoint could not be read, or no rollouts came; 2: wrong input; 128 + n: stopped by signal n
    (SIGTERM, SIGUSR1, SIGINT, SIGHUP) before training began, with nothing written.
    """
    open_standard_streams()
    try:
        _check_interpreter()
        with outliving_terminal(must_be_complete=True):
            options = parse(list(sys.argv[1:] if arguments is None else arguments))
            code: int = options.run(options)
    except ConfigError as error:
        return refuse(error)
    except PrintError as error:
        return refuse(error, code=1)
    except PermissionError as error:
        if error.filename is None:
            raise
        return refuse(ConfigError(f"{error.filename}: {error.strerror} (as user {os.geteuid()})"))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if (problem := _failed_import(error)) is None:
            raise
        return refuse(ConfigError(problem))
    return code


def _failed_import(error: Exception) -> str | None:
    """A message about a library that raised `error` while it was imported; None for any other error.

    Libraries read environment variables then, and raise errors of any type for values that they do not know.
    """
    packages = Path(sysconfig.get_path("purelib"))
    for cause in (error, error.__cause__):
        frames = traceback.extract_tb(cause.__traceback__) if cause is not None else []
        imported = [f for f in frames if f.name == "<module>" and packages in Path(f.filename).parents]
        if imported:
            library = Path(imported[0].filename).relative_to(packages).parts[0]
            last = imported[-1]
            return (
                f"importing {library} failed: {type(cause).__name__}: {cause} ({last.filename}, line "
                f"{last.lineno}: {last.line}): correct or unset the environment variable that it reads "
                "there; if it reads none, the installation is damaged"
            )
    return None


def _check_interpreter() -> None:
    """Raises ConfigError for options of Python under which the libraries cannot be imported."""
    if sys.flags.optimize >= 2:
        raise ConfigError("PYTHONOPTIMIZE=2 (python -OO) removes docstrings, which libraries need: unset it")
    if any(re.fullmatch("error:*", option) for option in sys.warnoptions):
        raise ConfigError(
            "PYTHONWARNINGS=error (python -W error): libraries warn when they are imported, and would fail: "
            "unset it, or name a category, as in error::RuntimeWarning"
        )


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of a command line; `command_line` among them holds the arguments themselves.

    Overrides may also follow options, although argparse takes only one unbroken run of positional arguments.
    """
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments, argparse.Namespace(command_line=arguments))
    settings = next((name for name in ("config", "overrides") if name in options), None)
    if rest and (settings is None or any(word.startswith("-") for word in rest)):
        [commands] = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        command = commands.choices[options.command]
        known = [option for option in command._option_string_actions if option.startswith("--")]
        more = _as_options(rest, known) or _as_settings(rest)
        command.error(f"unrecognized arguments: {' '.join(rest)}{more}")
    if rest and settings is not None:
        getattr(options, settings).extend(rest)
    return options


def _as_settings(words: list[str]) -> str:
    """Return the end of the error for settings that are written as options, such as `--optimizer.lr=1e-5`."""
    settings = [word.lstrip("-") for word in words if re.match(r"--[a-z]\w*(\.\w+)*=", word)]
    return f"; a setting has no dashes: {' '.join(settings)}" if settings else ""


def _as_options(words: list[str], known: list[str]) -> str:
    """Return the end of the error for a misspelt option: the nearest one that the command has."""
    options = (word.partition("=")[0] for word in words if word.startswith("--"))
    near = (match for option in options for match in difflib.get_close_matches(option, known, 1, 0.75))
    return f"; did you mean {nearest}?" if (nearest := next(near, None)) is not None else ""


class _Version(argparse.Action):
    """Looks up the commit only when the option is used, because git takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"megatron-gvpo {own_version()}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Refuses words in one line, as a configuration is refused, without the usage that --help shows.

    Its error for an option that takes no value but got one, such as `--resume=yes`, names the right forms.
    Options have no short forms: `--o` would be `--overwrite`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        match = re.fullmatch(r"argument (\S+): ignored explicit argument (.*)", message)
        if match is not None:
            option, value = match.groups()
            forms = [form for form in self._option_string_actions if form.partition("=")[0] == option]
            message = f"argument {option}: {value} is not a value of it; there is {' and '.join(forms)}"
        if match := re.fullmatch(r"argument (--sbatch): expected one argument", message):
            message += f"; an option of sbatch comes after a sign of equality: {match[1]}=--time=1:00:00"
        self.exit(2, f"error: {message} ({self.prog} --help shows all options)\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megatron-gvpo", description="RL post-training of Megatron models with GVPO, GPG and relatives."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and its commit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser

"""The command line: one module a command; they share `terminal`, `configured` and `with_model`.

A command module has `add_parser(commands)`, which imports nothing heavy, and `run(options)`, which returns
the exit code.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0: done, or stopped by a signal after a checkpoint was saved; 1: a checkpoint or the records could not be
    written, a checkpoint could not be read, or no rollouts came; 2: wrong input; 128 + n: stopped by signal n
    (SIGTERM, SIGUSR1, SIGINT, SIGHUP) before training began, with nothing written.
    """
    open_standard_streams()
    try:
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
    return code


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options of a command line; `command_line` among them holds the arguments themselves.

    Overrides may also follow options, although argparse takes only one unbroken run of positional arguments.
    """
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments, argparse.Namespace(command_line=arguments))
    if rest and ("config" not in options or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.config += rest
    return options


class _Version(argparse.Action):
    """Asks for the commit when the option is given: git takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"megatron-gvpo {own_version()}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Says of an option that got a value and takes none, such as `--resume=yes`, which forms there are.

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
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megatron-gvpo", description="RL post-training of Megatron models with GVPO, GPG and relatives."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and its commit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    return parser

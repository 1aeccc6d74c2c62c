"""The arguments that name a configuration, shared by the commands that take one."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from typing import TYPE_CHECKING

from megatron_gvpo.core.environment import check_rank_variables
from megatron_gvpo.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config

MOST_PROCESSES = 1024  # ranks on one machine


RANKS = "start N ranks on this machine (default: 1; torchrun works, too)"


def add_config(parser: argparse.ArgumentParser, example: str, nargs: str = "+") -> None:
    """Adds the configuration; `example`: a value in the help."""
    parser.add_argument(
        "config",
        nargs=nargs,
        metavar="CONFIG.yaml | key.sub=value",
        help=f"configuration files, of which later ones win, and single values such as {example}",
    )


def add_arguments(parser: argparse.ArgumentParser, ranks: str = RANKS) -> None:
    """Adds the configuration and --nproc; `ranks`: the help of --nproc, SUPPRESS where it is refused."""
    add_config(parser, "optimizer.lr=1e-5, which win over files")
    parser.add_argument(
        "--nproc",
        type=_processes,
        default=0,
        metavar="N",
        help=ranks,
    )


def add_allow_change(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="with --resume: this key, or a section, may differ from the run's (optimizer.lr); repeatable",
    )


def add_step(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument("--step", type=_step, metavar="N", help=meaning)


def recorded_step(options: argparse.Namespace) -> int:
    """The step of RUN that --step names, or the last recorded one. Raises ConfigError if it has no record."""
    from megatron_gvpo.observe.step_records import chosen_step

    try:
        return chosen_step(options.run_directory, options.step)
    except DataError as error:
        raise ConfigError(str(error)) from None


def check_step(config: Config, options: argparse.Namespace) -> None:
    """Raises ConfigError, which lists the steps, for a --step of which the run has no checkpoint."""
    from megatron_gvpo.runs.existing_run import check_step

    if options.step is not None:
        check_step(config.output_dir, options.step)


def load(options: argparse.Namespace) -> Config:
    """The configuration that the arguments name. Raises ConfigError."""
    from megatron_gvpo.cli.terminal import say
    from megatron_gvpo.core.redaction import SHORTEST
    from megatron_gvpo.core.secrets import literal_secrets, short_secrets
    from megatron_gvpo.settings.config import load_config, split_words

    files, overrides = split_words(options.config)
    if not files:
        raise ConfigError("no configuration file given: megatron-gvpo train CONFIG.yaml [key.sub=value ...]")
    config = load_config(files, overrides)
    if (shown := literal_secrets(config.model_dump())) and not is_launcher(options):
        say(
            f"note: {', '.join(shown)}: a secret in a configuration file, redacted in all that is written; "
            "give `{env: NAME}` there, and the secret in the environment variable NAME",
            sys.stderr,
        )
    if (short := short_secrets()) and not is_launcher(options):
        say(
            f"note: {', '.join(short)}: a secret of fewer than {SHORTEST} characters is not hidden "
            "inside texts, such as a reward's errors",
            sys.stderr,
        )
    return config


def world_size(options: argparse.Namespace) -> int:
    """The number of ranks: torchrun's, or --nproc.

    Raises ConfigError for variables of another job, and for more processes than this machine has memory for.
    """
    from megatron_gvpo.training.ranks import check_ranks

    check_rank_variables(options.nproc)
    if is_launcher(options):
        check_ranks(options.nproc)
    return int(os.environ.get("WORLD_SIZE", options.nproc or 1))


def is_launcher(options: argparse.Namespace) -> bool:
    """True in the process that starts the ranks and is not one itself."""
    return options.nproc > 1 and "WORLD_SIZE" not in os.environ


def directory(text: str) -> str:
    """The name of a directory to write. Raises ArgumentTypeError for none, and for one with control codes."""
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected the name of a directory")
    return text


def integer(text: str) -> int:
    """An option's number. Python's `int` would take 1_0, blanks and the digits of all scripts."""
    if not re.fullmatch("-?[0-9]{1,40}", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a whole number")
    return int(text)


def decimal(text: str) -> float:
    """An option's finite number. Raises ArgumentTypeError for another text."""
    is_decimal = re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,3})?", text) is not None
    if not is_decimal or math.isinf(float(text)):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected a number")
    return float(text)


def _step(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: expected the number of a step")
    return int(text)


def _processes(text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MOST_PROCESSES:
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r}: expected a number of processes of this machine, from 1 to {MOST_PROCESSES}"
        )
    return int(text)

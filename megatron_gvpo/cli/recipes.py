"""`megatron-gvpo recipes`: list the methods, or show one's composition."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_gvpo.cli.terminal import loading
from megatron_gvpo.core.errors import ConfigError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("recipes", help="list the methods, or show the blocks of one")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the list as JSON")
    form.add_argument(
        "--markdown", action="store_true", help="print the list as a page of Markdown, with every block"
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="[show] NAME",
        help="print one recipe with every effective value, instead of the list",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the list in one of its forms, or one recipe as YAML. Raises ConfigError."""
    print(_text(options), end="")
    return 0


def _text(options: argparse.Namespace) -> str:
    from megatron_gvpo.algorithms import catalog

    if options.names:
        names = options.names[options.names[0] == "show" :]
        if len(names) != 1:
            raise ConfigError(f"recipes {' '.join(options.names)}: give the name of one recipe")
        if options.json or options.markdown:
            raise ConfigError("--json and --markdown are forms of the list; show NAME prints YAML")
        try:
            with loading("the methods"):
                return catalog.show(names[0])
        except ValueError as error:
            raise ConfigError(str(error)) from None
    if options.markdown:
        with loading("the methods"):
            return catalog.markdown()
    return (catalog.as_json() if options.json else catalog.as_text()) + "\n"

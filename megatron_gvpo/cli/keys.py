"""`megatron-gvpo keys`: prints all keys of a configuration, or the keys about a word."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_gvpo.cli.terminal import loading


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "keys",
        help="list a configuration's keys, or search them",
        description="With words: the keys that have them in their name, type or meaning, and what another "
        "trainer's key of that name is called here, or that it is not supported.",
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="parts of a name, type or meaning")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the keys that fit the words; the exit status is 1 if there are none."""
    with loading("the keys"):
        from megatron_gvpo.settings.reference import search
    words = " ".join(options.words)
    lines = list(search(words))
    print("\n".join(lines) if lines else f"nothing about {words!r}: try another word, or a part of one")
    return 0 if lines else 1

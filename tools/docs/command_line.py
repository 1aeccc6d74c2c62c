"""The command-line reference, from the argparse parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from unittest.mock import patch

from megatron_gvpo.cli import build_parser


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Return the parsers of every command and of its subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from commands(command)


def page() -> str:
    with patch.dict("os.environ", {"COLUMNS": "100", "NO_COLOR": "1"}):
        parser = build_parser()
        parts = [_HEAD, _text(parser)]
        for command in commands(parser):
            parts += [f"## {command.prog}", _text(command)]
    parts.append(_CODES)
    return "\n\n".join(parts) + "\n"


def _text(parser: argparse.ArgumentParser) -> str:
    return f"```text\n{parser.format_help().strip()}\n```"


_HEAD = """# Command line

Generated from the argument parser in `megatron_gvpo/cli/`. `python -m megatron_gvpo` is the same program."""

_CODES = """## Exit codes

| code | meaning |
|---|---|
| 0 | done; or stopped by SIGTERM or SIGUSR1, and a checkpoint was saved |
| 1 | a checkpoint or the records could not be written, a checkpoint could not be read, or no rollouts came |
| 2 | wrong input; one line on stderr names the file, line or key |
| 143, 138 | stopped by SIGTERM, by SIGUSR1 before training began; nothing was written |"""

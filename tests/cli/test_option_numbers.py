"""The numbers of all options of all commands are written as people write them, or are refused."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from megatron_gvpo.cli import build_parser, main


def options_with_numbers() -> Iterator[tuple[str, argparse.Action]]:
    """Each command with each of its options that takes a number."""
    parser = build_parser()
    [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for name, command in commands.choices.items():
        for action in command._actions:
            if action.type is not None and action.metavar in ("N", "GIB", "SECONDS", "FRACTION", "TOKENS"):
                yield name, action


NUMBERS = [pytest.param(n, a, id=f"{n}{a.option_strings[0]}") for n, a in options_with_numbers()]


def test_there_are_such_options() -> None:
    assert len(NUMBERS) > 25


@pytest.mark.parametrize(("command", "action"), NUMBERS)
def test_a_number_that_people_do_not_write_is_refused(command: str, action: argparse.Action) -> None:
    assert callable(action.type)
    for text in ("0x1", "1_0", " 1", "1e", "nan", "inf", "1e999", "\u0661", "\uff11", "", "9" * 400):
        with pytest.raises(argparse.ArgumentTypeError, match="expected"):
            action.type(text)


def test_a_step_before_the_first_is_not_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """It was looked for in a file called step_-00001."""
    for command in ("replay", "mismatch"):
        with pytest.raises(SystemExit) as ended:
            main([command, "runs/x", "--step", "-1"])
        assert ended.value.code == 2
        assert "argument --step: '-1': expected the number of a step" in capsys.readouterr().err

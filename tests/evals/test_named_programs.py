"""HumanEval's programs in the real sandbox: the package's 164 solutions, wrong ones, and ones that cheat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.inputs.named_data import Bytes, MadeUpAnswers
from helpers.machine.debian import install
from helpers.suite.real_parts import used

from megatron_gvpo.evals.catalog import EVALUATIONS
from megatron_gvpo.evals.documents import load_documents
from megatron_gvpo.evals.measure import Measured, measure
from megatron_gvpo.evals.policy_lm import PolicyLM
from megatron_gvpo.evals.programs import passes

HUMANEVAL = EVALUATIONS["humaneval"]
PROBLEM = "def one():\n"
TESTS = "def check(candidate):\n    assert candidate() == 1\ncheck(one)"


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> Iterator[None]:
    install(["bwrap"], ["bubblewrap"])
    used("bubblewrap")
    yield


@pytest.fixture(scope="module")
def problems() -> list[dict[str, Any]]:
    return load_documents(HUMANEVAL, None, None)["test"]


def scored(
    problems: list[dict[str, Any]], *turns: dict[str, str], chat: bool
) -> tuple[Measured, MadeUpAnswers]:
    """`turns`: by the problem's prompt, the answer."""
    used("lm-eval")
    made_up = MadeUpAnswers(
        *(
            lambda text, turn=turn: next(a for p, a in turn.items() if text.rstrip().endswith(p.rstrip()))
            for turn in turns
        )
    )
    lm = PolicyLM("humaneval", made_up, Bytes(), chat, None)
    result, _ = measure(HUMANEVAL, {"test": problems}, lm, chat=chat, n=len(turns))
    return result, made_up


def test_the_packages_solutions_pass_and_others_do_not(problems):
    """pass@1 of all 164 is 1, and 0 for functions that return nothing."""
    assert len(problems) == 164
    right = {p["prompt"]: p["canonical_solution"] for p in problems}
    wrong = {p["prompt"]: "    return None\n" for p in problems}
    result, answers = scored(problems, right, chat=False)
    assert (result.metrics["pass@1,create_test"], result.problems) == (1.0, 164)
    assert answers.prompts == [p["prompt"] for p in problems] and "\ndef" in answers.until
    assert scored(problems, wrong, chat=False)[0].metrics["pass@1,create_test"] == 0.0


def test_answers_in_a_chat_end_with_their_code_block(problems):
    some = problems[:3]
    right = {p["prompt"]: f"{p['canonical_solution']}```\nThis is right." for p in some}
    result, answers = scored(some, right, {p["prompt"]: "    pass\n```" for p in some}, chat=True)
    assert result.metrics == {"pass@1,create_test": 0.5} and result.task == "humaneval_instruct"
    assert all(text.startswith("<user>Write a solution") for text in answers.prompts)
    assert all("</user><assistant>Here is the completed function:\n```python\n" in t for t in answers.prompts)


@pytest.mark.parametrize(
    ("body", "is_right"),
    [
        ("    return 1\n", True),
        ("    print('x' * 10**6)\n    return 1\n", True),
        ("    return 2\n", False),
        ("    return 1\nraise SystemExit(0)\n", False),
        ("    return 1\nimport os\nos._exit(0)\n", False),
        ("    return 1\n)\n", False),
        ("    while True: pass\n", False),
    ],
)
def test_only_a_program_that_runs_to_its_end_passes(body, is_right):
    assert passes([f"{PROBLEM}{body}\n{TESTS}"]) == [is_right]


def test_programs_see_no_files_of_this_machine(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("1")
    assert passes([f"{PROBLEM}    return int(open({str(secret)!r}).read())\n{TESTS}"]) == [False]

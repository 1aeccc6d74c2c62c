"""examples/calculator: its environment answers right, its files fit together, and its run trains."""

from __future__ import annotations

import runpy
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from helpers import examples
from helpers.machine.chromium import browser
from helpers.paths import ROOT
from helpers.suite.real_parts import used

from megatron_gvpo import cli
from megatron_gvpo.conversations import Reply
from megatron_gvpo.groups import Prompt
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.observe import read_metrics
from megatron_gvpo.observe.rollouts.reader import read_rollouts

EXAMPLE = ROOT / "examples" / "calculator"


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        ("(47*86)", Reply("[4042]", counts={"calls": 1})),
        ("so (4-12)", Reply("[-8]", counts={"calls": 1})),
        ("(4/2)", Reply("[E]", counts={"calls": 1, "bad_calls": 1})),
        ("(9*99999999)", Reply("[E]", counts={"calls": 1, "bad_calls": 1})),
        ("{4150}", Reply(None, 1.0)),
        ("{4151}", Reply(None, 0.0)),
        ("", Reply(None, 0.0)),
    ],
)
def test_the_calculator_answers(text: str, reply: Reply) -> None:
    made = runpy.run_path(str(EXAMPLE / "environment.py"))["Calculator"]()
    made.reset(Prompt("p", (1,), "47*86+12*9=", "4150"), seed=0)
    assert made.step(text) == reply


@pytest.mark.usefixtures("leave_the_process_group")
def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = examples.make_task("calculator", tmp_path, monkeypatch)
    [stop] = yaml.safe_load((EXAMPLE / "gvpo.yaml").read_text())["rollout"]["stop_token_ids"]
    assert load_tokenizer(str(task / "model")).convert_ids_to_tokens(stop) == ")"
    out = examples.train("calculator")
    used("environment workers")
    assert all(step["env/turns"] > 1 for step in read_metrics(out / "metrics.jsonl")[1:])
    files_have_the_conversations(out)
    report_shows_the_conversations(out, tmp_path)


def files_have_the_conversations(out: Path) -> None:
    for talk in read_rollouts(out).to_pylist():
        turns, texts = talk["turns"], [m["content"] for m in talk["messages"] if m["role"] == "assistant"]
        assert sum(turn["tokens"] for turn in turns) == talk["response_tokens"]
        assert [turn["text"] for turn in turns] == texts
        paid = [turn["reward"] for turn in turns if turn["reward"] is not None]
        assert sum(paid) == talk["reward"] == talk["rewards"]["environment"]
        for before, turn in pairwise(turns):
            assert before["text"].endswith(")"), "the calculator answers calls"
            assert turn["given"].startswith("[") and len(turn["given_ids"]) == len(turn["given"])


def report_shows_the_conversations(out: Path, base: Path) -> None:
    assert cli.main(["report", str(out)]) == 0
    talks = read_rollouts(out, steps=[2]).to_pylist()
    longest = max(talks, key=lambda talk: len(talk["turns"]))
    with browser(base) as page:
        page.open((base / out / "report.html").as_uri())
        charts = page.look("[...document.querySelectorAll('.chart .name b')].map(name => name.textContent)")
        assert {"env/turns", "env/calls", "env/environment_reward"} <= set(charts)
        page.look("Object.assign(browser, { unit: 'responses', sort: 'most turns first' }), view('samples')")
        card = "document.querySelector('.card.chosen')"
        page.wait(f"Boolean({card})", "the conversation with the most turns")
        turns = page.look(f"[...{card}.querySelectorAll('.turn')].map(turn => turn.innerText)")
        assert len(turns) == len(longest["turns"]) > 1
        observations = page.look(
            f"[...{card}.querySelectorAll('.given')].map(given => given.lastChild.textContent)"
        )
        candidates = [[turn["given"] for turn in talk["turns"][1:]] for talk in talks]
        assert observations in candidates
        assert all("turn" in turn and "token" in turn for turn in turns)
        own = page.look(f"{card}.querySelectorAll('.turn .text [data-i]').length")
        assert own == page.look("item(0, entries[selected].at).tokens"), "every own token, and no other"
        assert page.console == []

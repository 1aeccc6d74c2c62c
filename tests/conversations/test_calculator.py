"""examples/calculator: its environment answers right, its files fit together, and its run trains."""

from __future__ import annotations

import runpy
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
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
    ("said", "reply"),
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
def test_the_calculator_answers(said: str, reply: Reply) -> None:
    made = runpy.run_path(str(EXAMPLE / "environment.py"))["Calculator"]()
    made.reset(Prompt("p", (1,), "47*86+12*9=", "4150"), seed=0)
    assert made.step(said) == reply


@pytest.mark.usefixtures("leave_the_process_group")
def test_the_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["make_task.py", "--out", "runs/calculator/task"])
    runpy.run_path(str(EXAMPLE / "make_task.py"), run_name="__main__")
    [stop] = yaml.safe_load((EXAMPLE / "gvpo.yaml").read_text())["rollout"]["stop_token_ids"]
    assert load_tokenizer("runs/calculator/task/model").convert_ids_to_tokens(stop) == ")"
    few = ("train.prompts_per_step=8", "data.train.limit=64", "logging.progress=off")
    cpu = "examples/cpu.yaml"
    sft = ("train", "examples/calculator/sft.yaml", cpu, *few, "train.steps=2", "optimizer.warmup_steps=1")
    assert cli.main(list(sft)) == 0
    own = ("train.steps=2", "data.eval.limit=4", "optimizer.warmup_steps=1", "checkpoint.export_hf=false")
    # Like run.py, which trains into a directory that holds the task and the warm start.
    gvpo = ("train", "--overwrite", "examples/calculator/gvpo.yaml", cpu, *few, *own)
    assert cli.main(list(gvpo)) == 0
    used("environment workers")
    first, *steps = read_metrics(Path("runs/calculator/metrics.jsonl"))
    assert first["eval/pass@1"] <= 1 and len(steps) == 2
    assert all(step["env/turns"] > 1 and step["env/lost"] == 0 for step in steps)
    files_have_the_conversations(Path("runs/calculator"))
    report_shows_the_conversations(Path("runs/calculator"), tmp_path)


def files_have_the_conversations(out: Path) -> None:
    for talk in read_rollouts(out).to_pylist():
        turns, said = talk["turns"], [m["content"] for m in talk["messages"] if m["role"] == "assistant"]
        assert sum(turn["tokens"] for turn in turns) == talk["response_tokens"]
        assert [turn["text"] for turn in turns] == said
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
        given = page.look(f"[...{card}.querySelectorAll('.given')].map(given => given.lastChild.textContent)")
        candidates = [[turn["given"] for turn in talk["turns"][1:]] for talk in talks]
        assert given in candidates
        assert all("turn" in turn and "token" in turn for turn in turns)
        own = page.look(f"{card}.querySelectorAll('.turn .text [data-i]').length")
        assert own == page.look("item(0, entries[selected].at).tokens"), "every own token, and no other"
        assert page.console == []

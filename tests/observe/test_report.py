"""The report's page, in a real Chromium, and the numbers that are computed for it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.inputs.made_run import HOSTILE, make_run, make_tokenizer
from helpers.machine.chromium import Page, browser
from scipy.stats import binomtest

from megatron_gvpo.cli import main
from megatron_gvpo.observe.report import Reporter
from megatron_gvpo.observe.report.samples import chosen, interval, pass_intervals
from megatron_gvpo.observe.report.token_texts import TokenTexts
from megatron_gvpo.replay.certificate import Cause, Certificate, Token


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("runs")
    changed = {"optimizer": {"lr": 3e-4}}
    first = make_run(base / "first", steps=6, texts=HOSTILE, config={"optimizer": {"lr": 1e-4}})
    return [first, make_run(base / "second", steps=4, seed=1, config=changed)]


@pytest.fixture(scope="module")
def report(runs: list[Path]) -> str:
    file = runs[0].parent / "report.html"
    assert main(["report", *map(str, runs), "--out", str(file)]) == 0
    return f"file://{file}"


def text(page: Page, selector: str) -> str:
    return str(page.look(f"document.querySelector({selector!r}).innerText"))


def show_samples(page: Page) -> None:
    page.look("view('samples')")
    page.wait("document.querySelectorAll('.card').length", "the responses of a group")


def pick(page: Page, name: str, value: str) -> None:
    select = f"document.getElementById('choose-{name}')"
    page.look(f"{select}.value = {value!r}; {select}.dispatchEvent(new Event('change'))")


def rewards(page: Page) -> list[float]:
    return list(page.look("entries.map(entry => entry.reward)"))


# --- the page ---


def test_hostile_responses_are_text(page: Page, report: str):
    page.open(report)
    show_samples(page)
    shown = page.look("[...document.querySelectorAll('.card .text')].map(card => card.textContent)")
    for hostile in HOSTILE[:3]:
        assert any(hostile in card for card in shown), hostile
    assert any("‹202e›" in card and "‹00›" in card for card in shown)
    assert "owned" not in page.look("document.title")
    assert page.look("document.querySelectorAll('img, iframe, a[href]').length") == 0
    assert page.console == []


def test_the_page_reaches_no_network(page: Page, report: str):
    page.open(report)
    show_samples(page)
    assert page.requests == []
    tries = (
        "fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')",
        "new Promise(end => { const image = new Image(); image.onload = () => end('sent');"
        "image.onerror = () => end('refused'); image.src = 'http://127.0.0.1:9/x.png'; })",
    )
    for script in tries:
        assert page.look(script) == "refused"
    refused = [line for line in page.console if "Content Security Policy" in line]
    assert len(refused) >= len(tries), page.console
    # A script that got into the page would not run.
    made = "Object.assign(document.createElement('script'), {text: 'window.ran = 1'})"
    page.look(f"void document.body.append({made})")
    assert page.look("window.ran") is None


def test_only_the_index_is_read_at_first(page: Page, report: str):
    page.open(report)
    assert page.look("[...recent.keys()].join()") == "index"
    first = page.look("[...document.scripts].map(script => script.dataset.name ?? 'code').slice(0, 2)")
    assert first == ["index", "code"], "the page is shown before the browser has read the responses"
    assert page.look("charts.size < document.querySelectorAll('.chart').length")


def test_curves_have_words_units_intervals_and_a_keyboard(page: Page, report: str):
    page.open(report)
    assert page.look("document.title").startswith("first, second")
    names = page.look("[...document.querySelectorAll('.chart .name b')].map(name => name.textContent)")
    assert names[:2] == ["reward/mean", "eval/pass@1"] and "phases of a step" in names
    length = "[...document.querySelectorAll('.chart')].find(c => c.textContent.startsWith('response/length'))"
    assert "tokens Mean length of the responses." in page.look(f"{length}.textContent")
    row = text(page, ".glance tbody tr")
    assert re.search(r"6 of 6.*→ \d\d %.*\d+–\d+ %", row.replace("\n", " ").replace("\t", " ")), row
    page.look(f"{length}.focus()")
    page.wait(f"charts.get({length})", "the chart")
    page.key("ArrowRight")
    page.key("ArrowRight")
    assert "step 2" in page.wait(f"{length}.querySelector('.at')?.textContent", "the values of a step")


def test_alerts_are_said_at_the_top(page: Page, tmp_path: Path):
    run, hostile = make_run(tmp_path / "run", steps=12), "<img src=x onerror=alert(1)>"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({**r, f"reward/{hostile}": 1.0, "reward/groups_with_signal": 0.0}) for r in records]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["report", str(run)]) == 0
    page.open(f"file://{run}/report.html")
    alerts = text(page, ".alerts")
    assert "2 alerts" in alerts and "step 9" in alerts and f"The reward component {hostile} gave 1" in alerts
    assert "step 4" in alerts and "Look at reward/mean" in alerts
    assert page.look("document.querySelectorAll('img').length") == 0


def test_the_certificate_of_the_mismatch_is_shown(page: Page, tmp_path: Path):
    """With what a model wrote as text; a damaged file is left out."""
    run, hostile = make_run(tmp_path / "run", steps=3), "<img src=x onerror=alert(1)>"
    (run / "mismatch.json").write_text('{"step": 3')
    assert main(["report", str(run)]) == 0
    page.open(f"file://{run}/report.html")
    assert page.look("document.querySelectorAll('.mismatch').length") == 0
    token = Token(4, 2, hostile, -1.25, -0.75, -0.5, "engine: stale weights")
    cause = Cause("engine", "stale weights", "those of step 1", 80, 8, 0.875, 0.25, 0.5)
    Certificate(3, "float32", 80, 0.25, 0.5, 0.03, [cause], [token]).write(run / "mismatch.json")
    assert main(["report", str(run)]) == 0
    page.open(f"file://{run}/report.html")
    shown = text(page, ".mismatch")
    assert "Mismatch of engine and trainer in step 3" in shown
    assert "stale weights" in shown and "87.5 %" in shown and "those of step 1" in shown
    worst = page.look("document.querySelector('.mismatch details').textContent")
    assert hostile in worst and "response 4, token 2" in worst
    assert page.look("document.querySelectorAll('img').length") == 0


def test_a_run_can_be_hidden(page: Page, report: str):
    page.open(report)
    first = "document.querySelector('.chart')"
    page.wait(f"charts.get({first})", "the first chart")
    page.look("document.querySelectorAll('.run')[0].click()")
    page.wait(f"charts.get({first})?.series.length === 2", "a chart of one run")
    assert page.look("document.querySelectorAll('.run')[0].getAttribute('aria-pressed')") == "false"


def test_samples_are_sorted_searched_coloured_and_walked_by_keys(page: Page, report: str):
    page.open(report)
    page.key("2")
    page.wait("document.querySelectorAll('.card').length", "the responses")
    pick(page, "unit", "responses")
    for order, sign in {"best reward first": -1, "worst reward first": 1}.items():
        pick(page, "sort", order)
        page.wait(f"browser.sort === {order!r}", order)
        assert rewards(page) == sorted(rewards(page), key=lambda value: sign * value)
    page.key("j")
    assert page.look("document.querySelector('[aria-selected=true][role=option]').id") == "entry-1"
    before = page.look("document.getElementById('step-name').textContent")
    page.key("[")
    assert page.look("document.getElementById('step-name').textContent") != before
    for colour, wanted in {"gap": "up", "weight": "up", "advantage": "down", "none": ""}.items():
        pick(page, "colour", colour)
        page.wait("document.querySelectorAll('.card').length", "the responses")
        has_class = f"Boolean(document.querySelector('.card [class^={wanted or 'up'}]'))"
        page.wait(f"{has_class} === {str(bool(wanted)).lower()}", colour)
    page.key("/")
    page.look("document.getElementById('all').click()")
    search = "document.getElementById('search')"
    page.look(f"{search}.value = 'onerror'; {search}.dispatchEvent(new Event('input'))")
    page.wait("document.getElementById('count').textContent.startsWith('6 responses')", "one hit a step")
    pick(page, "colour", "surprise")
    page.wait("Boolean(document.querySelector('.hit'))", "the marked text")


def test_configurations_show_their_differences(page: Page, report: str):
    page.open(report)
    page.key("3")
    keys = "[...document.querySelectorAll('.config')][0].querySelectorAll('tbody th')"
    names = page.look(f"[...{keys}].map(key => key.textContent)")
    assert names == ["optimizer.lr", "output_dir", "train.seed", "train.steps"]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_no_view_is_wider_than_the_screen(page: Page, report: str, width: int, dark: bool):
    page.screen(width, 800, dark)
    try:
        page.open(report)
        background = page.look("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(255, 255, 255)") is not dark
        for view in ("curves", "samples", "config"):
            page.look(f"view({view!r})")
            if view == "samples":
                page.wait("document.querySelectorAll('.card').length", "the responses of a group")
            assert page.look("document.documentElement.scrollWidth") <= width, view
    finally:
        page.screen(1280, 900)


def test_a_real_run_without_saved_responses(page: Page, finished: Path, tmp_path: Path):
    file = tmp_path / "real.html"
    assert main(["report", str(finished), "--out", str(file), "--responses", "0"]) == 0
    page.open(f"file://{file}")
    assert page.look("document.querySelectorAll('.chart').length") > 8
    assert page.console == []


# --- the numbers ---


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", '{"starts": 5}'),
        ("run.json", '{"starts": null}'),
        ("run.json", "[" * 5_000),
        ("config.yaml", "[" * 5_000),
        ("config.yaml", "a: \x00"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    run = make_run(tmp_path / "run", steps=1)
    (run / name).write_text(content)
    assert main(["report", str(run)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(run / name) in line


def test_no_run_is_refused_in_a_line(tmp_path: Path, runs: list[Path], capsys: pytest.CaptureFixture[str]):
    def refused(*arguments: str) -> str:
        assert main(["report", *arguments]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert f"{tmp_path / 'none'}: no run there" in refused(str(tmp_path / "none"))
    assert "is given twice" in refused(str(runs[0]), str(runs[0]))
    assert "--responses -1" in refused(str(runs[0]), "--responses", "-1")
    broken = make_run(tmp_path / "broken", steps=1)
    (broken / "rollouts/step_000001.parquet").write_bytes(b"PAR1")
    assert "step_000001.parquet: not a file of rollouts" in refused(str(broken))


@pytest.mark.parametrize("unknown", ["", "12 → 😀", "e\u0301 ∑ 漢字 \ud7ff", "\x00\n\t", "𝕏" * 5])
def test_pieces_are_the_text(tmp_path: Path, unknown: str):
    tokenizer = make_tokenizer(tmp_path)
    pieces = TokenTexts(tokenizer)
    ids = [*tokenizer.encode(unknown).ids, 0]
    texts = pieces.split(ids)
    assert len(texts) == len(ids) and "".join(texts) == unknown + "<|end|>"


def test_a_cut_character_stays_in_the_last_piece(tmp_path: Path):
    tokenizer = make_tokenizer(tmp_path)
    ids = tokenizer.encode("ab 😀").ids[:-1]
    assert "".join(TokenTexts(tokenizer).split(ids)).startswith("ab ")


def test_steps_are_chosen_evenly_within_the_number():
    sizes = {("train", step): (4, 30) for step in range(1, 21)} | {
        ("eval", step): (4, 30) for step in range(5)
    }
    assert chosen(sizes, 1000) == list(sizes)
    some = chosen(sizes, 52)
    steps = [step for kind, step in some if kind == "train"]
    assert 11 <= len(some) <= 13 and steps[0] == 1 and steps[-1] == 20
    gaps = [b - a for a, b in pairwise(steps)]
    assert max(gaps) - min(gaps) <= 1
    assert len(chosen(sizes, 0)) == 4


def test_large_evaluations_leave_room_for_training_steps():
    """The quickstart's numbers: 100 steps of 512 responses, 6 evaluations of 2048."""
    train = {("train", step): (512, 512 * 30) for step in range(1, 101)}
    evaluations = {("eval", step): (2048, 2048 * 30) for step in range(0, 101, 20)}
    some = chosen(train | evaluations, 10_000)
    assert [step for kind, step in some if kind == "eval"] == [0, 100]
    assert len(some) == 2 + (10_000 - 2 * 2048) // 512
    assert chosen(evaluations, 10_000) == [("eval", step) for step in (0, 40, 60, 100)]


@pytest.mark.parametrize(("right", "count"), [(0, 7), (3, 7), (50, 100), (99, 100)])
def test_with_one_sample_a_prompt_the_interval_is_wilsons(right: int, count: int):
    reference = binomtest(right, count).proportion_ci(0.95, method="wilson")
    bounds = interval([1.0] * right + [0.0] * (count - right))
    assert bounds == pytest.approx((reference.low, reference.high), abs=1e-4)


def test_intervals_cover_the_mean_of_correlated_samples():
    """Prompts are easy or hard, so the samples of one are alike; 95 % of the intervals hold the mean."""
    draw = random.Random(0)
    hits = 0
    for _ in range(2000):
        chance_p = [draw.choice((0.1, 0.9)) for _ in range(60)]
        value_p = [sum(draw.random() < chance for _ in range(8)) / 8 for chance in chance_p]
        low, high = interval(value_p)
        hits += low <= 0.5 <= high
    assert 0.93 < hits / 2000 < 0.97


def test_every_evaluation_has_its_interval_also_where_few_are_shown(tmp_path: Path):
    """Fails on the old code: a band between the first and the last left the others outside."""
    [run] = Reporter([make_run(tmp_path / "run", steps=8)], 0).report().index["runs"]
    evaluations = [
        step for step, v in zip(run["step"], run["metrics"]["eval/pass@1"], strict=True) if v is not None
    ]
    assert evaluations == [0, 2, 4, 6, 8] and list(run["intervals"]["eval/pass@1"]) == evaluations
    for step, (low, high) in run["intervals"]["eval/pass@1"].items():
        assert low <= run["metrics"]["eval/pass@1"][run["step"].index(step)] <= high


def test_an_interval_needs_the_whole_evaluation():
    counts = [(4, 4), (2, 4), (0, 4)]
    assert pass_intervals({2: counts}, {2: 0.5}, 1).keys() == {2}
    assert pass_intervals({2: counts}, {2: 0.6}, 1) == {}
    assert pass_intervals({2: counts}, {2: 0.5}, 8) == {}

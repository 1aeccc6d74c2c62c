"""Steps that docs/explanation/planner.md states: the GVPO paper's, the examples' and the largest models'."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.suite.doc_tables import Hold

from megatron_gvpo.planner import architecture, own_layout, partial_rollouts, workload
from megatron_gvpo.planner.search import Candidate, search
from megatron_gvpo.planner.workload import Lengths, Workload, method, method_of
from megatron_gvpo.rehearsal import made_model
from megatron_gvpo.settings.config import Config, load_config

PAGE = ROOT / "docs" / "explanation" / "planner.md"
H800 = workload.gpu("h800")
MATH = architecture.load("Qwen/Qwen2.5-Math-7B")
LENGTHS = "850,p95=2000,max=3072"
GOALS = {False: 100, True: 75}  # seconds, without and with FP8
EXAMPLES = {  # the files, the last of which is named
    "gvpo_math_7b": ["papers/gvpo_math_7b"],
    "gvpo_math_1.5b": ["papers/gvpo_math_7b", "papers/gvpo_math_1.5b"],
    "gpg_math_7b": ["papers/gpg_math_7b"],
    "gpg_zero_7b": ["papers/gpg_math_7b", "papers/gpg_zero_7b"],
    "gpg_1.5b": ["papers/gpg_1.5b"],
    "math": ["recipes/math"],
    "deepscaler": ["recipes/deepscaler"],
}
LARGE = [
    ("Qwen/Qwen3-235B-A22B", 64),
    ("Qwen/Qwen3-235B-A22B", 256),
    ("deepseek-ai/DeepSeek-V3", 256),
    ("deepseek-ai/DeepSeek-V3", 512),
]


def shipped(name: str, folder: Path, *changes: str) -> Config:
    files = [ROOT / "examples" / f"{file}.yaml" for file in EXAMPLES[name]]
    path = made_model.prepare(load_config(files, changes).model.path, "model.path", folder)
    return load_config(files, [*changes, f"model.path={path}"])


def seconds(config: Config, lengths: Lengths) -> dict[str, float]:
    took = own_layout.step_seconds(config, 8, H800, lengths, 256)
    assert took is not None
    return took


def own_lengths(config: Config) -> Lengths:
    """Lengths that `plan CONFIG` assumes."""
    longest = config.rollout.max_tokens
    return workload.parse_lengths(f"{0.4 * longest:g},p95={longest},max={longest}")


@cache
def papers_best(mini_batches: int, shares: bool, fp8: bool) -> tuple[Candidate, Workload]:
    scoring = method("gvpo", mini_batches).scoring
    lengths = workload.parse_lengths(LENGTHS)
    work = Workload(1024, 5, 256, lengths, mini_batches, scoring, share_prompts=shares)
    return search(MATH, H800, 8, work, fp8=fp8, colocated=True).best[0], work


def line(name: str, layout: str, took: dict[str, float]) -> str:
    rest = took["optimizer"] + took["sync"] + took["waiting"]
    phases = [took["rollout"], took["scoring"], took["training"], rest, took["step"]]
    return f"| {name} | {layout} | {' | '.join(f'{phase:.1f}' for phase in phases)} |"


def papers_steps(folder: Path) -> str:
    lines = ["| step | layout | rollout s | scoring s | training s | rest s | step s |", "|---" * 7 + "|"]
    for name, options in {
        "search": (4, False, False),
        "search, `--share-prompts`": (4, True, False),
        "search, `--share-prompts --fp8`": (4, True, True),
        "search, `--share-prompts --mini-batches 1`": (1, True, False),
        "search, `--share-prompts --fp8 --mini-batches 1`": (1, True, True),
    }.items():
        best, work = papers_best(*options)
        layout = best.layout.name.replace(", colocated", "")
        lines.append(line(name, layout, best.seconds.by_phase()))
        if name == "search, `--share-prompts`":
            more = partial_rollouts.choices(MATH, H800, best.layout.engines, best.layout.rollout_tp, work)[0]
            took = best.seconds.by_phase()
            took |= {"step": took["step"] - took["rollout"] + more.seconds, "rollout": more.seconds}
            lines.append(line("the same, and 256 prompts carried over", layout, took))
    file = shipped("gvpo_math_7b", folder, "rollout.max_tokens=3072")
    layout = "pp2 dp4, rollout tp1"
    lines.append(line("the file, these lengths", layout, seconds(file, workload.parse_lengths(LENGTHS))))
    file = shipped("gvpo_math_7b", folder)
    lines.append(line("the file, its limit of 1,024 tokens", layout, seconds(file, own_lengths(file))))
    return "\n".join(lines)


def test_the_papers_step(hold_current: Hold, tmp_path: Path):
    hold_current(PAGE, {"the paper's step": lambda: papers_steps(tmp_path)})


@pytest.mark.parametrize("fp8", [False, True])
def test_what_the_goal_would_need(fp8: bool):
    """Rollouts and passes that are faster by one factor, and the rates that the planner has."""
    took = papers_best(4, True, fp8)[0].seconds
    now, mfu = took.rollout + took.scoring + took.training, papers_best(4, True, fp8)[0].mfu
    factor = now / (GOALS[fp8] - took.optimizer - took.sync - took.waiting)
    rate = 5120 * 850 / took.rollout / 8
    text = PAGE.read_text()
    assert f"{rate:,.0f} tokens a second and GPU" in text
    assert f"{factor * rate:,.0f} tokens a second and GPU and {factor * mfu:.0%}".replace("%", " %") in text
    assert f"{mfu:.0%}".replace("%", " %") in text


def example(name: str, folder: Path) -> tuple[str, float]:
    """A row of the page, and the file's seconds over the best layout's."""
    config = shipped(name, folder)
    lengths, train = own_lengths(config), config.train
    asks = method_of(config.algorithm, train.mini_batches)
    sizes = (train.prompts_per_step, config.rollout.n, 256, lengths, train.mini_batches, asks.scoring)
    model = architecture.load(config.model.path)
    shares = train.share_prompts is True
    best = search(model, H800, 8, Workload(*sizes, share_prompts=shares), colocated=True).best[0]
    took = seconds(config, lengths)["step"]
    row = (
        f"| `{name}` | {took:.1f} | {best.layout.name.replace(', colocated', '')} | {best.seconds.step:.1f} |"
    )
    return row, took / best.seconds.step


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_at_most_a_tenth_slower_than_the_best_layout(name: str, tmp_path: Path):
    row, ratio = example(name, tmp_path)
    assert ratio < 1.1
    assert row in PAGE.read_text(), row


def phases(name: str, gpus: int) -> str:
    work = Workload(1024, 5, 256, workload.parse_lengths("850,p95=3000"), 4, method("gvpo", 4).scoring)
    best = search(architecture.load(name), H800, gpus, work).best[0]
    took = best.seconds
    over = "none" if took.overlapped else f"{took.waiting:.1f}"
    seconds = (took.rollout, took.scoring, took.training + took.optimizer, took.sync)
    cells = [name.split("/")[1], str(gpus), best.layout.name, *(f"{phase:.1f}" for phase in seconds), over]
    return f"| {' | '.join(cells)} | {took.step:.1f} |"


@pytest.mark.proof
@pytest.mark.parametrize(("name", "gpus"), LARGE)
def test_phases_of_the_largest_models(name: str, gpus: int):
    row = phases(name, gpus)
    assert row in PAGE.read_text(), row

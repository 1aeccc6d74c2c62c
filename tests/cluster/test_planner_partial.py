"""Partial rollouts of colocated servers as the planner predicts them, against a simulation of every token."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_gvpo.cli import main
from megatron_gvpo.planner import architecture, partial_rollouts, step_time, workload
from megatron_gvpo.planner.workload import Lengths, Workload
from megatron_gvpo.settings.config import load_config

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "planner.md"
H800 = workload.gpu("h800")
B7 = architecture.load("Qwen/Qwen2.5-7B")
PAPER, LONG = Lengths(850, 2000, 3840), Lengths(5000, 12000, 20480)
ROWS = {  # model, engines, tp, prompts, k, lengths
    "GVPO's step, Qwen2.5-7B, 8 H800s, 1024 x 5, 850 tokens": ("Qwen/Qwen2.5-7B", 2, 4, 1024, 5, PAPER),
    "the same with a longer tail, 95 % under 3000": (
        "Qwen/Qwen2.5-7B",
        2,
        4,
        1024,
        5,
        Lengths(850, 3000, 6000),
    ),
    "Qwen3-235B-A22B, 64 H800s, 1024 x 5, 95 % under 3000": (
        *("Qwen/Qwen3-235B-A22B", 8, 8, 1024, 5),
        Lengths(850, 3000, 6000),
    ),
    "DAPO's step, Qwen2.5-32B, 128 H800s, 512 x 16, 5000 tokens": ("Qwen/Qwen2.5-32B", 16, 8, 512, 16, LONG),
}


def every_token(work: Workload, extra: int, oldest: int) -> list[float]:
    """Seconds of the rollouts of each step on one engine, a token at a time."""
    generator, step = random.Random(0), step_time.DecodeStep(B7, H800, 1)
    groups: list[list[list[float]]] = []  # of each response its length, and its tokens so far
    first_steps: list[int] = []
    seconds = []
    for number in range(partial_rollouts._STEPS):
        lengths = work.lengths.sample((work.prompts + extra - len(groups)) * work.k)
        generator.shuffle(lengths)
        while lengths:
            groups.append([[lengths.pop(0), 0.0] for _ in range(work.k)])
            first_steps.append(number)
        unfinished = [[r for r in group if r[1] < r[0]] for group in groups]
        tokens = sum(bool(own) * work.prompt_tokens + sum(r[1] for r in own) for own in unfinished)
        count = sum(map(len, unfinished))
        mean = sum(work.prompt_tokens + r[1] for own in unfinished for r in own) / count
        took = B7.layer_flops(tokens, mean / 2) / (H800.flops(False) * step_time.PREFILL_FRACTION)
        while True:
            complete = [all(r[1] >= r[0] for r in group) for group in groups]
            due = [
                done for done, since in zip(complete, first_steps, strict=True) if since <= number - oldest
            ]
            if sum(complete) >= work.prompts and all(due):
                break
            running = [r for group in groups for r in group if r[1] < r[0]]
            took += step.seconds(len(running), sum(work.prompt_tokens + r[1] + 0.5 for r in running))
            for response in running:
                response[1] += 1
        leaving = [i for i, done in enumerate(complete) if done][: work.prompts]
        groups = [group for i, group in enumerate(groups) if i not in leaving]
        first_steps = [since for i, since in enumerate(first_steps) if i not in leaving]
        seconds.append(took)
    return seconds


@pytest.mark.parametrize(("extra", "oldest"), [(0, 1), (4, 1), (8, 2)])
def test_the_seconds_are_those_of_every_single_token(extra: int, oldest: int):
    work = Workload(8, 2, 200, Lengths(60, 150, 300))
    slow = every_token(work, extra, oldest)[-partial_rollouts._MEASURED :]
    choice = partial_rollouts.simulated(B7, H800, 1, 1, work, extra, oldest)
    assert choice.seconds == pytest.approx(sum(slow) / len(slow), rel=0.02)
    assert (choice.carried > 0) == (extra > 0)


def test_without_extra_prompts_they_are_the_rollouts_of_a_plan():
    work = Workload(256, 4, 256, Lengths(850, 2000, 3840))
    choice = partial_rollouts.simulated(B7, H800, 4, 2, work, 0, 1)
    assert choice.seconds == pytest.approx(step_time.rollout_seconds(B7, H800, 4, 2, work), rel=0.05)
    assert choice.carried == 0


def test_a_longer_tail_leaves_more_to_gain():
    shares = []
    for p95 in (1200, 2000, 3000):
        work = Workload(256, 4, 256, Lengths(850, p95, 8192))
        choice = partial_rollouts.choices(B7, H800, 4, 2, work)[1]
        shares.append(choice.seconds / partial_rollouts.simulated(B7, H800, 4, 2, work, 0, 1).seconds)
    assert shares == sorted(shares, reverse=True) and shares[0] < 1


def test_nothing_is_promised_where_no_server_fits():
    small = replace(H800, memory_gib=16)
    assert partial_rollouts.simulated(B7, small, 8, 1, Workload(8, 2, 9, PAPER), 2, 1).seconds == math.inf


def lines(name: str) -> list[str]:
    """The table's lines of one workload."""
    model, engines, tp, prompts, k, lengths = ROWS[name]
    sizes, work = architecture.load(model), Workload(prompts, k, 256, lengths)
    full_seconds = step_time.rollout_seconds(sizes, H800, engines, tp, work)
    return [
        f"| {name} | {full_seconds:.1f} | {choice.prompts}, {choice.oldest} | {choice.seconds:.1f} | "
        f"{100 * (1 - choice.seconds / full_seconds):.0f} % | {100 * choice.carried:.1f} % |"
        for choice in partial_rollouts.choices(sizes, H800, engines, tp, work)
    ]


@pytest.mark.parametrize("name", ROWS)
def test_the_page_has_what_is_predicted(name: str):
    page = PAGE.read_text()
    assert [line for line in lines(name) if line not in page] == []


def test_the_command_says_what_is_saved(capsys: pytest.CaptureFixture[str]):
    command = [
        "plan",
        "--model",
        "Qwen/Qwen2.5-7B",
        "--gpus",
        "8",
        "--gpu",
        "h800",
        "--k",
        "4",
        "--prompts",
        "64",
    ]
    command += ["--response-length", "850,p95=3000", "--colocated"]
    assert main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "with rollout.over_sampling_prompts=16 and rollout.async_steps=1: rollouts of" in printed
    assert main([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    choices, seconds = printed["partial_rollouts"], printed["best"][0]["predicted_seconds"]["rollout"]
    assert [choice["prompts"] for choice in choices] == [16, 32]
    assert all(choice["seconds"] < seconds for choice in choices)


def test_what_is_written_keeps_partial_rollouts(task: Path, tmp_path: Path):
    servers = ["rollout.engine=vllm", "rollout.servers.colocated=true", "rollout.weights.transport=colocated"]
    words = [*servers, "rollout.async_steps=2", "rollout.over_sampling_prompts=3"]
    words += ["rollout.max_tokens=64", "model.dtype=bfloat16", f"output_dir={tmp_path}/run"]
    options = [
        "--gpus",
        "4",
        "--prompt-tokens",
        "32",
        "--write",
        str(tmp_path / "plan.yaml"),
        "--response-length",
        "4,p95=8",
    ]
    assert main(["plan", str(task / "run.yaml"), *words, *options]) == 0
    files = [task / "run.yaml", tmp_path / "plan.yaml"]
    written = load_config(files, [*servers, f"output_dir={tmp_path}/run"]).rollout
    assert (written.over_sampling_prompts, written.async_steps) == (3, 2)

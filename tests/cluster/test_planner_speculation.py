"""Predicted gains of speculative rollouts, against both published ones."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_gvpo.cli import main
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture, step_time, workload
from megatron_gvpo.planner.workload import Lengths, Speculation, Workload, parse_speculation
from megatron_gvpo.settings.config import load_config

H100 = workload.gpu("h100")
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "planner.md"


def rollouts(
    model: str, engines: int, tp: int, work: Workload, speculation: Speculation
) -> tuple[float, float]:
    """Predicted seconds of a step's rollouts, without speculation and with it."""
    sizes = architecture.load(model)
    both = (work, replace(work, speculation=speculation))
    return tuple(step_time.rollout_seconds(sizes, H100, engines, tp, each) for each in both)


def test_the_published_gains() -> None:
    """Steps published without speculation, and the predicted gain of the rollouts alone.

    SkyRL (docs/examples/spec_decode): Qwen3.5-9B, DAPO, 8 H100s with an engine each, 32 prompts x 8, at most
    8192 tokens, 3 tokens of an MTP head, acceptance 77.3 %; rollouts 310.1 -> 152.4 s, a step 400.7 -> 246.8.
    Assumed: the sizes of Qwen3-8B; a mean of 2,500 tokens; DAPO's repeated sampling scales both times alike.
    DRAFT_OVERHEAD was chosen by this row.

    NeMo-RL (pull request 2779): DeepSeek-V3, 256 H100s colocated, bf16, a step 121.2 -> 100.5. Assumed: its
    performance recipe's 32 x 16 responses of 585 tokens on 8 engines of 32 GPUs; one token of the MTP head,
    as in its guide; an acceptance of 85 %, the lower end of the DeepSeek-V3 report. No constant is from it.
    """
    dapo = Workload(32, 8, 256, Lengths(2500, 7500, 8192))
    plain, fast = rollouts("Qwen/Qwen3-8B", 8, 1, dapo, Speculation(3, 0.773))
    sky = 400.7 - 310.1 * (1 - fast / plain)
    grpo = Workload(32, 16, 160, Lengths(585, 2.2 * 585, 1376))
    plain_v3, fast_v3 = rollouts("deepseek-ai/DeepSeek-V3", 8, 32, grpo, Speculation(1, 0.85))
    nemo = 121.2 - (plain_v3 - fast_v3)
    assert sky == pytest.approx(246.8, rel=0.05) and plain / fast == pytest.approx(2.03, rel=0.05)
    assert nemo == pytest.approx(100.5, rel=0.1)
    page = PAGE.read_text()
    assert f"| 246.8 s (SkyRL) | {sky:.1f} s | {sky / 246.8:.2f} |" in page
    assert f"| 100.5 s (NeMo-RL) | {nemo:.1f} s | {nemo / 100.5:.2f} |" in page


def test_a_rejected_draft_costs_and_an_accepted_one_gains() -> None:
    work = Workload(32, 8, 256, Lengths(2500, 7500, 8192))
    seconds = []
    for acceptance in (0.0, 0.3, 0.6, 0.9):
        plain, fast = rollouts("Qwen/Qwen3-8B", 8, 1, work, Speculation(3, acceptance))
        seconds.append(fast)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > plain > seconds[-1]
    from_text = rollouts("Qwen/Qwen3-8B", 8, 1, work, Speculation(3, 0.3, from_text=True))[1]
    assert from_text < seconds[1], "the text proposes without a layer and a head"


def test_a_large_batch_gains_less() -> None:
    """The verification of 4 times as many tokens takes longer once operations limit a step."""
    model = architecture.load("Qwen/Qwen3-8B")
    step, chosen = step_time.DecodeStep(model, H100, 1), Speculation(3, 0.77)
    few, many = (
        step.seconds(n, n * 1000) * chosen.length / step.seconds(n, n * 1000, chosen) for n in (8, 1024)
    )
    assert few > 1.8 > 1.6 > many


def test_the_command_predicts_the_gain_and_writes_it(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = [
        "plan",
        "--model",
        "Qwen/Qwen3-8B",
        "--gpus",
        "8",
        "--gpu",
        "h100",
        "--prompts",
        "32",
        "--k",
        "8",
    ]
    command += ["--response-length", "2500,p95=7500,max=8192", "--speculate", "3,acceptance=0.77"]
    assert main([*command, "--write", str(tmp_path / "plan.yaml")]) == 0
    match = re.search(
        r"rollouts: ([\d.]+) s in place of ([\d.]+) s, with 3.31 tokens", capsys.readouterr().out
    )
    assert match and 1.4 < float(match[2]) / float(match[1]) < 2.3
    chosen = load_config([task / "run.yaml", tmp_path / "plan.yaml"], ["output_dir=x"]).rollout.speculation
    assert chosen is not None and (chosen.method, chosen.tokens) == ("mtp", 3)


def test_what_is_no_speculation_is_refused() -> None:
    assert parse_speculation("3,acceptance=0.5,draft=text") == Speculation(3, 0.5, from_text=True)
    for text in ("3", "0,acceptance=0.5", "3,acceptance=2", "3,acceptance=0.5,draft=model", "x,acceptance=1"):
        with pytest.raises(ConfigError, match=r"expected TOKENS,acceptance=SHARE"):
            parse_speculation(text)

"""Three steps of GVPO in conversations with an environment of another library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.inputs import answering_model
from helpers.suite.real_parts import used
from helpers.tiny_run import GVPO, configure, fit, records


def three_steps(
    task: Path,
    folder: Path,
    answers: Sequence[str],
    data: Path,
    conversation: dict[str, Any],
    *overrides: str,
) -> list[dict[str, Any]]:
    """The records of a run that begins with a model that gives these answers."""
    answering_model.make(folder / "model", data.read_text()[:400], answers)
    config = configure(
        task,
        folder / "run",
        *GVPO,
        *("train.steps=3", "train.prompts_per_step=2", "train.max_tokens_per_micro_batch=4096"),
        *("data.eval=null", "data.max_prompt_tokens=2000", "checkpoint.export_hf=false"),
        f"data.train={json.dumps({'path': str(data), 'demonstration_key': None})}",
        f"model.path={folder / 'model'}",
        "rollout.max_tokens=2000",
        f"rollout.conversation={json.dumps({'turn_tokens': 24, 'step_timeout': 120, **conversation})}",
        "rewards.components=[{name: environment}]",
        *overrides,
    )
    fit(config)
    used("agent programs" if "program" in conversation else "environment workers")
    _, *steps = records(folder / "run")
    assert len(steps) == 3
    for step in steps:
        assert step["env/lost"] == 0 and step["env/turns"] > 1
        assert step["reward/mean"] == step["env/environment_reward"]
    assert all(step["train/grad_norm"] > 0 for step in steps), "answers differ, and so do their rewards"
    return steps

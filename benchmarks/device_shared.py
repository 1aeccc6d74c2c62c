"""Shared prompts on this device: the same numbers as whole sequences on a CPU, and the time that they save.

It completes tests/megatron/test_merged_attention.py and test_shared_prompts.py, which run the same code with
the two operators of PyTorch's FlashAttention computed plainly.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from device_model import SHAPES, TINY, clean_up, clock, made_rows, policy_of, save_model

from megatron_gvpo.cluster.planner.architecture import from_config
from megatron_gvpo.cluster.planner.sharing import sharing
from megatron_gvpo.cluster.planner.workload import Lengths, Workload

TRAIN = {"steps": 1, "prompts_per_step": 1, "max_tokens_per_micro_batch": 16384}


def check(smoke: bool, compare: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Compare and time; `compare(sections, limits)` runs one pack here and whole sequences on a CPU."""
    # PyTorch's FlashAttention takes bfloat16; the limit is that of device_check's layers.
    limits = {"bfloat16": 3e-2} if torch.cuda.is_available() else {"float32": 1e-5}
    found = compare(sections={"train": {**TRAIN, "share_prompts": True}}, limits=limits)
    return found | {"update": timed(smoke)}


def timed(smoke: bool) -> dict[str, float]:
    """Return seconds of an update on groups of 8 with a prompt four times as long as its responses."""
    shape = {**SHAPES["qwen2.5-1.5b"], **(TINY if smoke else {})}
    prompt, response, k = (32, 8, 4) if smoke else (1400, 350, 8)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    rows = made_rows(2, k, prompt, response, shape["vocab_size"])
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        save_model(place, shape)
        model = from_config(json.loads((place / "config.json").read_text()), "the benchmark's model")
        for name in ("whole", "shared"):
            sections = {"train": {**TRAIN, "share_prompts": name == "shared"}}
            policy = policy_of(place, dtype, 16384, sections=sections)
            policy.update(rows, at_step_start=True)  # builds kernels
            with clock(seconds, name):
                policy.update(rows, at_step_start=True)
            del policy
            clean_up()
    exact = Lengths(response - 1e-3, response - 1e-4, response)
    predicted = sharing(model, Workload(1, k, prompt, exact))
    assert predicted is not None
    return {
        "whole_s": seconds["whole"],
        "shared_s": seconds["shared"],
        "ratio": seconds["shared"] / seconds["whole"],
        "predicted_ratio": predicted.ratio("flops"),
    }

"""For device_check.py: the seconds of updates with and without shared prompts, and the planner's prediction.

The check "layers" compares the numbers of both. Both complete tests/megatron/test_merged_attention.py and
test_shared_prompts.py, which run the same code with the two operators of PyTorch's FlashAttention computed
plainly.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from lib.device.model import SHAPES, TINY, clean_up, clock, made_rows, policy_of, save_model
from megatron_gvpo.planner.architecture import from_config
from megatron_gvpo.planner.sharing import sharing
from megatron_gvpo.planner.workload import Lengths, Workload


def times(smoke: bool) -> dict[str, Any]:
    """Return seconds of an update on groups whose prompt is four times as long as their responses."""
    shape = {**SHAPES["qwen2.5-1.5b"], **(TINY if smoke else {})}
    prompt, response, k = (32, 8, 4) if smoke else (1400, 350, 8)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    rows = made_rows(2, k, prompt, response, shape["vocab_size"])
    seconds: dict[str, float] = {}
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        save_model(folder, shape)
        model = from_config(json.loads((folder / "config.json").read_text()), "the benchmark's model")
        for name in ("whole", "shared"):
            policy = policy_of(folder, dtype, max_tokens=16384, share_prompts=name == "shared")
            losses.append(policy.update(rows, at_step_start=True).metrics["loss"])  # also builds kernels
            with clock(seconds, name):
                policy.update(rows, at_step_start=True)
            del policy
            clean_up()
    fixed = Lengths(response - 1e-3, response - 1e-4, response)
    predicted = sharing(model, Workload(1, k, prompt, fixed))
    assert predicted is not None
    return {
        "whole_s": seconds["whole"],
        "shared_s": seconds["shared"],
        "ratio": seconds["shared"] / seconds["whole"],
        "predicted_ratio": predicted.ratio("flops"),
        "right": abs(losses[1] - losses[0]) <= 3e-2 * abs(losses[0]),
    }

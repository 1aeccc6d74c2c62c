"""Checks of the files of push_worker: every push gave the server the exported weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.pushes.push_worker import PUSHES
from helpers.servers.real_servers import PROMPTS, logprobs, reference
from megatron_gvpo.huggingface.architectures import add_model_types

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}  # the largest error of one log-prob, in nats


def assert_exported(directory: Path, dtype: str = "float32") -> None:
    """Check the files of push_worker: each push gave the server the export, and changed its log-probs.

    vLLM packs linear weights on CPUs, so its checksums see them as empty; the log-probs check these weights.
    They equal those after the server has loaded the export, up to the order of sums. A server in bfloat16
    rounds, and so its likeliest tokens may differ from the reference's.
    """
    add_model_types()
    for step in range(len(PUSHES)):
        export = directory / f"export-{step}"
        pushed = (directory / f"checksum-{step}").read_text()
        assert pushed == (directory / f"checksum-{step}-from-files").read_text()
        scores, from_files = (
            json.loads((directory / f"scores-{step}{of}").read_text()) for of in ("", "-from-files")
        )
        for sampled, computed in zip(scores, from_files, strict=True):
            assert sampled == pytest.approx(computed, abs=1e-5, rel=0), f"step {step}"
        if step:
            now, before = (json.loads((directory / f"score-{n}-0").read_text()) for n in (step, step - 1))
            assert max(abs(a - b) for a, b in zip(now, before, strict=True)) > 0.01
        model = reference(export)
        gaps = []
        for i, prompt in enumerate(PROMPTS):
            score = json.loads((directory / f"score-{step}-{i}").read_text())
            gaps.append(torch.tensor(score) - logprobs(export, prompt[:1], prompt[1:], loaded=model))
            tokens, logps = json.loads((directory / f"sample-{step}-{i}").read_text())
            gaps.append(torch.tensor(logps) - logprobs(export, prompt, tokens, loaded=model))
            response = eval((directory / f"greedy-{step}-{i}").read_text())
            ids = torch.tensor([prompt])
            greedy = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
            )
            assert response == greedy[0, len(prompt) :].tolist() or dtype != "float32"
        gap = torch.cat(gaps).abs()
        print(f"step {step} ({PUSHES[step]}): {gap.mean():.2g} nats off on average, {gap.max():.2g} at most")
        assert gap.max() <= TOLERANCE[dtype], f"step {step}"

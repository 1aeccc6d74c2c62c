"""The embedded engine on prompts with images: log-probs are those of transformers, one prompt at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.cases.vision_cases import CONFIGS, decoded_log_probs, load, make_rows, save_model
from helpers.inputs.chat_tokenizer import tokenizer
from helpers.suite.real_parts import used

from megatron_gvpo.data.image_processor import ImageProcessor
from megatron_gvpo.huggingface.image_families import name_in_file
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.servers.request import Request
from megatron_gvpo.settings.sections import SamplingConfig


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl_tied"])
def test_samples_have_transformers_log_probs(tmp_path: Path, name: str) -> None:
    """The batch has prompts of different lengths with none, one and two images, two samples of each.

    Some samples end early and leave the batch. A sampled placeholder of an image is an ordinary token.
    """
    assert name in CONFIGS
    save_model(tmp_path, name)
    directory = tmp_path / name
    rows = make_rows(tmp_path, ImageProcessor(str(directory)))
    model = load(directory)
    engine = LocalModel(
        *(str(directory), tokenizer()),
        device="cpu",
        dtype=torch.float32,
        batch_size=8,
        end_token_ids=(2,),
    )
    used("embedded rollout engine")
    architecture = model.config.architectures[0]
    state = {name_in_file(n, architecture): t.float() for n, t in model.state_dict().items()}
    if name.endswith("_tied"):
        del state["lm_head.weight"]
    engine.load(state.items(), version=3)
    requests = [
        Request(tuple(prompt), 2, seed=i, images=images)
        for i, (prompt, images) in enumerate(zip(rows.prompt_ids, rows.images, strict=True))
    ]
    sampling = SamplingConfig(max_tokens=8, stop_token_ids=tuple(range(100, 120)))
    groups = engine.generate(requests, sampling)
    assert len({len(rollout.token_ids) for group in groups for rollout in group}) > 1
    for number in range(2):
        sampled = rows.select(range(len(rows)))
        sampled.response_ids = [group[number].token_ids for group in groups]
        wanted = decoded_log_probs(model, sampled, directory)
        for group, logp in zip(groups, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(group[number].logprobs).double(), logp, rtol=0, atol=2e-5)

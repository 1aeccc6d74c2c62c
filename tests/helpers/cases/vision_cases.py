"""Tiny random vision-language checkpoints, and rows with none, one or two images in their prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image as Picture
from torch import Tensor

from helpers.workers.gradient_worker import Layout
from megatron_gvpo.data.image_processor import ImageProcessor
from megatron_gvpo.groups import Image
from megatron_gvpo.types import TrainBatch

IMAGE, VIDEO, START, END = 120, 121, 122, 123
VOCABULARY = 132  # tensor parallelism must divide it
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "initializer_range": 0.15,
}
_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}


def qwen2_5_vl(tied: bool) -> transformers.PretrainedConfig:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    return transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "tie_word_embeddings": tied, "rope_parameters": rope},
        vision_config={**_VISION, "depth": 2, "window_size": 16, "fullatt_block_indexes": [1]},
        tie_word_embeddings=tied,
        dtype="float32",
        **_IDS,
    )


def qwen3_vl(tied: bool) -> transformers.PretrainedConfig:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    deep = {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return transformers.Qwen3VLConfig(
        text_config={**_TEXT, "tie_word_embeddings": tied, "head_dim": 16, "rope_parameters": rope},
        vision_config={**_VISION, **deep},
        tie_word_embeddings=tied,
        dtype="float32",
        **_IDS,
    )


CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen2_5_vl": lambda: qwen2_5_vl(tied=False),
    "qwen2_5_vl_tied": lambda: qwen2_5_vl(tied=True),
    "qwen3_vl": lambda: qwen3_vl(tied=False),
    "qwen3_vl_tied": lambda: qwen3_vl(tied=True),
}


def save_model(directory: Path, name: str) -> None:
    """Write a checkpoint whose attention, norms and biases are far from trivial, with its image processor."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(CONFIGS[name]())
    for tensor_name, tensor in model.named_parameters():
        if "norm" in tensor_name or "bias" in tensor_name:
            tensor.data += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(directory / name)
    (directory / name / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


def load(directory: Path) -> Any:
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        directory, dtype="float32", attn_implementation="eager"
    )
    return model.double().eval()


@dataclass(frozen=True)
class VisionCase:
    """One optimizer step of SFT on the rows, in micro-batches of `budget` tokens."""

    model: str
    layout: Layout
    trained: bool = True  # the vision tower trains, too
    budget: int = 70
    dtype: str = "float32"

    def __str__(self) -> str:
        of_dtype = "" if self.dtype == "float32" else f"-{self.dtype}"
        return f"{self.model}-{self.layout}" + ("" if self.trained else "-frozen") + of_dtype


_SIZES: list[list[tuple[int, int]]] = [  # width and height of every prompt's images
    [(16, 16)],
    [],
    [(16, 32), (24, 16)],
    [(32, 48)],
    [],
    [(32, 16)],
]


def make_rows(directory: Path, processor: ImageProcessor) -> TrainBatch:
    """Rows with pictures of noise, which are written into `directory`."""
    generator = torch.Generator().manual_seed(0)
    noise = np.random.default_rng(0)

    def text(count: int) -> list[int]:
        return torch.randint(3, 119, (count,), generator=generator).tolist()

    prompts, responses, images = [], [], []
    for row, sizes in enumerate(_SIZES):
        prompt, images_of_row = text(2 + row), []
        for number, (width, height) in enumerate(sizes):
            file = directory / f"{row}-{number}.png"
            Picture.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file)
            image = processor.image(str(file))
            prompt += [START, *[IMAGE] * image.tokens, END, *text(2)]
            images_of_row.append(image)
        prompts.append(prompt + text(3))
        responses.append(text(5 + 2 * row))
        images.append(tuple(images_of_row))
    return TrainBatch(
        prompt_ids=prompts,
        response_ids=responses,
        group_n=torch.arange(len(prompts)),
        reward_n=torch.zeros(len(prompts)),
        truncated_n=torch.zeros(len(prompts), dtype=torch.bool),
        images=images,
    )


def with_placeholders(rows: TrainBatch) -> TrainBatch:
    """The rows with responses in which the policy has sampled tokens that stand for images in prompts."""
    marks = [IMAGE, VIDEO, START, IMAGE, END, START]
    return replace(rows, response_ids=[[*answer[:2], *marks] for answer in rows.response_ids])


@torch.no_grad()
def decoded_log_probs(model: Any, rows: TrainBatch, directory: Path) -> list[Tensor]:
    """The responses' log-probs by transformers, token by token after the prompt, as an engine decodes.

    Every token of the response is then computed as an ordinary token.
    """
    rows_logp = []
    for prompt, answer, images in zip(rows.prompt_ids, rows.response_ids, rows.images, strict=True):
        ids = torch.tensor([list(prompt)])
        kinds, pixels = (ids == IMAGE).int(), pixels_of(images, directory)
        positions, further = model.model.get_rope_index(ids, kinds, pixels.get("image_grid_thw"))
        output = model(
            input_ids=ids, position_ids=positions, mm_token_type_ids=kinds, use_cache=True, **pixels
        )
        logps = []
        for number, token in enumerate(answer):
            logps.append(torch.log_softmax(output.logits[0, -1], -1)[token])
            position = (len(prompt) + number + further).expand(3, 1, 1)
            output = model(
                input_ids=torch.tensor([[token]]),
                position_ids=position,
                past_key_values=output.past_key_values,
            )
        rows_logp.append(torch.stack(logps))
    return rows_logp


def pixels_of(images: Sequence[Image], directory: Path) -> dict[str, Tensor]:
    """The arguments of transformers' model for images, by its own processor."""
    if not images:
        return {}
    processor = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    made = processor([Picture.open(image.source) for image in images], return_tensors="pt")
    return {"pixel_values": made["pixel_values"].double(), "image_grid_thw": made["image_grid_thw"]}


def log_probs(model: Any, rows: TrainBatch, directory: Path) -> list[Tensor]:
    """The responses' log-probs by transformers, with its own image processor, one row at a time."""
    rows_logp = []
    for prompt, answer, images in zip(rows.prompt_ids, rows.response_ids, rows.images, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        pixels = pixels_of(images, directory)
        output = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE).int(), **pixels)
        logp = torch.log_softmax(output.logits[0, len(prompt) - 1 : -1], -1)
        rows_logp.append(logp.gather(1, torch.tensor(answer)[:, None])[:, 0])
    return rows_logp


_SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS = [
    Layout(1),
    Layout(2, tp=2),
    Layout(2, **_SP),
    Layout(2, pp=2),
    Layout(2),
    Layout(2, overlap=True),
    Layout(1, recompute="full"),
    Layout(4, **_SP, pp=2),
    Layout(4, tp=2),
]
CASES = [
    VisionCase(model, layout)
    for model in CONFIGS
    for layout in LAYOUTS
    # both are refused
    if not layout.overlap and not (layout.recompute == "full" and model.startswith("qwen3"))
]
CASES += [VisionCase(model, layout, trained=False) for model in CONFIGS for layout in LAYOUTS]
CASES += [
    VisionCase(model, layout, trained=not layout.overlap)  # with overlap a trained tower is refused
    for model in ("qwen2_5_vl", "qwen3_vl_tied")
    for layout in (
        Layout(2, small=True),
        Layout(2, overlap=True, small=True),
        Layout(4, pp=2, overlap=True, small=True),
    )
]

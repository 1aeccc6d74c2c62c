r"""Makes a small model with random weights, and pictures of discs that it learns to count.

    python examples/images/make_task.py --out DIR [--seed 0]

It writes DIR/model, a Hugging Face checkpoint of Qwen3-VL's architecture (random parameters, one token per
character) with its image processor, and DIR/data with train.jsonl, test.jsonl and the pictures. A picture has
56 x 56 pixels, and discs and squares in its four quarters, at most four in each. Five discs fill a box. The
question is how many discs are left over. The worked solution has, for each quarter, its number of discs, and
how many are left over so far:

    prompt    <image>?
    solution  3:3,4:2,0:2,1:3
              \boxed{3}

Supervised fine-tuning imitates the field `demonstration`. For some pictures it is the worked solution,
for the others only the final line. So the fine-tuned model does both, and is mostly wrong when it gives only
the final line. In GVPO it then learns to count quarter by quarter.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from transformers import Qwen2VLImageProcessorPil, Qwen3VLConfig, Qwen3VLForConditionalGeneration

sys.path.insert(0, str(Path(__file__).parents[1]))

import small_examples as small

SIZES = {"train": 6144, "test": 256}
WORKED = 0.4  # share of the demonstrations that count quarter by quarter
BOX = 5  # discs
SIDE, CELL = 56, 14  # in pixels; a quarter has 2 x 2 cells

BOXED = "\\boxed{"
PICTURE, VIDEO, FIRST, LAST = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"


def make_model(directory: Path, seed: int) -> None:
    tokenizer = small.small_tokenizer("01234,:?}", words=[BOXED], marks=[PICTURE, VIDEO, FIRST, LAST])
    tokenizer.save_pretrained(directory)
    # A patch is a cell, and 2 x 2 patches make a token: a picture has a token for each quarter.
    area = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    Qwen2VLImageProcessorPil(patch_size=CELL, merge_size=2, size=area).save_pretrained(directory)

    torch.manual_seed(seed)
    ids = {"image": PICTURE, "video": VIDEO, "vision_start": FIRST, "vision_end": LAST}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 128,
            "initializer_range": 0.08,  # a small model learns faster with it
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 96,
            "patch_size": CELL,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "num_position_embeddings": (SIDE // CELL) ** 2,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.08,
        },
        tie_word_embeddings=False,
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in ids.items()},
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(directory)


def make_data(directory: Path, seed: int) -> None:
    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    for split, size in SIZES.items():
        records = [make_problem(directory, f"pictures/{split}-{i}.png", rng) for i in range(size)]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (directory / f"{split}.jsonl").write_text(lines)


def make_problem(directory: Path, name: str, rng: random.Random) -> dict[str, Any]:
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    draw, work, left_over = ImageDraw.Draw(picture), list[str](), 0
    for y, x in (0, 0), (0, 2), (2, 0), (2, 2):
        discs = rng.randint(0, 4)
        cells = rng.sample([(x, y), (x + 1, y), (x, y + 1), (x + 1, y + 1)], 4)
        for i, (column, row) in enumerate(cells):
            dark, light = rng.randrange(80), rng.randrange(150, 256)
            x_px, y_px = column * CELL + rng.randint(1, 3), row * CELL + rng.randint(1, 3)
            box = (x_px, y_px, x_px + 10, y_px + 10)
            if i < discs:
                draw.ellipse(box, fill=(light, dark, dark))
            elif rng.random() < 0.5:
                draw.rectangle(box, fill=(dark, dark, light))
        left_over = (left_over + discs) % BOX
        work.append(f"{discs}:{left_over}")
    picture.save(directory / name)
    final = rf"\boxed{{{left_over}}}"
    solution = ",".join(work) + "\n" + final
    return {
        "prompt": "<image>?",
        "images": [name],
        "answer": str(left_over),
        "solution": solution,
        "demonstration": solution if rng.random() < WORKED else final,
    }


if __name__ == "__main__":
    small.make_material("Make the image example's model and data.", make_model, make_data)

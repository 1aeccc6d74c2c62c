"""Makes up the rows of an optimizer update, from a configuration's lengths: the fullest packs that can be.

All tokens are the same, and the rewards are random. If the model takes images, a prompt has one image, which
fills it.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.groups import Image
from megatron_gvpo.planner.prediction import TEXT, Size, largest_image
from megatron_gvpo.settings.config import Config
from megatron_gvpo.types import TrainBatch

OWN = 512  # groups that follow each other and have unlike prompts; smaller than any vocabulary


def make_rows(config: Config, size: Size, data_parallel: int) -> TrainBatch:
    """The rows of an update on all data-parallel ranks. Raises ConfigError."""
    count = size.rows_of_a_pack * size.micro_batches * data_parallel
    tokens = count * size.response
    generator = torch.Generator().manual_seed(0)
    reward_n = torch.rand(count, generator=generator)
    components = [component.name for component in config.rewards.components]
    prompt, images = _prompt(config, size.prompt)
    group_n = torch.arange(count) // config.rollout.n
    return TrainBatch(
        prompt_ids=_prompts(prompt, bool(images), group_n.tolist()),
        response_ids=[[2] * size.response] * count,
        group_n=group_n,
        reward_n=reward_n,
        truncated_n=torch.zeros(count, dtype=torch.bool),
        engine_logp_r=torch.full((tokens,), -1.0) if config.algorithm.samples_from_policy else None,
        version_r=torch.zeros(tokens, dtype=torch.int64),
        place_n=torch.arange(count),
        trained_n=torch.ones(count, dtype=torch.bool),
        demonstration_n=torch.full((count,), config.algorithm.trains_on_demonstrations),
        component_n={name: reward_n.clone() for name in components},
        images=[images] * count if images else None,
    )


def _prompts(prompt: list[int], has_images: bool, groups: list[int]) -> list[Sequence[int]]:
    """The prompt of each row: a group's own, by its first token, because equal prompts may be shared."""
    if has_images or not prompt:
        return [prompt] * len(groups)
    own: dict[int, Sequence[int]] = {group: [1 + group % OWN, *prompt[1:]] for group in set(groups)}
    return [own[group] for group in groups]


def _prompt(config: Config, length: int) -> tuple[list[int], tuple[Image, ...]]:
    """The tokens of a prompt, and its image where the model takes images."""
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(config.model.path)
    if not hasattr(model, "vision_config"):
        return [1] * length, ()
    image = _picture(config.model.path, model.vision_config, length)
    placeholders = [model.vision_start_token_id, *[model.image_token_id] * image.tokens]
    return placeholders + [1] * (length - len(placeholders)), (image,)


def _picture(path: str, vision: Any, prompt: int) -> Image:
    """The largest square picture, in the model's input, that fits into a prompt of so many tokens."""
    from PIL import Image as Picture

    from megatron_gvpo.data.image_processor import ImageProcessor

    processor = ImageProcessor(path)
    side = math.isqrt(largest_image(prompt))
    edge = side * vision.patch_size * vision.spatial_merge_size
    if not side:
        raise ConfigError(
            f"data.max_prompt_tokens={prompt}: a rehearsed prompt has an image and {TEXT} tokens of text"
        )
    Picture.new("RGB", (edge, edge)).save(file := io.BytesIO(), "png")
    # The picture may become smaller, because the processor limits the pixels.
    image = processor.image(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
    if image.tokens > prompt - TEXT:
        raise ConfigError(
            f"data.max_prompt_tokens={prompt}: the smallest image that the model's "
            f"preprocessor_config.json allows takes {image.tokens} tokens, and a rehearsed prompt has "
            f"{TEXT} tokens of text beside it"
        )
    return image

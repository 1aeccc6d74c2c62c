"""Makes up the rows of an optimizer update from a configuration's lengths: the fullest packs that can be."""

from __future__ import annotations

import torch

from megatron_gvpo.planner.prediction import Size
from megatron_gvpo.settings.config import Config
from megatron_gvpo.types import TrainBatch


def make_rows(config: Config, size: Size, data_parallel: int) -> TrainBatch:
    """The rows: constant tokens, rewards and advantages at random."""
    count = size.rows_of_a_pack * size.micro_batches * data_parallel
    tokens = count * size.response
    generator = torch.Generator().manual_seed(0)
    reward_n = torch.rand(count, generator=generator)
    components = [component.name for component in config.rewards.components]
    return TrainBatch(
        prompt_ids=[[1] * size.prompt] * count,
        response_ids=[[2] * size.response] * count,
        group_n=torch.arange(count) // config.rollout.n,
        reward_n=reward_n,
        truncated_n=torch.zeros(count, dtype=torch.bool),
        engine_logp_r=torch.full((tokens,), -1.0) if config.algorithm.samples_from_policy else None,
        version_r=torch.zeros(tokens, dtype=torch.int64),
        place_n=torch.arange(count),
        trained_n=torch.ones(count, dtype=torch.bool),
        demonstration_n=torch.full((count,), config.algorithm.trains_on_demonstrations),
        component_n={name: reward_n.clone() for name in components},
    )

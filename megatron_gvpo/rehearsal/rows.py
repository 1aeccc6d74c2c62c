"""Makes up the rows of an optimizer update from a configuration's lengths: the fullest packs that can be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_gvpo.settings.config import Config
from megatron_gvpo.types import TrainBatch

PROMPT = 512  # tokens of a prompt, unless data.max_prompt_tokens is less


@dataclass(frozen=True)
class Size:
    """An update's rows: `micro_batches` packs on every data-parallel rank, of `rows_of_a_pack` rows each."""

    rows_of_a_pack: int
    prompt: int  # tokens
    response: int
    micro_batches: int
    micro_batches_of_run: int  # an update of the run has this many; the rehearsal's peak is the same

    @property
    def tokens_of_a_pack(self) -> int:
        return self.rows_of_a_pack * (self.prompt + self.response)


def size_of(config: Config, data_parallel: int, micro_batches: int | None = None) -> Size:
    """Sizes of the rows of an update on `data_parallel` ranks; `micro_batches`: default what peaks need.

    Packs are filled to train.max_tokens_per_micro_batch with rows of one length, at most the longest. Where
    whole groups fit into a pack and stay together, a pack has whole groups.
    """
    train, rollout, parallel = config.train, config.rollout, config.parallel
    budget = train.max_tokens_per_micro_batch * parallel.cp
    prompt = min(PROMPT, config.data.max_prompt_tokens or PROMPT)
    longest = prompt + rollout.max_tokens
    rows = math.ceil(train.prompts_per_step * rollout.n / train.mini_batches / data_parallel)
    together = config.algorithm.loss.couples_groups or train.requires_shared_prompts
    unit = rollout.n if together and rollout.n * longest <= budget else 1
    fitting = max(1, math.ceil(budget / (unit * longest))) * unit if longest <= budget else 1
    of_a_pack = min(fitting, rows)
    length = min(longest, budget // of_a_pack) if longest <= budget else longest
    response = min(rollout.max_tokens, max(length - prompt, length // 2))
    in_run = math.ceil(rows / of_a_pack)
    in_run += -in_run % parallel.pp if parallel.vpp > 1 else 0
    enough = parallel.pp * (2 if parallel.vpp > 1 else 1) + (parallel.vpp == 1)
    count = micro_batches or min(in_run, max(2, enough))
    return Size(of_a_pack, length - response, response, count, in_run)


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

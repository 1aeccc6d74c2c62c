"""Sizes of an optimizer update's packs, from a configuration's lengths: the fullest that can be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_gvpo.settings.config import Config

PROMPT = 512  # tokens of a prompt, unless data.max_prompt_tokens is less


@dataclass(frozen=True)
class Size:
    """An update's rows: `micro_batches` packs on every data-parallel rank, of `rows_of_a_pack` rows each."""

    rows_of_a_pack: int
    prompt: int  # in tokens
    response: int
    micro_batches: int
    micro_batches_of_run: int  # an update of the run has this many; its peak is the same

    @property
    def tokens_of_a_pack(self) -> int:
        return self.rows_of_a_pack * (self.prompt + self.response)


def size_of(config: Config, data_parallel: int, micro_batches: int | None = None) -> Size:
    """Sizes of the rows of an update on `data_parallel` ranks; `micro_batches`: default enough for the peak.

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

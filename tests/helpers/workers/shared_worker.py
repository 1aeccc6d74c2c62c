"""Rank function of test_shared_prompts.py: the same update with shared and with repeated prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers.distributed import forget_layout, run_number
from helpers.on_cpu import flash_on_cpu
from helpers.workers.gradient_worker import config_of, gradients_of
from megatron_gvpo.megatron.batch import PackedBatch


def run(directory: str) -> None:
    """Run this launch's part of work.pt, [(layout, budget, core, case), ...]; rank 0 writes a file for each.

    With the core "GPU", layers have the core attention of GPU runs in the place of the CPU's. On emulated
    GPUs they always have it.

    A file holds {shared: (outcome, log-probs of a scoring pass, tokens in this rank's packs)}, and under
    "default" whether this model shares prompts where the configuration does not say.
    """
    from megatron_gvpo.megatron.attention.core import SharedPromptAttention
    from megatron_gvpo.megatron.cpu import spec
    from megatron_gvpo.megatron.policy import Policy

    cores: dict[str, Any] = {}
    if not torch.cuda.is_available():
        flash_on_cpu.install()
        cores = {"CPU": spec.LocalAttention, "GPU": SharedPromptAttention}
    folder, packs = Path(directory), []
    pack = PackedBatch.pack

    def counted(*args: object, **options: object) -> PackedBatch:
        batch = pack(*args, **options)  # type: ignore[arg-type]
        packs.append(len(batch.token_t))
        return batch

    PackedBatch.pack = counted  # type: ignore[method-assign, assignment]
    for layout, budget, core, case in torch.load(folder / "work.pt", weights_only=False)[run_number()]:
        config = config_of(case, layout, folder)
        if torch.cuda.is_available():  # a GPU shares prompts where the configuration says so
            config = config.model_copy(
                update={"train": config.train.model_copy(update={"share_prompts": True})}
            )
        spec.LocalAttention = cores.get(core, spec.LocalAttention)  # type: ignore[misc]
        policy = Policy.of(config)
        results = {"default": policy.model.share_prompts}
        for shared in (False, True):
            policy.model.share_prompts = shared
            packs.clear()
            outcome = gradients_of(policy, case, config)
            tokens = sum(packs)
            results[shared] = outcome, policy.score(case.rows).cpu(), tokens
        if dist.get_rank() == 0:
            torch.save(results, folder / f"shared-{layout}-{case.name}-{budget}-{core}.pt")
        forget_layout()


def refused(directory: str) -> None:
    """Build the model in the directory with shared prompts; what the error says goes to `refused` in it."""
    from megatron_gvpo.core.errors import ConfigError
    from megatron_gvpo.megatron.model.build import build
    from megatron_gvpo.megatron.parallel import initialize
    from megatron_gvpo.settings.parallel import ParallelConfig
    from megatron_gvpo.settings.sections import ModelConfig

    folder = Path(directory)
    initialize(ParallelConfig(), seed=0)
    try:
        build(ModelConfig(path=directory, dtype="float32"), ParallelConfig(), share_prompts=True)
    except ConfigError as error:
        (folder / "refused").write_text(str(error))

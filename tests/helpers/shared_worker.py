"""Rank function of test_shared_prompts.py: the same update with shared and with repeated prompts."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from distributed import forget_layout, run_number
from gradient_worker import _gradients, config_of

from megatron_gvpo.megatron.batch import PackedBatch


def run(directory: str) -> None:
    """Run this launch's part of work.pt, [(layout, budget, case), ...]; rank 0 writes a file for each.

    A file holds {shared: (outcome, log-probs of a scoring pass, tokens in this rank's packs)}.
    """
    from megatron_gvpo.megatron.policy import Policy

    place, packs = Path(directory), []
    pack = PackedBatch.pack

    def counted(*args: object, **options: object) -> PackedBatch:
        batch = pack(*args, **options)  # type: ignore[arg-type]
        packs.append(len(batch.token_t))
        return batch

    PackedBatch.pack = counted  # type: ignore[method-assign, assignment]
    for layout, budget, case in torch.load(place / "work.pt", weights_only=False)[run_number()]:
        config = config_of(case, layout, place)
        policy = Policy(config)
        found = {}
        for shared in (False, True):
            policy.model.share_prompts = shared
            packs.clear()
            outcome = _gradients(policy, case, config)
            tokens = sum(packs)
            found[shared] = outcome, policy.score(case.rows), tokens
        if dist.get_rank() == 0:
            torch.save(found, place / f"shared-{layout}-{case.model}-{budget}.pt")
        forget_layout()

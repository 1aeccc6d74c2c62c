"""Rank function of test_expert_exchange.py: an update by all-to-all, and again by DeepEP's stand-in."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.distributed import run_number
from helpers.on_cpu import deep_ep_on_cpu
from helpers.workers.gradient_worker import Case, Layout, Outcome, config_of, gradients_of

LAYOUTS = (Layout(2, ep=2), Layout(4, ep=4))


def run(directory: str) -> None:
    """Rank 0 writes results-{layout}.pt: {(model, exchange): (log-probs of the rows, outcome)}."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    from megatron_gvpo.megatron.model import build
    from megatron_gvpo.megatron.policy import Policy

    deep_ep_on_cpu.install()
    folder, layout = Path(directory), LAYOUTS[run_number()]
    results: dict[tuple[str, str], tuple[Tensor, Outcome]] = {}
    cases: list[Case] = torch.load(folder / "work.pt", weights_only=False)
    for case in cases:
        for exchange in ("a2a", "deepep"):
            config = config_of(case, layout, folder)
            parallel = config.parallel.model_copy(update={"ep_exchange": exchange})
            config = config.model_copy(update={"parallel": parallel})
            with mock.patch.object(build, "check_exchange"):  # the check refuses a CPU and float32
                policy = Policy.of(config)
            dispatchers = [
                module.token_dispatcher
                for chunk in policy.model.chunks
                for module in chunk.modules()
                if hasattr(module, "token_dispatcher")
            ]
            is_flex = [isinstance(dispatcher, MoEFlexTokenDispatcher) for dispatcher in dispatchers]
            assert is_flex and set(is_flex) == {exchange == "deepep"}
            before = deep_ep_on_cpu.Buffer.dispatched
            results[case.model, exchange] = policy.score(case.rows), gradients_of(policy, case, config)
            assert (deep_ep_on_cpu.Buffer.dispatched > before) == (exchange == "deepep")
            parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        torch.save(results, folder / f"results-{layout}.pt")

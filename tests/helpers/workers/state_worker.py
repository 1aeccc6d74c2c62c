"""Rank function on CPUs: the bytes of weights, gradients and optimizer after an update."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist

from megatron_gvpo.megatron.device_memory import storages
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.settings.config import load_config


def run(file: str, out: str, *overrides: str) -> None:
    """Writes `out`/RANK.json: {part: bytes}. Adam's counts of steps, 4 bytes each, are left out."""
    policy = Policy.of(load_config([file], overrides))
    weights = storages(policy.model.weights())
    states = storages(t for t in policy.optimizer.tensors() if t.numel() > 1)
    parts = {
        "weights": weights,
        "gradients": storages(policy.model.gradient_buffers()),
        "optimizer": {address: s for address, s in states.items() if address not in weights},
    }
    sizes = {name: sum(s.nbytes() for s in part.values()) for name, part in parts.items()}
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(sizes))

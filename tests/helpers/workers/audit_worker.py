"""Rank function of test_audit_catches.py: family_worker.py's computation without one of the corrections."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from helpers.distributed import forget_layout, run_number


@contextmanager
def marks_stay(part: str, end: str) -> Iterator[None]:
    """Context in which parameters with these parts of a name keep megatron-core's own marks."""
    from megatron_gvpo.megatron.model import build
    from megatron_gvpo.megatron.model.settings import correct_marks

    class Rest:
        def __init__(self, chunk: Any) -> None:
            self.chunk = chunk

        def named_parameters(self) -> Iterator[tuple[str, Any]]:
            named = list(self.chunk.named_parameters())
            rest = [(name, p) for name, p in named if not (part in name and name.endswith(end))]
            assert len(rest) < len(named), f"no parameter is {part}{end}"
            return iter(rest)

    with mock.patch.object(build, "correct_marks", lambda chunks: correct_marks(map(Rest, chunks))):
        yield


@contextmanager
def rotary_key_is_of_own_heads() -> Iterator[None]:
    """Context in which latent attention's shared rotary key gets the gradient of one rank's heads."""
    from megatron_gvpo.megatron.cpu.packed_attention import LocalAttention

    with mock.patch.object(LocalAttention, "_sum_positional_gradient", lambda _, key: key):
        yield


@contextmanager
def latent_norms_stay() -> Iterator[None]:
    """Context in which the norms inside latent attention keep megatron-core's epsilon."""
    from megatron_gvpo.megatron.model import build

    with mock.patch.object(build, "correct_norms", lambda chunks: None):
        yield


@contextmanager
def z_loss_stays() -> Iterator[None]:
    """Context in which a router keeps Megatron-Bridge's z-loss."""
    from megatron_gvpo.megatron.model import build

    original = build.model_settings

    def settings(*arguments: Any) -> dict[str, Any]:
        return {name: value for name, value in original(*arguments).items() if name != "moe_z_loss_coeff"}

    with mock.patch.object(build, "model_settings", settings):
        yield


@contextmanager
def replicas_count_twice() -> Iterator[None]:
    """Context in which the norm counts a weight that all tensor-parallel ranks hold on each of them."""
    from megatron.core import tensor_parallel

    with mock.patch.object(tensor_parallel, "param_is_not_tensor_parallel_duplicate", lambda *_, **__: True):
        yield


@contextmanager
def tied_weights_count_twice() -> Iterator[None]:
    """Context in which the norm counts tied embeddings on the first and on the last stage."""
    from megatron.core.optimizer import optimizer

    with mock.patch.object(optimizer, "param_is_not_shared", lambda _: True):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "none": nullcontext,  # also for a fault that a refusal prevents, because the ranks do not check layouts
    "sinks": lambda: marks_stay("", ".softmax_offset"),
    "biases of experts": lambda: marks_stay(".experts.", ".bias"),
    "rotary key": rotary_key_is_of_own_heads,
    "latent norms": latent_norms_stay,
    "z-loss": z_loss_stays,
    "replicas twice": replicas_count_twice,
    "tied twice": tied_weights_count_twice,
}


def run(directory: str) -> None:
    from megatron_gvpo.verify.run import candidate_side, reference_side

    folder, layout, fault = torch.load(Path(directory) / "jobs.pt", weights_only=False)[run_number()]
    if layout is None:
        reference_side(json.loads((folder / "config.json").read_text()), folder, folder.name)
        return
    with FAULTS[fault]():
        candidate_side(layout, folder)
    forget_layout()

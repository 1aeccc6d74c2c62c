"""Rank function of test_delta_net_kernels.py: log-probs of a model with gated delta nets, for each fault.

A fault changes what megatron-core's layer gives to the functions of flash-linear-attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_gvpo.types import TrainBatch

Change = Callable[[dict[str, Any]], None]  # changes a call's keywords


def make_rows() -> TrainBatch:
    """Two sequences in one micro-batch."""
    from megatron_gvpo.verify import measures
    from megatron_gvpo.verify.shrink import VOCABULARY

    return measures.make_rows(VOCABULARY).select([0, 1])


def run(directory: str) -> None:
    from megatron_gvpo.megatron.policy import Policy
    from megatron_gvpo.verify.layout import ParallelLayout
    from megatron_gvpo.verify.run import config_of

    policy, rows = Policy.of(config_of(Path(directory) / "model", ParallelLayout(1))), make_rows()
    scores = {}
    for name, (function, change) in FAULTS.items():
        with changed(function, change) as calls:
            scores[name] = (policy.score(rows), len(calls))
    torch.save(scores, Path(directory) / "scores.pt")


@contextlib.contextmanager
def changed(function: str, change: Change) -> Iterator[list[str]]:
    """Context in which the layer's `function` gets other keywords. Yields a list that grows by each call."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    module = common if function == "l2norm" else gdn
    original = getattr(module, function)
    calls: list[str] = []

    def call(*args: Any, **options: Any) -> Any:
        calls.append(function)
        if change is _leave_out:
            return args[0]
        options |= dict(zip("qkv", args, strict=False)) if function == "chunk_gated_delta_rule" else {}
        change(options)
        return original(**options)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(module, function, call))
        if function == "chunk_gated_delta_rule":  # each layer has kept it since it was built
            for layer in _layers():
                patches.enter_context(mock.patch.object(layer, "gated_delta_rule", call))
        yield calls


def _layers() -> list[Any]:
    import gc

    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    return [thing for thing in gc.get_objects() if issubclass(type(thing), GatedDeltaNet)]


def _nothing(options: dict[str, Any]) -> None:
    pass


def _leave_out(options: dict[str, Any]) -> None:
    raise AssertionError("a function that is left out gets no keywords")


def _swap_gate_and_beta(options: dict[str, Any]) -> None:
    options["g"], options["beta"] = options["beta"], options["g"]


def _gate_of_the_next_head(options: dict[str, Any]) -> None:
    options["g"] = options["g"].roll(1, 2)


def _one_sequence(options: dict[str, Any]) -> None:
    ends = options["cu_seqlens"]
    options["cu_seqlens"] = torch.stack([ends[0], ends[-1]])


def _borders_one_token_late(options: dict[str, Any]) -> None:
    ends = options["cu_seqlens"].clone()
    ends[1:-1] += 1
    options["cu_seqlens"] = ends


def _another_scale(options: dict[str, Any]) -> None:
    options["scale"] = 1.0 / options["q"].shape[-1]


def _weights_from_the_end(options: dict[str, Any]) -> None:
    options["weight"] = options["weight"].flip(1).contiguous()


_RULE = "chunk_gated_delta_rule"
# name: (function, change of its keywords); the first and the last are without a fault.
FAULTS: dict[str, tuple[str, Change]] = {
    "nothing": (_RULE, _nothing),
    "beta and gate swapped": (_RULE, _swap_gate_and_beta),
    "a head's gate is another's": (_RULE, _gate_of_the_next_head),
    "states run over borders": (_RULE, _one_sequence),
    "states begin one token late": (_RULE, _borders_one_token_late),
    "another scale": (_RULE, _another_scale),
    "a convolution over borders": ("causal_conv1d", _one_sequence),
    "a convolution's weights from the end": ("causal_conv1d", _weights_from_the_end),
    "queries and keys not normalised": ("l2norm", _leave_out),
    "nothing at the end": (_RULE, _nothing),
}

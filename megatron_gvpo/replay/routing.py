"""Makes the judge's routers choose other experts: those that a run recorded, more, fewer, or exchanged ones.

Every router of transformers chooses experts by one `torch.topk` over a token's scores of all experts. A rule
replaces the result of this `topk`, and the router weights the chosen experts by its own scores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_gvpo.groups import Routing
from megatron_gvpo.huggingface.card import ModelCard

# A function that chooses experts: (number of the layer, scores [t, experts], k) -> experts [t, k].
Rule = Callable[[int, Tensor, int], Tensor]
_BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class RouterModules:
    """The routers of a transformers model, by the number of their layer; a dense model has none."""

    modules: dict[int, Any]
    experts: int
    per_token: int
    model: Any

    @staticmethod
    def of(model: Any) -> RouterModules:
        card = ModelCard(model.config.to_dict())
        modules = {}
        for name, module in model.named_modules():
            number = re.search(r"layers\.(\d+)\.", name)
            if number and card.experts and type(module).__name__.lower().endswith("router"):
                modules[int(number[1])] = module
        per_token = card.get("num_experts_per_tok") or card.get("experts_per_token") or 1
        return RouterModules(modules, card.experts, per_token, model)

    @contextmanager
    def choosing(self, rule: Rule | None) -> Iterator[None]:
        """Context in which `rule` chooses the experts; None: the routers choose."""
        if rule is None or not self.modules:
            yield
            return
        mode = _Choosing(rule, self.experts, self.per_token)
        hooks = []
        for number, module in self.modules.items():
            hooks.append(module.register_forward_pre_hook(lambda *_, n=number: mode.enter_layer(n)))
            hooks.append(module.register_forward_hook(lambda *_: mode.enter_layer(None)))
        try:
            with mode:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def has_bias(self) -> bool:
        return any(hasattr(module, _BIAS) for module in self.modules.values())

    @contextmanager
    def without_bias(self) -> Iterator[None]:
        """Context in which the routers choose without their bias."""
        biases = [getattr(module, _BIAS) for module in self.modules.values() if hasattr(module, _BIAS)]
        before = [bias.clone() for bias in biases]
        for bias in biases:
            bias.zero_()
        try:
            yield
        finally:
            for bias, values in zip(biases, before, strict=True):
                bias.copy_(values)


class _Choosing(TorchFunctionMode):
    """Replaces the result of `topk` in a router by the experts that a rule chooses."""

    def __init__(self, rule: Rule, experts: int, per_token: int) -> None:
        super().__init__()
        self._rule, self._experts, self._per_token = rule, experts, per_token
        self._layer: int | None = None

    def enter_layer(self, layer: int | None) -> None:
        self._layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._layer is None or func not in (torch.topk, torch.Tensor.topk):
            return result
        scores, indices = args[0], result.indices
        if scores.shape[-1] != self._experts or indices.shape[-1] != self._per_token:
            return result  # this `topk` chooses groups of experts
        flat = scores.reshape(-1, self._experts)
        chosen = self._rule(self._layer, flat, self._per_token)
        chosen = chosen.reshape(*scores.shape[:-1], -1)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def recorded_experts(routing: Routing) -> Tensor:
    """Return the experts that a run recorded, int64 [tokens - 1, layers, experts a token]."""
    kind = "<u1" if routing.width == 1 else "<i2"
    flat = np.frombuffer(routing.ids, kind).astype(np.int64)
    return torch.from_numpy(flat.reshape(-1, routing.layers, routing.per_token))


def through(experts_tlk: Tensor, begin: int = 0) -> Rule:
    """Return a rule that chooses these experts for the tokens of a sequence from token `begin` on.

    For tokens after the last one with experts, the router chooses.
    """

    def rule(layer: int, scores: Tensor, k: int) -> Tensor:
        own = scores.topk(k).indices
        recorded = experts_tlk[begin : begin + len(own), layer]
        return torch.cat([recorded, own[len(recorded) :]])

    return rule


def by_count(more: int) -> Rule:
    """Return a rule that chooses `more` experts than the model does (fewer, if it is negative)."""
    return lambda layer, scores, k: scores.topk(k + more).indices


def exchanged(positions: Sequence[tuple[int, int]]) -> Rule:
    """Return the router's own rule, but with the next best expert as the last one at each (token, layer)."""

    def rule(layer: int, scores: Tensor, k: int) -> Tensor:
        best = scores.topk(min(k + 1, scores.shape[1])).indices
        own = best[:, :k].clone()
        for token, at in positions:
            if at == layer:
                own[token, -1] = best[token, -1]
        return own

    return rule

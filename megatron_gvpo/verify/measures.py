"""Results of both sides, their differences, and the largest differences that rounding explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.types import TrainBatch

TEMPERATURE = 1.0  # both sides differentiate the loss of supervised fine-tuning
MICRO_BATCH = 32  # in tokens: the rows fill several packs of several rows
# Adam's first step is g / (|g| + eps). With the usual 1e-8 it is the sign of g, so that a rounding error in a
# gradient of 1e-9 flips the update. This eps is comparable to the gradients, so that the update is
# continuous.
UPDATE: dict[str, Any] = {
    "lr": 1e-2,
    "eps": 1e-3,
    "clip_grad": 0.5,
    "weight_decay": 0.1,
    "betas": (0.9, 0.95),
}
# (tokens of the prompt, tokens of the response)
_LENGTHS = [(3, 4), (3, 1), (1, 20), (7, 5), (5, 8), (2, 12), (4, 3)]


@dataclass(frozen=True)
class Computed:
    """Results of one side; tensors have the names of the checkpoint's files."""

    logp_r: Tensor  # log-probs of all response tokens
    gradients: dict[str, Tensor]
    norm: float  # norm over all gradients, by which the optimizer clips
    updated: dict[str, Tensor]  # weights after one update
    exported: dict[str, Tensor]  # weights before the update


@dataclass(frozen=True)
class Limits:
    """The largest differences that rounding explains."""

    logp: float = 1e-5  # in nats
    gradient: float = 2e-5  # relative to the largest entry of the same tensor's gradient
    norm: float = 1e-5  # relative

    @property
    def update(self) -> float:
        """The limit of an update's difference, as a part of the learning rate.

        A gradient with an error of d moves Adam's first step by lr d / eps at most. After clipping to a norm
        of 0.5, d is at most 0.5 times the gradient's limit.
        """
        return float(self.gradient * UPDATE["clip_grad"] / UPDATE["eps"])

    @staticmethod
    def for_rounding(own: Difference) -> Limits:
        """`own`: the difference between transformers in float32 and float64, which rounds alike."""
        least = Limits()
        return Limits(
            limit(least.logp, own.logp), limit(least.gradient, own.gradient), limit(least.norm, own.norm)
        )


def limit(least: float, rounding: float) -> float:
    """Four times the difference between transformers in float32 and float64 on this machine, if that is more
    than `least`; at most 1e-3, because errors in the computation differ by more.
    """
    return min(max(least, 4 * rounding), 1e-3)


def gradient_difference(computed: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference of a gradient, relative to its tensor's largest entry, and the tensor's name."""
    return _worst(computed, wanted, _of_largest)


@dataclass(frozen=True)
class Difference:
    """The largest differences between the two sides, and the tensors that have them."""

    logp: float
    gradient: float
    gradient_name: str
    norm: float
    update: float
    update_name: str
    exported: str | None  # first tensor that the export changes; None: every bit is equal

    def problem(self, limits: Limits) -> str | None:
        """A message with the wrong result and its error; None if all results are within the limits."""
        problems = []
        if not self.logp <= limits.logp:
            problems.append(f"log-probs differ by up to {self.logp:.2g} nats")
        if not self.gradient <= limits.gradient:
            problems.append(
                f"gradient of {self.gradient_name} differs by {self.gradient:.2g} of its largest entry"
            )
        if not self.norm <= limits.norm:
            problems.append(f"gradient norm differs by {self.norm:.2g} of it")
        if not self.update <= limits.update:
            problems.append(f"update of {self.update_name} differs by {self.update:.2g} of the learning rate")
        if self.exported is not None:
            problems.append(f"export changes {self.exported}")
        return "; ".join(problems) or None


def make_rows(vocabulary: int) -> TrainBatch:
    """Return rows of unequal lengths with random tokens."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    return TrainBatch(
        prompt_ids=[tokens(prompt) for prompt, _ in _LENGTHS],
        response_ids=[tokens(response) for _, response in _LENGTHS],
        group_n=torch.arange(len(_LENGTHS)),
        reward_n=torch.zeros(len(_LENGTHS)),
        truncated_n=torch.zeros(len(_LENGTHS), dtype=torch.bool),
    )


def compare(computed: Computed, wanted: Computed) -> Difference:
    """Return the differences of `computed` from the reference `wanted`."""
    gradient, gradient_name = gradient_difference(computed.gradients, wanted.gradients)
    update, update_name = _worst(computed.updated, wanted.updated, _of_learning_rate)
    return Difference(
        logp=float((computed.logp_r.double() - wanted.logp_r).abs().max()),
        gradient=gradient,
        gradient_name=gradient_name,
        norm=abs(computed.norm / wanted.norm - 1),
        update=update,
        update_name=update_name,
        exported=_first_changed(computed.exported, wanted.exported),
    )


def _worst(computed: Mapping[str, Tensor], wanted: Mapping[str, Tensor], measure: Any) -> tuple[float, str]:
    floor = 1e-8 * max(float(tensor.abs().max()) for tensor in wanted.values())
    worst = (0.0, "")
    for name, tensor in wanted.items():
        if name not in computed or computed[name].shape != tensor.shape:
            return float("inf"), name
        difference = (computed[name].double() - tensor).abs().max().item()
        if difference != difference:  # NaN
            return float("inf"), name
        worst = max(worst, (measure(difference, tensor, floor), name))
    return worst


def _of_largest(difference: float, wanted: Tensor, floor: float) -> float:
    """The difference relative to the tensor's largest entry.

    The difference is not relative to its own entry, which may be near 0 because its terms cancel. `floor`
    stands in for the largest entry where the whole tensor may be 0, as the gradient of an unused expert.
    """
    return max(0.0, difference - floor) / max(float(wanted.abs().max()), floor)


def _of_learning_rate(difference: float, wanted: Tensor, floor: float) -> float:
    return float(difference / UPDATE["lr"])


def _first_changed(computed: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str | None:
    if computed.keys() != wanted.keys():
        return min(computed.keys() ^ wanted.keys())
    for name, tensor in wanted.items():
        exported = computed[name]
        if exported.dtype != tensor.dtype or exported.shape != tensor.shape:
            return name
        if not torch.equal(exported.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)):
            return name
    return None

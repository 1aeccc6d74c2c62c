"""Computes the savings of training if a group's responses share their prompt (train.share_prompts)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from megatron_gvpo.planner.architecture import GIB, Architecture
from megatron_gvpo.planner.memory_model import activation_bytes
from megatron_gvpo.planner.step_time import forward_flops
from megatron_gvpo.planner.workload import Layout, Workload


@dataclass(frozen=True)
class Cost:
    """The mean cost of a group's responses in one micro-batch."""

    tokens: float
    pairs: float  # number of pairs of tokens that attend to each other
    flops: float  # forward and backward pass, without recomputation
    # Activations of all layers for the backward pass on one GPU, without recomputation, and without the
    # additional tensors of the core attention for shared prompts (activations.py).
    activation_gib: float


@dataclass(frozen=True)
class Sharing:
    """The cost of a group whose prompt comes before every response, and of one whose prompt comes once."""

    unshared: Cost
    shared: Cost

    def ratio(self, name: str) -> float:
        """Returns the cost with a shared prompt over the cost without: 1 if nothing is saved."""
        ratio: float = getattr(self.shared, name) / getattr(self.unshared, name)
        return ratio

    def to_dict(self) -> dict[str, dict[str, float]]:
        return {
            name: {"whole": cost, "shared": asdict(self.shared)[name], "ratio": round(self.ratio(name), 4)}
            for name, cost in asdict(self.unshared).items()
        }

    def text(self, used: bool) -> str:
        """Returns a line for the terminal. `used`: the plan shares prompts."""
        before, after = self.unshared, self.shared
        return (
            f"train.share_prompts ({'used' if used else 'not used'}): a group has {after.tokens:.0f} tokens "
            f"instead of {before.tokens:.0f} ({self.ratio('tokens'):.2f}), "
            f"{self.ratio('flops'):.2f} of the operations, and activations of {after.activation_gib:.1f} GiB "
            f"instead of {before.activation_gib:.1f}, if a micro-batch holds it whole"
        )


def sharing(model: Architecture, work: Workload) -> Sharing | None:
    """Computes the costs of a group; None for a model that cannot share prompts."""
    if model.latent is not None or model.window:
        return None
    return Sharing(_cost(model, work, shared=False), _cost(model, work, shared=True))


def _cost(model: Architecture, work: Workload, shared: bool) -> Cost:
    group = replace(work, prompts=1, share_prompts=shared)
    activations = model.layers * activation_bytes(model, Layout(1), group.tokens)
    return Cost(group.tokens, group.pairs, 3 * forward_flops(model, group), activations / GIB)

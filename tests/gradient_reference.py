"""The methods from their papers, in fp64, over `transformers` and plain autograd.

Sequence by sequence, without packing, padding, sharding or fused kernels, and without a line of the package's
losses: for what test_gradient_invariance.py compares Megatron with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from megatron_gvpo.types import Rows

VOCABULARY = 131  # prime: tensor parallelism must pad it


@dataclass
class Sample:
    """The rows of an optimizer step as lists, and the policy's log-probs [tokens] of every response."""

    logp: list[Tensor]  # differentiable
    old: list[Tensor]
    ref: list[Tensor]
    engine: list[Tensor]
    rewards: Tensor
    groups: list[list[int]]  # row indices

    @property
    def tokens(self) -> int:
        return sum(len(logp) for logp in self.logp)

    def sums(self, of: Sequence[Tensor]) -> Tensor:
        return torch.stack([x.sum() for x in of])


ReferenceLoss = Callable[[Sample], Tensor]


def save_models(directory: Path) -> None:
    """Two Qwen2 checkpoints, "tied" and "untied", whose attention, norms and biases are far from trivial."""
    for name in ("untied", "tied"):
        torch.manual_seed(0)
        config = transformers.Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.15,
            tie_word_embeddings=name == "tied",
            dtype="float32",
        )
        model = transformers.Qwen2ForCausalLM(config)
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(directory / name)


def load(directory: Path) -> torch.nn.Module:
    model: torch.nn.Module = transformers.Qwen2ForCausalLM.from_pretrained(directory, dtype="float32")
    return model.double().eval()


def log_probs(model: torch.nn.Module, rows: Rows, temperature: float) -> list[Tensor]:
    """Log-probs of every row's response tokens, one forward a row."""
    result = []
    for prompt, response in zip(rows.prompt_ids, rows.response_ids, strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits / temperature, -1)
        result.append(logp.gather(1, torch.tensor(response)[:, None])[:, 0])
    return result


def sample_of(rows: Rows, logp: list[Tensor]) -> Sample:
    """Absent columns mean the present policy."""
    present = [x.detach() for x in logp]

    def column(values: Tensor | None) -> list[Tensor]:
        return present if values is None else list(values.double().split(rows.length_n.tolist()))

    members: dict[int, list[int]] = {}
    for i, group in enumerate(rows.group_n.tolist()):
        members.setdefault(group, []).append(i)
    old, ref, engine = map(column, (rows.old_logp_r, rows.ref_logp_r, rows.engine_logp_r))
    return Sample(logp, old, ref, engine, rows.reward_n.double(), list(members.values()))


def gvpo(beta: float, var: bool = True, cov: bool = True, surrogate: bool = False) -> ReferenceLoss:
    """arXiv 2504.19599, eq. 8 expanded (section 3.3): -beta Cov(R, l) + beta^2/2 Var(l) - beta^2 Cov(l, l').

    Var and Cov are a group's unbiased ones, so a group of one has none; then the mean over all groups. As
    long as the Var term is in, the terms that do not depend on the policy are added, so that with all terms
    the value is 1/2 Var(R - beta (l - l')). `surrogate`: the loss -beta Cov(e, l) with the residual e held
    fixed, which has the same gradient.
    """

    def covariance(a: Tensor, b: Tensor) -> Tensor:
        return ((a - a.mean()) * (b - b.mean())).sum() / (len(a) - 1)

    def loss(sample: Sample) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        policy, reference = sample.sums(sample.logp), sample.sums(sample.ref)
        for group in (g for g in sample.groups if len(g) > 1):
            R, log_pi, log_ref = sample.rewards[group], policy[group], reference[group] * cov
            if surrogate:
                residual = (R - beta * (log_pi * var - log_ref)).detach()
                total += -beta * covariance(residual, log_pi)
                continue
            total += -beta * covariance(R, log_pi) - beta**2 * covariance(log_pi, log_ref)
            if var:
                total += beta**2 / 2 * log_pi.var() + (R + beta * log_ref).var() / 2
        return total / len(sample.groups)

    return loss


def importance(sample: Sample, i: int, cap: float | None) -> Tensor:
    """min(pi_old / pi_engine, cap) of row i's tokens (TIS); 1 without a cap."""
    if cap is None:
        return torch.ones_like(sample.old[i])
    return torch.exp(sample.old[i] - sample.engine[i]).minimum(torch.tensor(cap))


def gpg(age: str, cap: float | None = None) -> ReferenceLoss:
    """arXiv 2504.02546: -1/T sum_it alpha (R_i - mean R) log pi (eq. 5-6, F_norm = 1).

    alpha = B / (B - M) (eq. 7-8), with M of B samples in groups whose rewards are all equal; or the same
    ratio in tokens, `age="token"`.
    """

    def loss(sample: Sample) -> Tensor:
        size = [len(logp) if age == "token" else 1 for logp in sample.logp]
        valid = [group for group in sample.groups if len(set(sample.rewards[group].tolist())) > 1]
        alpha = sum(size) / sum(size[i] for group in valid for i in group)
        total = torch.zeros((), dtype=torch.float64)
        for group in valid:
            mean = sample.rewards[group].mean()
            for i in group:
                weighted = importance(sample, i, cap) * sample.logp[i]
                total -= alpha * (sample.rewards[i] - mean) * weighted.sum()
        return total / sample.tokens

    return loss


def grpo(clip: float, kl_coef: float, cap: float | None = None) -> ReferenceLoss:
    """arXiv 2402.03300, eq. 3-4: the clipped objective minus k3, mean over tokens, then over sequences."""

    def advantage(rewards: Tensor) -> Tensor:
        if len(rewards) == 1 or rewards.min() == rewards.max():
            return torch.zeros_like(rewards)
        return (rewards - rewards.mean()) / (rewards.std() + 1e-6)

    def loss(sample: Sample) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for group in sample.groups:
            for i, A in zip(group, advantage(sample.rewards[group]), strict=True):
                ratio = torch.exp(sample.logp[i] - sample.old[i])
                objective = torch.min(ratio * A, torch.clip(ratio, 1 - clip, 1 + clip) * A)
                ref_ratio = torch.exp(sample.ref[i] - sample.logp[i])
                k3 = ref_ratio - torch.log(ref_ratio) - 1
                total -= (importance(sample, i, cap) * objective - kl_coef * k3).mean()
        return total / len(sample.logp)

    return loss


def sft() -> ReferenceLoss:
    """Mean negative log-likelihood of a response token."""
    return lambda sample: -torch.cat(sample.logp).mean()

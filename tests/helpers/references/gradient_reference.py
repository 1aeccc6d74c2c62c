"""The methods as their papers have them, in fp64, over `transformers` and plain autograd.

test_gradient_invariance.py compares Megatron with it. It runs sequence by sequence, without packing, padding,
sharding or fused kernels, and uses no line of the package's losses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from megatron_gvpo.groups import Routing
from megatron_gvpo.supports import Support
from megatron_gvpo.types import TrainBatch
from megatron_gvpo.verify.reference import all_log_probs, load
from megatron_gvpo.verify.shrink import scatter

__all__ = ["load"]  # for the tests that use this module as the reference

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


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_LLAMA3_ROPE = {  # as Llama 3.1 has it: megatron-core knows no other
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_GROUPED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "untied": lambda: transformers.Qwen2Config(**COMMON),
    "tied": lambda: transformers.Qwen2Config(**{**COMMON, "tie_word_embeddings": True}),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=16),
    "llama3": lambda: transformers.LlamaConfig(**COMMON, head_dim=16, rope_parameters=_LLAMA3_ROPE),
    "mistral": lambda: transformers.MistralConfig(**COMMON, head_dim=16, sliding_window=None),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, **_EXPERTS, head_dim=16, num_experts=4, norm_topk_prob=True
    ),
    # As in DeepSeek-V2, a group gives two experts and is judged by its best one.
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **{**COMMON, **_MLA},
        **{**_EXPERTS, "num_experts_per_tok": 4},
        **{**_GROUPED, "n_routed_experts": 12, "n_group": 4, "topk_group": 2},
        topk_method="group_limited_greedy",
        rope_parameters=_YARN_ROPE,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**COMMON, **_MLA}, **_EXPERTS, **_GROUPED, rope_parameters=_YARN_ROPE
    ),
}


# As the documentation calls them.
FAMILY_NAMES = {
    "untied": "Qwen2",
    "tied": "Qwen2 (tied)",
    "qwen3": "Qwen3",
    "llama3": "Llama 3",
    "mistral": "Mistral",
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3",
}


def save_models(directory: Path, names: Iterable[str] | None = None) -> None:
    """Write checkpoints of CONFIGS, or of those with these names.

    Attention, norms, biases and routers are far from trivial.
    """
    for name in names or CONFIGS:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
        scatter(model)
        model.save_pretrained(directory / name)


def as_in_file(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename parameters as in checkpoints: in memory, transformers keeps a layer's experts in two tensors."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        stem, kind = name.rsplit(".", 1)
        for i, expert in enumerate(tensor):
            parts = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            for part_name, part in zip(kind.removesuffix("_proj").split("_"), parts, strict=True):
                tensors[f"{stem}.{i}.{part_name}_proj.weight"] = part
    return tensors


def log_probs(model: torch.nn.Module, rows: TrainBatch, temperature: float) -> list[Tensor]:
    """Log-probs of every row's response tokens, one forward a row."""
    result = []
    routing, supports = rows.routing or [None] * len(rows), rows.support or [None] * len(rows)
    columns = (rows.prompt_ids, rows.response_ids, routing, supports)
    for prompt, response, of_row, support in zip(*columns, strict=True):
        with contextlib.nullcontext() if of_row is None else routed(model, of_row):
            logp_rv = all_log_probs(model, prompt, response, temperature)
        if support is not None:
            logp_rv = torch.log_softmax(logp_rv.masked_fill(outside(support, logp_rv), -torch.inf), -1)
        result.append(logp_rv.gather(1, torch.tensor([response]).T)[:, 0])
    return result


def outside(support: Support, logp_rv: Tensor) -> Tensor:
    """True for tokens outside the supports, bool like logp_rv; a support of no tokens is the vocabulary."""
    is_outside = torch.zeros(logp_rv.shape, dtype=torch.bool)
    begin = 0
    ids = np.frombuffer(support.ids, "<i4")
    for position, count in enumerate(np.frombuffer(support.counts, "<i4").tolist()):
        if count:
            is_outside[position] = True
            is_outside[position, ids[begin : begin + count].tolist()] = False
        begin += count
    return is_outside


@contextlib.contextmanager
def routed(model: torch.nn.Module, routing: Routing) -> Iterator[None]:
    """Context in which all tokens of a sequence but its last go through these experts, with the router's own
    weights.
    """
    shape = (-1, routing.layers, routing.per_token)
    experts = torch.frombuffer(bytearray(routing.ids), dtype=torch.uint8).view(shape).long()
    deepseek = model.config.model_type == "deepseek_v3"

    def force(layer: int) -> Callable[..., Any]:
        def forced(_: Any, __: Any, output: Any) -> Any:
            logits, _, own = output
            chosen = torch.cat([experts[:, layer], own[-1:]])
            scores = (logits.sigmoid() if deepseek else logits.softmax(-1)).gather(1, chosen)
            scale = model.config.routed_scaling_factor if deepseek else 1.0
            return logits, scale * scores / scores.sum(-1, keepdim=True), chosen

        return forced

    gates = {i: layer.mlp.gate for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}
    hooks = [gate.register_forward_hook(force(i)) for i, gate in gates.items()]
    yield
    for hook in hooks:
        hook.remove()


def sample_of(rows: TrainBatch, logp: list[Tensor]) -> Sample:
    """The rows as a Sample; absent columns are those of the present policy."""
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

    Var and Cov are a group's unbiased estimates, so a group of one has none; the loss is their mean over all
    groups. Unless the Var term is left out, the terms that do not depend on the policy are added, so that
    with all terms the value is 1/2 Var(R - beta (l - l')). With `surrogate` the loss is -beta Cov(e, l) with
    the residual e held fixed, which has the same gradient.
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


def gvpo_plus_plus(alpha: float, power: float = 0.0, var: bool = True, cov: bool = True) -> ReferenceLoss:
    """arXiv 2609.21432: half the variance within groups of f(y) (log pi(y) - log pi_teacher(y)).

    f is |y|^(-alpha) (1 + R)^power. Without the policy's own part, Var, the covariance of what remains with
    f(y) log pi(y) is left of it, which is linear; without Cov the teacher's log-probs are 0.
    """

    def loss(sample: Sample) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        lengths = sample.sums([torch.ones_like(logp) for logp in sample.logp])
        f = lengths**-alpha * (1 + sample.rewards) ** power
        policy, teacher = f * sample.sums(sample.logp), f * sample.sums(sample.ref) * cov
        for group in (g for g in sample.groups if len(g) > 1):
            if var:
                total += (policy - teacher)[group].var() / 2
            else:
                centred = teacher[group] - teacher[group].mean()
                total -= (centred * policy[group]).sum() / (len(group) - 1)
        return total / len(sample.groups)

    return loss


def token_truncate(log_ratio: Tensor) -> Tensor:
    """Truncated importance sampling: min(pi_old / pi_engine, 1.2) of every token."""
    return log_ratio.exp().minimum(torch.tensor(1.2))


def sequence_truncate(log_ratio: Tensor) -> Tensor:
    """The same with the ratio of the whole response."""
    return log_ratio.exp().prod().minimum(torch.tensor(1.2)).expand_as(log_ratio)


def geometric_truncate(log_ratio: Tensor) -> Tensor:
    return log_ratio.mean().exp().minimum(torch.tensor(1.05)).expand_as(log_ratio)


def token_mask(log_ratio: Tensor) -> Tensor:
    """IcePop: the ratio in [0.7, 1.5], 0 outside."""
    ratio = log_ratio.exp()
    return ratio * ((ratio >= 0.7) & (ratio <= 1.5))


def sequence_mask(log_ratio: Tensor) -> Tensor:
    """MIS in [0.3, 2], where no token's ratio is below 0.4."""
    ratio = log_ratio.exp().prod()
    is_in_range = 0.3 <= ratio <= 2 and log_ratio.exp().min() >= 0.4
    return (ratio * is_in_range).expand_as(log_ratio)


Correction = Callable[[Tensor], Tensor]
# The options of the corrections that gradient_py has.
CORRECTIONS: dict[Correction, dict[str, Any]] = {
    token_truncate: {"cap": 1.2},
    sequence_truncate: {"level": "sequence", "cap": 1.2},
    geometric_truncate: {"level": "geometric", "cap": 1.05},
    token_mask: {"name": "mask", "low": 0.7, "high": 1.5},
    sequence_mask: {"name": "mask", "level": "sequence", "low": 0.3, "high": 2.0, "veto": 0.4},
}


def option(correction: Correction | None) -> dict[str, Any]:
    return {} if correction is None else {"importance": CORRECTIONS[correction]}


def importance(sample: Sample, i: int, correction: Correction | None) -> Tensor:
    """Weights of the tokens of row i, from log pi_old - log pi_engine; 1 without a correction."""
    if correction is None:
        return torch.ones_like(sample.old[i])
    return correction(sample.old[i] - sample.engine[i])


def gpg(age: str, correction: Correction | None = None) -> ReferenceLoss:
    """arXiv 2504.02546: -1/T sum_it alpha (R_i - mean R) log pi (eq. 5-6, F_norm = 1).

    alpha = B / (B - M) (eq. 7-8), where M of B samples are in groups whose rewards are all equal; with
    `age="token"` the same ratio counts tokens.
    """

    def loss(sample: Sample) -> Tensor:
        size = [len(logp) if age == "token" else 1 for logp in sample.logp]
        valid = [group for group in sample.groups if len(set(sample.rewards[group].tolist())) > 1]
        alpha = sum(size) / sum(size[i] for group in valid for i in group)
        total = torch.zeros((), dtype=torch.float64)
        for group in valid:
            mean = sample.rewards[group].mean()
            for i in group:
                weighted = importance(sample, i, correction) * sample.logp[i]
                total -= alpha * (sample.rewards[i] - mean) * weighted.sum()
        return total / sample.tokens

    return loss


def grpo(clip: float, kl_coef: float, correction: Correction | None = None) -> ReferenceLoss:
    """arXiv 2402.03300, eq. 3-4: the clipped objective minus k3, averaged over tokens, then over
    sequences.
    """

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
                total -= (importance(sample, i, correction) * objective - kl_coef * k3).mean()
        return total / len(sample.logp)

    return loss


def sft() -> ReferenceLoss:
    """Mean negative log-likelihood per response token."""
    return lambda sample: -torch.cat(sample.logp).mean()

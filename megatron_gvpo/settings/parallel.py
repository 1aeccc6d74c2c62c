"""The section `parallel`: how the model and a step's tokens are divided among the ranks, with padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megatron_gvpo.core.section import EVERY_KEY, Section

if TYPE_CHECKING:
    from megatron_gvpo.settings.sections import ModelConfig


OffloadedModule = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"
]
# Layers have an MLP or a mixture of experts. `core_attn` is missing, because fused attention already
# recomputes its scores; with `core_attn` Megatron would keep more.
MLPS_AND_EXPERTS: tuple[RecomputedModule, ...] = ("mlp", "moe")
# Sizes of groups for which DeepEP 1.2.1 has both kernels and a configuration (Buffer.get_dispatch_config).
DEEPEP_RANKS = (2, 4, 8, 16, 32, 64, 128, 144, 160)
RecomputedModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj"]


class ParallelConfig(Section):
    free_keys = EVERY_KEY

    tp: PositiveInt = 1  # Tensor-parallel ranks.
    pp: PositiveInt = 1  # Pipeline-parallel ranks.
    vpp: PositiveInt = 1  # Interleaved pipeline: stages of each pipeline rank.
    # Layers of each of the pp x vpp stages; default: equal.
    stage_layers: tuple[PositiveInt, ...] | None = None
    cp: PositiveInt = 1  # Context-parallel ranks, which share every sequence.
    # How context-parallel ranks on GPUs share: keys in a ring, all keys at once, or heads.
    cp_exchange: Literal["p2p", "all_gather", "a2a"] = "p2p"
    ep: PositiveInt = 1  # Expert-parallel ranks.
    # How tokens reach other ranks' experts: by all-to-all, or by the kernels of DeepEP, on GPUs only.
    ep_exchange: Literal["a2a", "deepep"] = "a2a"
    etp: PositiveInt = 1  # Tensor-parallel ranks of the experts.
    # Divide the tokens between tensor-parallel layers among their ranks; needs tp >= 2.
    sequence_parallel: bool = False
    overlap_grad_reduce: bool = False  # Sum gradients over the ranks during the backward.
    # Gather updated weights during the next forward; needs overlap_grad_reduce.
    overlap_param_gather: bool = False
    # Activations that the backward pass recomputes: none, parts of every layer, or whole layers.
    recompute: Literal["none", "selective", "full"] = "none"
    # With recompute=full: the number of layers of each stage; default: all.
    recompute_layers: PositiveInt | None = None
    # With recompute=selective: which parts of every layer; default: the MLP or the experts.
    recompute_modules: tuple[RecomputedModule, ...] = MLPS_AND_EXPERTS
    # Layers whose activations wait in host memory for the backward. On GPUs only.
    offload_layers: NonNegativeInt = 0
    # Parts of all layers whose inputs wait in host memory for the backward. On GPUs only.
    offload_modules: tuple[OffloadedModule, ...] = ()
    # Seconds after which a collective that hangs ends the run.
    timeout_seconds: int = Field(1800, gt=0, le=10**6)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel=true needs tp >= 2, whose ranks then share the tokens")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp >= 2: it interleaves the stages of a pipeline")
        if self.stage_layers is not None and len(self.stage_layers) != self.pp * self.vpp:
            raise ValueError(
                f"stage_layers={list(self.stage_layers)} names {len(self.stage_layers)} stages, and "
                f"pp={self.pp} x vpp={self.vpp} has {self.pp * self.vpp}"
            )
        if self.recompute_layers is not None and self.recompute != "full":
            raise ValueError(f"recompute_layers={self.recompute_layers} needs recompute=full")
        if self.recompute_modules != MLPS_AND_EXPERTS and self.recompute != "selective":
            raise ValueError(f"recompute_modules={list(self.recompute_modules)} needs recompute=selective")
        if self.offload_layers and (self.pp > 1 or self.recompute != "none"):
            raise ValueError(
                f"offload_layers={self.offload_layers} is not possible with pp={self.pp} and "
                f"recompute={self.recompute}: Megatron offloads whole layers with pp=1 and recompute=none; "
                "offload_modules goes with pp, and with recompute=selective"
            )
        self._check_offloaded_modules()
        self._check_expert_exchange()
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("overlap_param_gather=true needs overlap_grad_reduce=true")
        return self

    def _check_expert_exchange(self) -> None:
        if self.ep_exchange == "deepep" and (self.ep not in DEEPEP_RANKS or self.etp > 1):
            raise ValueError(
                f"ep_exchange=deepep with ep={self.ep} and etp={self.etp}: DeepEP's kernels are for "
                f"ep={', '.join(map(str, DEEPEP_RANKS))}, here with etp=1"
            )

    def _check_offloaded_modules(self) -> None:
        modules = list(self.offload_modules)
        again = set(self.recompute_modules) if self.recompute == "selective" else set()
        inside = {"moe": {"expert_fc1", "moe_act"}, "core_attn": {"core_attn"}}
        twice = {part for outer in again & set(inside) for part in inside[outer] & set(modules)}
        if modules and self.offload_layers:
            raise ValueError(f"offload_modules={modules} is not possible with offload_layers: either of them")
        if modules and self.recompute == "full":
            raise ValueError(f"offload_modules={modules} with recompute=full, which keeps nothing of them")
        if twice:
            raise ValueError(
                f"offload_modules={modules} with recompute_modules={list(self.recompute_modules)}, which "
                f"keep nothing of {sorted(twice)}"
            )
        if "attn_proj" in modules and "core_attn" not in modules:
            raise ValueError(
                f"offload_modules={modules}: attn_proj needs core_attn, whose backward needs the same tensor"
            )


@dataclass(frozen=True)
class Padding:
    """Multiples, in tokens, to which packs are padded. No other code computes these lengths."""

    sequence: int  # each sequence's length is a multiple of this
    pack: int  # the whole pack's length is a multiple of this, which is a multiple of `sequence`

    @staticmethod
    def of(model: ModelConfig, parallel: ParallelConfig) -> Padding:
        """Returns the padding that a model and its parallel layout need.

        Context parallelism cuts every sequence into 2 cp chunks. Sequence parallelism cuts a rank's tokens
        into tp shards. FP8 kernels process a shard in blocks of tokens. Separate adapters of q, k and v are
        interleaved for tp tokens at a time.
        """
        sequence = 2 * parallel.cp if parallel.cp > 1 else 1
        in_shards = parallel.sequence_parallel or model.adapter is not None
        shards = parallel.cp * (parallel.tp if in_shards else 1)
        block = 1 if model.fp8 is None else model.fp8.tokens
        return Padding(sequence, math.lcm(sequence, shards * block))

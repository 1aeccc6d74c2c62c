"""The layouts that planner_rehearsals.py rehearses: models of few layers with true widths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DENSE, TIED, QWEN3 = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-8B"
LLAMA, LARGE = "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-72B"
A3B, A22B = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"
V2, V3 = "deepseek-ai/DeepSeek-V2", "deepseek-ai/DeepSeek-V3"
VL, VL3, NEXT = "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-Next-80B-A3B-Instruct"

# Models that planner/models.json does not have: their config.json on the hub.
_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
OTHERS: dict[str, dict[str, Any]] = {
    VL: {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": False,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "in_chans": 3,
        },
    },
    VL3: {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 12288,
            "vocab_size": 151936,
            "max_position_embeddings": 262144,
            "rope_theta": 5000000,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
            },
        },
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
            "in_channels": 3,
        },
    },
    NEXT: {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
        "rope_theta": 10000000,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Row:
    """A rank of a layout: `keys` are words KEY=VALUE of the configuration."""

    model: str
    layers: int
    world: int
    keys: tuple[str, ...] = ()
    rank: int = 0
    tokens: int = 8192  # of a micro-batch of a rank

    @property
    def name(self) -> str:
        words = [word.removeprefix("parallel.") for word in self.keys]
        where = f"rank {self.rank} of {self.world}"
        model = self.model.partition("/")[2]
        return ", ".join([f"{model}, {self.layers} layers", *words, f"{self.tokens} tokens", where])


def _row(model: str, layers: int, world: int, words: str = "", rank: int = 0, tokens: int = 8192) -> Row:
    return Row(model, layers, world, tuple(f"parallel.{word}" for word in words.split()), rank, tokens)


_SP = "sequence_parallel=true"
_AGAIN = "recompute=selective recompute_modules"
ROWS = (
    _row(DENSE, 4, 8),
    _row(DENSE, 28, 8, f"tp=2 {_SP}"),
    _row(DENSE, 8, 8, "tp=2"),
    _row(DENSE, 8, 8, f"tp=4 {_SP}", 0, 16384),
    _row(DENSE, 8, 8, "tp=4"),
    _row(DENSE, 8, 8, "recompute=full", 0, 16384),
    _row(DENSE, 8, 8, f"tp=2 {_SP} {_AGAIN}=[mlp]"),
    _row(DENSE, 8, 8, "cp=2"),
    _row(DENSE, 8, 8, "pp=2"),
    _row(DENSE, 8, 8, "pp=2", 7),
    _row(QWEN3, 8, 8, f"tp=2 {_SP}"),
    _row(QWEN3, 8, 8, "pp=4 recompute=full", 2),
    _row(QWEN3, 8, 8, "pp=2 vpp=2"),
    _row(QWEN3, 7, 8, "pp=2 stage_layers=[4,3]", 7),
    _row(QWEN3, 8, 8, f"{_AGAIN}=[core_attn]"),
    _row(TIED, 12, 8, "", 0, 16384),
    _row(TIED, 12, 8, "pp=2", 4),
    _row(LLAMA, 6, 8, f"tp=2 {_SP} cp=2"),
    _row(LLAMA, 6, 8, "tp=8"),
    _row(LARGE, 4, 64, f"tp=8 {_SP}"),
    _row(LARGE, 4, 64, f"tp=8 pp=2 {_SP}", 0),
    _row(A3B, 4, 8, "ep=8"),
    _row(A3B, 4, 8, "ep=8 recompute=full"),
    _row(A3B, 4, 8, f"tp=2 ep=4 {_SP}"),
    _row(A3B, 4, 8, f"tp=2 ep=4 etp=2 {_SP}"),
    _row(A3B, 4, 8, f"ep=8 {_AGAIN}=[moe]"),
    _row(A3B, 8, 16, "ep=8 pp=2"),
    _row(A3B, 8, 16, "ep=8 pp=2", 15),
    _row(A3B, 4, 8, "ep=8 cp=2"),
    _row(A22B, 4, 256, f"tp=4 ep=64 {_SP} recompute=full"),
    _row(A22B, 4, 64, f"tp=4 ep=16 pp=2 {_SP}"),
    _row(V2, 4, 32, "ep=32", 0, 4096),
    _row(V2, 4, 64, f"tp=4 ep=32 {_SP}", 0, 4096),
    _row(V3, 6, 256, "ep=64 pp=2 recompute=full", 0, 4096),
    _row(V3, 6, 256, "ep=64 pp=2 recompute=full", 255, 4096),
    _row(V3, 6, 256, "ep=64 pp=2", 128, 4096),
    _row(V3, 4, 64, f"ep=64 {_AGAIN}=[moe,mla_up_proj]", 0, 4096),
    _row(VL, 4, 8),
    _row(VL, 4, 8, f"tp=2 {_SP}"),
    _row(VL3, 4, 8, "recompute=full"),
    _row(VL3, 4, 8, f"tp=2 {_SP}"),
)
# These need flash-linear-attention, which not every machine has.
DELTA_ROWS = (_row(NEXT, 4, 32, "ep=32"), _row(NEXT, 4, 32, "ep=32 recompute=full"))

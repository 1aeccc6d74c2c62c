"""The layouts that planner_rehearsals.py rehearses: models of few layers with true widths."""

from __future__ import annotations

from dataclasses import dataclass

DENSE, TIED, QWEN3 = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-8B"
LLAMA, LARGE = "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-72B"
A3B, A22B = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"
VL3B, VL4B = "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"
V2, V3 = "deepseek-ai/DeepSeek-V2", "deepseek-ai/DeepSeek-V3"

NEXT, NEXT_DENSE = "transformers/Qwen3-Next", "transformers/Qwen3.5"
_DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}
# The sizes that the configuration classes of transformers (5.19) have by default.
MODELS = {
    NEXT: {
        **_DELTA_NET,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 151936,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    NEXT_DENSE: {
        **_DELTA_NET,
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
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
        words = [word.partition(".")[2] for word in self.keys]
        where = f"rank {self.rank} of {self.world}"
        model = self.model.partition("/")[2]
        return ", ".join([f"{model}, {self.layers} layers", *words, f"{self.tokens} tokens", where])


def _row(model: str, layers: int, world: int, words: str = "", rank: int = 0, tokens: int = 8192) -> Row:
    sections = {_TOWER: "model", _SHARED: "train"}
    keys = tuple(f"{sections.get(word, 'parallel')}.{word}" for word in words.split())
    return Row(model, layers, world, keys, rank, tokens)


_TOWER = "train_vision=true"
_SHARED = "share_prompts=true"
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
    _row(VL3B, 36, 8),
    _row(VL3B, 36, 8, _TOWER),
    _row(VL3B, 36, 8, f"{_TOWER} recompute=full", 0, 16384),
    _row(VL4B, 36, 8),
    _row(VL4B, 36, 8, _TOWER),
    _row(VL4B, 36, 8, f"{_TOWER} tp=2 {_SP}"),
    _row(V2, 4, 32, "ep=32", 0, 4096),
    _row(V2, 4, 64, f"tp=4 ep=32 {_SP}", 0, 4096),
    _row(V3, 6, 256, "ep=64 pp=2 recompute=full", 0, 4096),
    _row(V3, 6, 256, "ep=64 pp=2 recompute=full", 255, 4096),
    _row(V3, 6, 256, "ep=64 pp=2", 128, 4096),
    _row(V3, 4, 64, f"ep=64 {_AGAIN}=[moe,mla_up_proj]", 0, 4096),
    _row(DENSE, 8, 8, _SHARED),
    _row(DENSE, 8, 8, f"{_SHARED} pp=2"),
    _row(DENSE, 8, 8, f"{_SHARED} tp=2 {_SP}", 0, 16384),
    _row(QWEN3, 8, 8, f"{_SHARED} tp=2 {_SP}"),
    _row(A3B, 4, 8, f"{_SHARED} ep=8"),
    _row(NEXT, 4, 8, "ep=8"),
    _row(NEXT, 4, 8, "ep=8 recompute=full"),
    _row(NEXT, 8, 16, f"tp=2 ep=8 {_SP}"),
    _row(NEXT_DENSE, 4, 8),
    _row(NEXT_DENSE, 8, 8, f"tp=2 {_SP}"),
    _row(NEXT_DENSE, 8, 8, "recompute=full"),
)

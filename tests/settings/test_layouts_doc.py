"""docs/reference/layouts.md says what the tests prove and the code refuses: its tables are written from both.

`pytest --write-tables tests/settings/test_layouts_doc.py` writes them anew.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from helpers.cases.gradient_cases import FAMILIES, RUNS, STEPS, small
from helpers.references.gradient_reference import FAMILY_NAMES
from helpers.suite.doc_tables import Hold
from helpers.workers import checkpoint_worker

from megatron_gvpo.checks.layout import check_layout
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.architectures import MODEL_TYPES
from megatron_gvpo.megatron.model.attention_kernel import Attention, check_attention, kernel
from megatron_gvpo.settings.config import build_config

FILE = Path(__file__).parents[2] / "docs" / "reference" / "layouts.md"
_DENSE = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 96,
    "head_dim": 8,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
}
_MOE = {
    **_DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "moe_intermediate_size": 32,
}
_LATENT = {
    **_DENSE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
}
# (sections of the configuration, model's config.json, processes)
REFUSED: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"parallel": {"sequence_parallel": True}}, _DENSE, 1),
    ({"parallel": {"tp": 3}}, _DENSE, 3),
    ({"parallel": {"pp": 4}}, _DENSE, 4),
    ({"parallel": {"vpp": 2}}, _DENSE, 1),
    ({"parallel": {"pp": 2, "vpp": 2}}, _DENSE, 2),
    ({"parallel": {"pp": 2, "stage_layers": [3, 2]}}, _DENSE, 2),
    ({"parallel": {"cp": 2}}, _DENSE, 3),
    ({"parallel": {"tp": 2, "cp": 4, "cp_exchange": "a2a"}}, _DENSE, 8),
    ({"parallel": {"cp": 2}}, {**_DENSE, "sliding_window": 4096}, 2),
    ({"parallel": {"ep": 2}}, _DENSE, 2),
    ({"parallel": {"ep": 4}}, _MOE, 4),
    ({"parallel": {"etp": 3}}, _MOE, 3),
    ({"parallel": {"tp": 2, "ep": 2}}, _MOE, 2),
    ({"parallel": {"tp": 2}}, _LATENT, 2),
    ({"parallel": {"overlap_param_gather": True}}, _DENSE, 1),
    ({"model": {"dtype": "float32", "fp8": {"recipe": "tensorwise"}}}, _DENSE, 1),
    ({"model": {"fp8": {"recipe": "delayed"}}}, _DENSE, 1),
    ({"model": {"fp8": {"recipe": "mxfp8", "weights": True}}}, _DENSE, 1),
    ({"model": {"fp8": {"recipe": "blockwise", "bf16_layers": 3}}}, _DENSE, 1),
    ({"model": {"fp8": {"recipe": "tensorwise"}}, "parallel": {"tp": 4}}, _DENSE, 4),
    (
        {
            "model": {"fp8": {"recipe": "tensorwise", "weights": True}},
            "optimizer": {"offload_fraction": 1.0},
        },
        _DENSE,
        1,
    ),
    (
        {
            "model": {"fp8": {"recipe": "tensorwise", "weights": True}},
            "algorithm": {"loss": {"reference": {"name": "fixed"}}},
        },
        _DENSE,
        1,
    ),
    (
        {
            "model": {"fp8": {"recipe": "tensorwise", "weights": True}},
            "rollout": {
                "engine": "sglang",
                "servers": {"colocated": True},
                "weights": {"transport": "shared"},
            },
        },
        _DENSE,
        1,
    ),
    ({"parallel": {"recompute_layers": 2}}, _DENSE, 1),
    ({"parallel": {"pp": 2, "recompute": "full", "recompute_layers": 4}}, _DENSE, 2),
    ({"parallel": {"recompute_modules": ["mlp"]}}, _DENSE, 1),
    ({"parallel": {"recompute": "selective", "recompute_modules": ["moe"]}}, _DENSE, 1),
    ({"parallel": {"recompute": "selective", "recompute_modules": ["mla_up_proj"]}}, _DENSE, 1),
    ({"parallel": {"pp": 2, "offload_layers": 1}}, _DENSE, 2),
    ({"parallel": {"offload_layers": 6}}, _DENSE, 1),
    ({"parallel": {"offload_layers": 1, "offload_modules": ["core_attn"]}}, _DENSE, 1),
    ({"parallel": {"offload_modules": ["attn_proj"]}}, _DENSE, 1),
    ({"parallel": {"offload_modules": ["core_attn"], "recompute": "full"}}, _DENSE, 1),
    (
        {
            "parallel": {
                "offload_modules": ["core_attn"],
                "recompute": "selective",
                "recompute_modules": ["core_attn"],
            }
        },
        _DENSE,
        1,
    ),
    ({"parallel": {"offload_modules": ["moe_act"]}}, _DENSE, 1),
    ({"parallel": {"offload_modules": ["attn_norm"]}}, _DENSE, 1),
    ({"train": {"share_prompts": True}, "parallel": {"cp": 2}}, _DENSE, 2),
    ({"train": {"share_prompts": True}}, {**_DENSE, "sliding_window": 4096}, 1),
    ({"train": {"share_prompts": True}, "parallel": {"offload_modules": ["core_attn"]}}, _DENSE, 1),
    ({"rollout": {"engine": "sglang", "router_replay": True}}, _DENSE, 1),
    ({}, {**_DENSE, "architectures": ["GPT2LMHeadModel"]}, 1),
    ({}, {**_MOE, "architectures": ["DeepseekV3ForCausalLM"], "norm_topk_prob": False}, 1),
    (
        {},
        {**_MOE, **{"architectures": ["DeepseekV3ForCausalLM"], "n_group": 3, "num_experts_per_tok": 4}},
        1,
    ),
    (
        {},
        {**_MOE, **{"architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 512, "q_lora_rank": None}},
        1,
    ),
    ({}, {**_MOE, "mlp_only_layers": [0]}, 1),
    ({}, {**_DENSE, "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 3}, 1),
    ({}, {**_DENSE, "rope_parameters": {"rope_type": "yarn"}}, 1),
]


def proven() -> str:
    """Rows of the table: layout, processes, families, optimizer updates compared with transformers, and those
    with overlap and small constants.
    """
    models: dict[Any, dict[str, int]] = {}
    for layout, name in RUNS:
        counts = models.setdefault(layout, {})
        counts[STEPS[name].model] = counts.get(STEPS[name].model, 0) + 1
    lines = ["| layout | processes | families | updates | cut down |", "|---|---|---|---|---|"]
    for layout in sorted(models, key=lambda layout: (layout.ranks, str(layout))):
        if layout.small:
            continue
        names = ", ".join(FAMILY_NAMES[model] for model in FAMILY_NAMES if model in models[layout])
        counts = (sum(models.get(of, {}).values()) for of in (layout, small(layout)))
        lines.append(f"| {layout} | {layout.ranks} | {names} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def resharded() -> str:
    lines = ["| family | saved by | resumed by |", "|---|---|---|"]
    for (model, source), layouts in checkpoint_worker.MOVES.items():
        lines.append(f"| {FAMILY_NAMES.get(model, model)} | {source} | {', '.join(map(str, layouts))} |")
    return "\n".join(lines)


def attention() -> str:
    """Rows of the table: the kernel for long packs or "refused", without flash-attn and with it."""
    shapes = {"up to 128": (128, 128), "192 and 128 (MLA)": (192, 128), "256": (256, 256)}
    lines = [
        "| GPU | model.dtype | deterministic | cp | head dimensions | without flash-attn | with it |",
        "|---|---|---|---|---|---|---|",
    ]
    cases = itertools.product(
        {"A100 (8.0)": (8, 0), "H100 (9.0)": (9, 0), "B200 (10.0)": (10, 0)}.items(),
        ("bfloat16", "float32"),
        (False, True),
        (1, 2),
    )
    for (gpu, capability), dtype, deterministic, cp in cases:
        answers: dict[tuple[str, str], list[str]] = {}
        for name, dims in shapes.items():
            of = Attention(dtype, deterministic, cp, *dims)
            answer = outcome(of, capability, False), outcome(of, capability, True)
            answers.setdefault(answer, []).append(name)
        for (without, with_it), names in answers.items():
            shown = "all" if len(names) == len(shapes) else "; ".join(names)
            ranks = "1" if cp == 1 else "2 or more"
            always = str(deterministic).lower()
            lines.append(f"| {gpu} | {dtype} | {always} | {ranks} | {shown} | {without} | {with_it} |")
    return "\n".join(lines)


def outcome(of: Attention, capability: tuple[int, int], flash_attention: bool) -> str:
    try:
        check_attention(of, capability, flash_attention)
    except ConfigError:
        return "refused"
    return kernel(of, capability, flash_attention)


def refusal(sections: dict[str, Any], model: dict[str, Any], processes: int) -> str:
    """The error message for a combination."""
    with TemporaryDirectory() as directory:
        [kind, *_] = MODEL_TYPES.get(model["architectures"][0], ["gpt2"])
        (Path(directory) / "config.json").write_text(json.dumps({"model_type": kind, **model}))
        values: dict[str, Any] = {
            "output_dir": "unused",
            "data": {"train": {"path": "unused"}},
            "train": {"steps": 1, "prompts_per_step": 1},
            **sections,
        }
        values["optimizer"] = {"lr": 1.0, **sections.get("optimizer", {})}
        values["train"] = {"steps": 1, "prompts_per_step": 1, **sections.get("train", {})}
        values["model"] = {"path": directory, **sections.get("model", {})}
        try:
            check_layout(build_config(values), processes)
        except ConfigError as error:
            return str(error).replace(directory, "DIR")
    raise AssertionError(f"not refused: {sections} on {processes} process(es)")


def refused() -> str:
    lines = ["| configuration | refused with |", "|---|---|"]
    for sections, model, processes in REFUSED:
        base = _MOE if "num_experts" in model else _DENSE
        special = {name: value for name, value in model.items() if base.get(name) != value}
        keys = [f"{section}.{k}={json.dumps(v)}" for section, d in sections.items() for k, v in d.items()]
        keys += [f"config.json: {name}={json.dumps(value)}" for name, value in special.items()]
        reason = refusal(sections, model, processes).replace("|", "\\|")
        lines.append(f"| `{' '.join(keys)}` | {reason} |")
    return "\n".join(lines)


TABLES = {"proven": proven, "resharded": resharded, "attention": attention, "refused": refused}


def test_the_document_is_current(hold_current: Hold) -> None:
    assert set(FAMILIES) < set(FAMILY_NAMES)
    hold_current(FILE, TABLES)

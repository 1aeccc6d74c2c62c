"""Every layout of docs/reference/layouts.md, and every kind of training, is rehearsed with a small model.

A rank runs what it runs on a GPU: build, scoring, two updates, a checkpoint's layout, export. Many cases
share a process, and so its imports. Wrong devices, types, shapes and missing attributes would end one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import on_null_cuda
from helpers.on_null_cuda import MIXTURE, QWEN
from helpers.paths import ROOT
from helpers.references.transformer_engine_source import wheel_source

from megatron_gvpo.rehearsal.nullcuda.devices import DEVICES
from megatron_gvpo.rehearsal.process import environment_of_ranks, run_jobs
from megatron_gvpo.rehearsal.rank import RankJob

LATENT: dict[str, Any] = {
    **QWEN,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}
_TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 256}
_TOWER |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_TOKENS = {"image_token_id": 1000, "video_token_id": 1001, "vision_start_token_id": 1002}
_THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
VISION: dict[str, Any] = {
    **QWEN,
    **_TOKENS,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "vision_config": {**_TOWER, "depth": 2, "window_size": 56, "fullatt_block_indexes": [1]},
}
DEEP_VISION: dict[str, Any] = {
    **_TOKENS,
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {**QWEN, "model_type": "qwen3_vl_text", "head_dim": 64, "rope_parameters": _THREE_AXES},
    "vision_config": {
        **_TOWER,
        "depth": 3,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
DELTA: dict[str, Any] = {
    **QWEN,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
MODELS = {"qwen": QWEN, "mixture": MIXTURE, "latent": LATENT, "delta": DELTA}
MODELS |= {"vision": VISION, "deep vision": DEEP_VISION}
FAMILIES = {"Qwen3-MoE": "mixture", "DeepSeek-V3": "latent", "DeepSeek-V2": "latent"}  # others: qwen


@dataclass(frozen=True)
class Case:
    """A rank of a run: the model's name, the world's size and words KEY=VALUE of the configuration."""

    model: str
    world: int
    words: tuple[str, ...] = ()
    rank: int = 0
    gpu: str = "h100"


def _documented() -> dict[str, Case]:
    """The layouts of the page's first table, each with the first of its families."""
    text = (ROOT / "docs/reference/layouts.md").read_text()
    table = text.partition("<!-- proven -->")[2].partition("<!-- end of proven -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines() if "|" in line
    ]
    return {
        name: Case(
            FAMILIES.get(families.split(", ")[0].split(" (")[0], "qwen"), int(processes), keys_of(name)
        )
        for name, processes, families, *_ in rows[2:]
    }


def keys_of(layout: str) -> tuple[str, ...]:
    """The configuration of a layout's name, such as tp2-pp2-vpp2-sp."""
    words: list[str] = []
    for part in layout.split("-"):
        if sized := re.fullmatch(r"(tp|pp|vpp|cp|ep|etp)(\d+)", part):
            words.append(f"parallel.{sized[1]}={sized[2]}")
        elif part == "sp":
            words.append("parallel.sequence_parallel=true")
        elif part == "overlap":
            words += ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]
        elif part.startswith("offload"):
            words.append(f"optimizer.offload_fraction={part.removeprefix('offload')}")
        elif part.startswith("stages"):
            words.append(f"parallel.stage_layers=[{part.removeprefix('stages').replace('.', ',')}]")
        elif again := re.fullmatch(r"recompute_full(?:_(\d+))?", part):
            words += [
                "parallel.recompute=full",
                *([f"parallel.recompute_layers={again[1]}"] if again[1] else []),
            ]
        elif again := re.fullmatch(r"recompute_selective_(.+)", part):
            modules = again[1].replace("+", ",")
            words += ["parallel.recompute=selective", f"parallel.recompute_modules=[{modules}]"]
        elif part != "single" and not re.fullmatch(r"dp\d+", part):
            raise ValueError(f"{layout}: {part} is not known")
    return tuple(words)


OPTIONS: dict[str, Case] = {
    "dense": Case("qwen", 8),
    "experts": Case("mixture", 8, ("parallel.ep=4",)),
    "experts recomputed": Case("mixture", 8, ("parallel.ep=4", "parallel.recompute=selective")),
    "latent attention": Case("latent", 8, ("parallel.ep=4",)),
    "adapters": Case("qwen", 2, ("model.adapter={rank: 8, alpha: 8}",)),
    "critic": Case("qwen", 2, ("algorithm=ppo",)),
    "reference and entropy": Case("qwen", 2, ("algorithm=grpo", "algorithm.loss.entropy_coef=0.01")),
    "distillation": Case("qwen", 2, ("algorithm=opd", "teacher.path=model")),
    "distillation of distributions": Case("qwen", 2, ("algorithm=opd_full", "teacher.path=model")),
    "fp8 tensorwise": Case("qwen", 2, ("model.fp8.recipe=tensorwise",)),
    "fp8 blockwise": Case("qwen", 2, ("model.fp8.recipe=blockwise",)),
    "fp8 mxfp8": Case("qwen", 2, ("model.fp8.recipe=mxfp8",), gpu="b200"),
    "fp8 weights": Case("qwen", 2, ("model.fp8.recipe=tensorwise", "model.fp8.weights=true")),
    "offloaded optimizer": Case("qwen", 2, ("optimizer.offload_fraction=0.5",)),
    "offloaded layers": Case("qwen", 2, ("parallel.offload_layers=2",)),
    "offloaded modules": Case("qwen", 2, ("parallel.offload_modules=[core_attn,attn_proj]",)),
    "last stage": Case("qwen", 4, ("parallel.pp=2",), rank=3),
    "virtual stages": Case("qwen", 4, ("parallel.pp=2", "parallel.vpp=2"), rank=3),
    "context all gathered": Case("qwen", 4, ("parallel.cp=2", "parallel.cp_exchange=all_gather")),
    "context heads": Case("qwen", 4, ("parallel.cp=2", "parallel.cp_exchange=a2a")),
    "shared prompts": Case("qwen", 2, ("train.share_prompts=true",)),
    "delta nets": Case("delta", 2),
    "delta nets divided": Case("delta", 4, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    "images": Case("vision", 2),
    "images with a trained tower": Case("vision", 2, ("model.train_vision=true",)),
    "images recomputed": Case("vision", 2, ("model.train_vision=true", "parallel.recompute=full")),
    "images divided": Case("vision", 4, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    "images on the last stage": Case("vision", 4, ("parallel.pp=2",), rank=3),
    "deep images": Case("deep vision", 2, ("model.train_vision=true",)),
    "deep images divided": Case("deep vision", 4, ("parallel.tp=2", "parallel.sequence_parallel=true")),
}
CASES = _documented() | OPTIONS
# For log-probs, metrics and the norm of the gradient. The libraries' own code for images waits 43 times or
# more in each forward of a micro-batch.
WAITS_OF_AN_UPDATE = 3
IN_TEST = ("tp2-pp2-vpp2-sp", "latent attention", "adapters", "fp8 blockwise", "images recomputed")


def test_the_page_has_layouts() -> None:
    assert len(_documented()) > 30
    assert (
        keys_of("tp2-sp-recompute_selective_core_attn+mlp")[-1]
        == "parallel.recompute_modules=[core_attn,mlp]"
    )


def _job(case: Case, folder: Path) -> RankJob:
    folder.mkdir(parents=True)
    file, made = on_null_cuda.write_model(folder, MODELS[case.model]), [str(folder / "model")]
    words = [word.replace("teacher.path=model", f"teacher.path={folder / 'model'}") for word in case.words]
    return RankJob([str(file)], words, case.rank, case.world, 2 if case.world < 4 else None, made)


def rehearse(names: Sequence[str], folder: Path) -> list[str]:
    """Rehearse the cases; returns what went wrong, a line each. Cases of one kind share a process."""

    def kind(name: str) -> tuple[str, bool]:
        return CASES[name].gpu, "offload_modules" in " ".join(CASES[name].words)

    problems = []
    for number, ((gpu, _), group) in enumerate(itertools.groupby(sorted(names, key=kind), kind)):
        variables = environment_of_ranks(DEVICES[gpu], 8, 8 * 2**30)
        variables["PYTHONPATH"] += f":{wheel_source('fla-core')}"
        here = list(group)
        jobs = [_job(CASES[name], folder / f"{number}-{name}") for name in here]
        (folder / str(number)).mkdir()
        results = run_jobs(jobs, variables, folder / str(number))
        for name in here:
            try:
                result = next(results)
            except Exception as error:  # a rank that failed ends the others
                problems.append(f"{name}: {error}")
                break
            updates = [phase for phase in result["phases"] if phase["name"].endswith("update")]
            if len(updates) != 2 or any(phase["results"]["skipped"] for phase in updates):
                problems.append(f"{name}: {json.dumps(result['phases'][-1])}")
                continue
            waits = updates[-1]["counts"].get("host_waits", 0)
            if "images" in name and waits > WAITS_OF_AN_UPDATE:
                problems.append(f"{name}: the host waits {waits} times in the second update")
    return problems


def test_some_run(tmp_path: Path) -> None:
    on_null_cuda.environment()
    assert not rehearse(IN_TEST, tmp_path)


@pytest.mark.proof
@pytest.mark.parametrize(
    "names", itertools.batched(CASES, 10), ids=lambda names: f"{names[0]} to {names[-1]}"
)
def test_all_run(tmp_path: Path, names: tuple[str, ...]) -> None:
    on_null_cuda.environment()
    assert not rehearse(names, tmp_path)

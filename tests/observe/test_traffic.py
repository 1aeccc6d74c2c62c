"""Real megatron-core sends exactly the bytes that the formulas predict, counted below torch.distributed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed  # registers its operators
from helpers.distributed import launch
from helpers.paths import ROOT

from megatron_gvpo.planner import architecture
from megatron_gvpo.planner.traffic import Pack, update_bytes
from megatron_gvpo.planner.workload import Layout

sys.path.append(str(ROOT / "benchmarks"))

from lib.scaling import traffic_counter as traffic

LENGTHS = [(5, 9), (5, 2), (3, 30), (3, 17), (7, 1), (7, 12), (4, 6), (4, 6)]
TP2SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"tp": 2, "pp": 2}),
    (4, TP2SP | {"pp": 2}),
    (2, TP2SP),
    (2, {"pp": 2}),
    (2, {}),
    (4, {"tp": 2}),
    (4, {"pp": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}),
]
MORE_LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"tp": 2}),
    (4, TP2SP),
    (4, {"pp": 2}),
    (4, {"pp": 4}),
    (4, {"tp": 4, "sequence_parallel": True}),
    (4, {}),
]


def make_model(directory: Path, **changes: Any) -> Path:
    """A Qwen whose sizes no formula can confuse; its vocabulary must be padded."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 131,
        "hidden_size": 80,
        "intermediate_size": 44,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
    }
    kinds = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    kind = changes.pop("kind", "qwen2")
    config, model = kinds[kind]
    if kind == "qwen3":
        sizes["head_dim"] = 12
    model(config(**sizes, **changes)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.proof)], ids=["few", "more"]
)
def test_what_is_sent_is_what_the_formulas_say(tmp_path: Path, layouts: list[tuple[int, dict[str, Any]]]):
    untied = make_model(tmp_path / "untied", tie_word_embeddings=False)
    tied = make_model(tmp_path / "tied", tie_word_embeddings=True, kind="qwen3")
    cases = [
        {
            "model": str(model),
            "ranks": ranks,
            "parallel": parallel,
            "lengths": LENGTHS,
            "budget": 56,
            "at_step_start": True,
        }
        for model, chosen in ((untied, layouts), (tied, LAYOUTS[:2]))
        for ranks, parallel in chosen
    ]
    cases.append(cases[-1] | {"at_step_start": False})  # the head's other backward, which comes late
    cases.sort(key=lambda case: case["ranks"])
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    launch("helpers.workers.traffic_worker:run", [case["ranks"] for case in cases], str(tmp_path))

    for number, case in enumerate(cases):
        model = architecture.load(case["model"])
        sizes = {key: case["parallel"].get(key, 1) for key in ("tp", "pp")}
        layout = Layout(case["ranks"], **sizes)
        for rank in range(case["ranks"]):
            seen = json.loads((tmp_path / f"{number}_{rank}.json").read_text())
            packs = [Pack(*pack) for pack in seen["packs"]]
            assert packs
            expected = update_bytes(
                model,
                layout,
                seen["stage"],
                packs,
                element=4,
                sequence_parallel=case["parallel"].get("sequence_parallel", False),
            )
            counted = {tuple(key.split()): size for key, size in seen["sent"].items()}
            # Bookkeeping, once an update: the gradient norm, a number at a time, and every rank's metrics.
            assert counted.pop(("all_reduce", "norm"), 0) <= 16
            assert counted.pop(("all_gather", "world"), 0) < 4096 * case["ranks"]
            expected = {key: size for key, size in expected.items() if size}
            assert counted == expected, (case, rank)


def test_what_is_not_counted_is_refused():
    deepseek = architecture.load("deepseek-ai/DeepSeek-V3")
    with pytest.raises(ValueError, match="dense models"):
        update_bytes(deepseek, Layout(8), 0, [Pack(8, 4)])


def test_every_operator_of_torch_distributed_is_known():
    """The list is torch's own: an unknown operator would be refused in the middle of a run."""
    schemas = (schema.name for schema in torch._C._jit_get_all_schemas())
    assert {name.removeprefix("c10d::") for name in schemas if name.startswith("c10d::")} == {
        *traffic._OPERATORS,
        *traffic._SILENT,
    }

"""How often the host waits for the GPU: counted by the null CUDA with the real libraries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.on_null_cuda import MIXTURE, QWEN, counts_of, phase, rehearse, write_model
from test_configurations import MODELS

from megatron_gvpo.planner import workload
from megatron_gvpo.rehearsal import report

LATENT = QWEN | {  # a DeepSeek-V3 without experts, whose counts a layer waits for
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def waits(folder: Path, model: dict[str, Any], layers: int) -> int:
    sizes = {"num_hidden_layers": layers, "first_k_dense_replace": layers}  # the second: of DeepSeek's alone
    config = write_model(folder / str(layers), model | sizes)
    result = rehearse(str(config), "--world", "1")
    return int(phase(result, "second update")["counts"].get("host_waits", 0))


def of_a_layer(folder: Path, model: dict[str, Any]) -> float:
    return (waits(folder, model, 4) - waits(folder, model, 2)) / 2


# Waits of the host for the device in a micro-batch of a second update, by kind of model (four layers each).
# The micro-batch goes forward twice, as its group is scored before. A layer of experts waits for their counts
# once in each forward; latent attention has three such layers. The first gated delta net of a pack waits once
# in each forward, for the number of the pack's chunks.
# The two with images have two of them in a micro-batch, whose grids and lengths are known on the host.
WAITS = {"qwen": 0, "mixture": 4 * 2, "latent": 3 * 2, "delta": 2, "vision": 0, "deep vision": 0}


def of_a_micro_batch(names: Sequence[str], folder: Path) -> dict[str, float]:
    """The waits of an update with four micro-batches beyond those of one with two, each."""
    counts = counts_of({name: MODELS[name] for name in names}, (2, 4), folder)
    few, many = (
        {name: counts[name, n]["second update"].get("host_waits", 0) for name in names} for n in (2, 4)
    )
    return {name: (many[name] - few[name]) / 2 for name in names}


def test_a_micro_batch_of_a_dense_model_waits_for_nothing(tmp_path: Path) -> None:
    assert of_a_micro_batch(["qwen"], tmp_path) == {"qwen": WAITS["qwen"]}


@pytest.mark.proof
def test_a_micro_batch_waits_as_often_as_its_kind_of_model_is_known_to(tmp_path: Path) -> None:
    assert of_a_micro_batch(list(WAITS), tmp_path) == WAITS


@pytest.mark.proof
def test_latent_attention_waits_for_nothing(tmp_path: Path) -> None:
    """megatron-core's own rotation waits four times a layer, and then goes through the sequences."""
    assert of_a_layer(tmp_path, LATENT) == of_a_layer(tmp_path / "qwen", QWEN) == 0


@pytest.mark.proof
def test_a_language_model_with_images_waits_for_nothing_in_its_layers(tmp_path: Path) -> None:
    """megatron-core's own rotation of packs in three axes waits for every sequence in every layer."""
    assert of_a_layer(tmp_path, MODELS["vision"]) == 0


def test_virtual_stages_wait_for_the_norm_alone(tmp_path: Path) -> None:
    """The shapes of their messages come from the packs."""
    config = write_model(tmp_path, QWEN | {"num_hidden_layers": 4})
    result = rehearse(str(config), "--world", "2", "parallel.pp=2", "parallel.vpp=2")
    counts = {name: phase(result, name)["counts"] for name in ("scoring", "second update")}
    assert {name: of_phase.get("host_waits", 0) for name, of_phase in counts.items()} == {
        "scoring": 0,
        "second update": 1,
    }


@pytest.mark.proof
def test_a_layer_of_experts_waits_once_for_their_counts(tmp_path: Path) -> None:
    """A micro-batch of a layer; the pass itself waits once, for its log-probs.

    The first rehearsal is not looked at: where torch.compile has not compiled for this model yet, it waits 34
    times more, in its first phase.
    """
    for layers in (1, 2, 4):
        config = write_model(tmp_path / str(layers), MIXTURE | {"num_hidden_layers": layers})
        result = rehearse(str(config), "--world", "2", "parallel.ep=2")
        [rank] = result["ranks"]
        expected = 1 + layers * rank["pack"]["micro_batches"]
        assert layers == 1 or phase(result, "scoring")["counts"]["host_waits"] == expected


@pytest.mark.proof
def test_a_teacher_beside_the_policy_is_waited_for_twice_an_update(tmp_path: Path) -> None:
    """When its weights are on the GPU and when they have left it; besides, for the metrics and the norm.

    Fails on the old code, which copied its weights to the host again and waited for every tensor: 35 times.
    """
    config = write_model(tmp_path)
    teacher = f"teacher.path={tmp_path / 'model'}"
    result = rehearse(str(config), "--world", "2", "algorithm=opd_full", teacher)
    assert phase(result, "second update")["counts"]["host_waits"] == 4


def test_waits_that_leave_the_device_idle_are_a_line() -> None:
    """One second of matrix products: 2,500 waits of 20 microseconds are a twentieth of it."""
    gpu = workload.gpu("h100")
    second = int(gpu.flops(fp8=False))

    def lines(waits: int) -> list[str]:
        counts = {"matrix_flops": second, "host_waits": waits, "kernel_launches": 3 * waits}
        return report.bounds({"name": "first update", "counts": counts}, gpu)

    assert lines(0) == lines(2490) == []
    [line] = lines(2510)
    assert line == (
        "first update: the host waits 2,510 times for the device, which is idle then, in all for about "
        "50 ms, 5% of the matrix products' time"
    )
    launching, idle = lines(100_000)
    assert launching.endswith("take the host about 1.5 s, and the matrix products 1.0 s: the host bounds it")
    assert "in all for about 2000 ms, 200% of" in idle

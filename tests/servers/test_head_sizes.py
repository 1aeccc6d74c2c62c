"""Models that vLLM's kernels for CPUs cannot serve are refused before a server is started."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers.inputs.family_task import engine_config, tiny_config
from helpers.servers.real_servers import engine_python
from helpers.tiny_run import configure

from megatron_gvpo.checks.preflight import preflight
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.architectures import SAME_MODEL
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.servers.cpu_engines import CPU_HEAD_SIZES, check_on_cpu, check_rollout_model
from megatron_gvpo.servers.launch.start import start_servers
from megatron_gvpo.servers.model_servers import Checkpoint, open_servers
from megatron_gvpo.servers.server import PLUGINS
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.reward_servers import RewardServers

# Prints the sizes up to 1024 that the kernel accepts: it refuses others before it computes.
ASK = """
import torch
from vllm import _custom_ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa as isa

current_platform.import_kernels()
for size in range(2, 1026, 2):
    try:
        _custom_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=4, num_kv_heads=2, head_dim=size, dtype=torch.float32, causal=True,
            seq_lens=torch.tensor([4], dtype=torch.int32), sliding_window_size=-1, enable_kv_split=False,
            query_start_loc=torch.tensor([0, 4], dtype=torch.int32), isa=isa(torch.float32, 128, size),
        )
    except RuntimeError as error:
        assert f"head_dim={size}" in str(error), error
    else:
        print("size", size)
"""


def with_heads(task: Path, directory: Path, size: int, *overrides: str) -> Config:
    """A run of the tiny model, with heads of another size in its config.json."""
    shutil.copytree(task / "model", directory)
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"head_dim": size}))
    return configure(task, directory / "out", f"model.path={directory}", *overrides)


def test_a_model_without_a_kernel_is_refused(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = with_heads(task, tmp_path / "16", 16, "rollout.engine=vllm")
    message = r"rollout\.engine=vllm .* model\.path=\S*16 has attention heads of 16 elements, .* 32, 48, 64"
    with pytest.raises(ConfigError, match=message):
        preflight(config, "train", 1)
    with pytest.raises(ConfigError, match=message):  # as `megatron-gvpo serve` calls it
        start_servers(config.model, config.rollout, config.output_dir, ModelCards(config), None, print)
    preflight(with_heads(task, tmp_path / "32", 32, "rollout.engine=vllm"), "train", 1)
    preflight(with_heads(task, tmp_path / "sglang", 16, "rollout.engine=sglang"), "train", 1)
    elsewhere = "rollout.servers.urls=['http://127.0.0.1:1']"  # it may have GPUs
    preflight(with_heads(task, tmp_path / "urls", 16, "rollout.engine=vllm", elsewhere), "train", 1)


def test_a_reward_model_without_a_kernel_is_refused(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with_heads(task, tmp_path / "16", 16)
    servers, path = RewardServers(engine="vllm"), str(tmp_path / "16")
    message = r"model\.servers\.engine=vllm .*\.0\.model\.path=\S*16 has attention heads of 16 elements"
    with pytest.raises(ConfigError, match=message):
        open_servers(
            "rewards.components.0.model.servers",
            servers,
            Checkpoint(path, ModelCard.read(path), "float32", False),
            str(tmp_path),
            0,
            print,
            "reward model's server",
        )


@pytest.mark.parametrize(
    ("engine", "title", "dtype", "message"),
    [
        ("vllm", "Qwen3.5", "float32", "is Qwen3_5ForCausalLM, whose gated delta nets .* in bfloat16 only"),
        ("vllm", "Qwen3.5", "bfloat16", None),
        ("sglang", "Qwen3.5", "bfloat16", "is Qwen3_5ForCausalLM: .*: use rollout.engine=vllm, or a GPU"),
        ("sglang", "GPT-OSS", "float32", "is GptOssForCausalLM: .* has no attention sinks"),
        ("sglang", "DeepSeek-V3", "float32", "is DeepseekV3ForCausalLM: .* takes the latents"),
        ("vllm", "DeepSeek-V3", "float32", r"latent attention with .*=\(16, 8\), .* has \(512, 64\) only"),
        ("vllm", "GPT-OSS", "float32", "heads of 16 elements"),
        (
            "sglang",
            "EXAONE 4.0 (1.2B)",
            "float32",
            "is Exaone4ForCausalLM: .* use rollout.engine=vllm",
        ),
        ("vllm", "MiniMax-M2", "float32", "is MiniMaxM2ForCausalLM: .*: use rollout.engine=sglang, or a GPU"),
    ],
)
def test_a_family_that_an_engine_lacks_on_a_cpu_is_refused(
    tmp_path: Path, engine: str, title: str, dtype: str, message: str | None
) -> None:
    config = tiny_config(title)
    if message is None:
        config["head_dim"] = 32
    where = f"model.path={tmp_path}"
    if message is None:
        check_on_cpu(ModelCard(config), engine, dtype, "rollout.engine", where)
        return
    with pytest.raises(ConfigError, match=f"rollout.engine={engine} .* {re.escape(where)} .*{message}"):
        check_on_cpu(ModelCard(config), engine, dtype, "rollout.engine", where)


@pytest.mark.parametrize(
    ("engine", "targets", "message"),
    [
        ("vllm", "[q_proj]", "vllm computes adapters beside experts with Triton"),
        ("vllm", "all", r"vllm computes adapters of experts \(down_proj, gate_proj, up_proj\) with Triton"),
        (
            "sglang",
            "all",
            r"sglang computes adapters of experts \(down_proj, gate_proj, up_proj\) with Triton",
        ),
        ("sglang", "[q_proj, v_proj]", None),
    ],
)
def test_adapters_that_only_gpus_serve_are_refused(
    task: Path, tmp_path: Path, engine: str, targets: str, message: str | None
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(engine_config("Qwen3-MoE")))
    own = (
        f"model.path={tmp_path}/model",
        f"model.adapter={{targets: {targets}}}",
        f"rollout.engine={engine}",
    )
    config = configure(task, tmp_path, *own, "rollout.weights.transport=adapter")
    if message is None:
        check_rollout_model(config.model, config.rollout, ModelCards(config))
        return
    with pytest.raises(ConfigError, match=f"{message}.*transport=broadcast"):
        check_rollout_model(config.model, config.rollout, ModelCards(config))


def test_engines_read_the_same_model_types_as_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))
    plugin = importlib.import_module("megatron_gvpo_mends")
    assert plugin.SAME_MODEL == SAME_MODEL


@pytest.mark.proof
def test_the_sizes_are_those_of_the_kernels() -> None:
    process = subprocess.run([engine_python("vllm"), "-c", ASK], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    lines = [line.split() for line in process.stdout.splitlines() if line.startswith("size ")]
    assert tuple(int(size) for _, size in lines) == CPU_HEAD_SIZES

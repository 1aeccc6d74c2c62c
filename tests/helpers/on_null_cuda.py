"""Runs Python code in a process with the null CUDA, and rehearses ranks of small models there.

The libraries that it needs are built once and kept. `make test` begins the build early, in the background,
and a test may wait for it.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.paths import ROOT
from helpers.references.transformer_engine_source import wheel_source
from helpers.suite.real_parts import used
from megatron_gvpo.emulation import emulated_gpu
from megatron_gvpo.rehearsal import made_model, transformer_engine
from megatron_gvpo.rehearsal.nullcuda.devices import DEVICES
from megatron_gvpo.rehearsal.process import environment_of_ranks, run_jobs
from megatron_gvpo.rehearsal.rank import RankJob

QWEN = {  # the shapes of a Qwen2.5 of 4 layers, small enough for ranks on CPUs, too
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
MIXTURE = QWEN | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CONFIG = """\
output_dir: out
model: {path: model, dtype: bfloat16}
data: {train: {path: unused}}
algorithm: gvpo
rollout: {n: 4, max_tokens: 192}
rewards: {components: [{name: math}]}
train: {steps: 10, prompts_per_step: 64, max_tokens_per_micro_batch: 1024}
optimizer: {lr: 1.0e-6}
"""


@functools.cache
def environment(gib: float = 8.0, device: str = "h100") -> dict[str, str]:
    """Variables of a process on one such device."""
    transformer_engine.build(lambda _: None)
    return environment_of_ranks(DEVICES[device], 8, int(gib * 2**30))


@functools.cache
def emulated_environment(gib: float = 8.0, device: str = "h100") -> dict[str, str]:
    """Variables of a process with eight such devices that compute."""
    transformer_engine.build(lambda _: None)
    variables = emulated_gpu.environment(DEVICES[device], 8, int(gib * 2**30))
    variables["PYTHONPATH"] += f":{wheel_source('fla-core')}"  # the kernels of gated delta nets
    return variables


def run_code(code: str, gib: float = 8.0, timeout: float = 300, emulated: bool = False) -> Any:
    """Run `code`, which sets the variable `result`; returns its value, through JSON."""
    program = f"{textwrap.dedent(code)}\nimport json\nprint('\\n' + json.dumps(result))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | (emulated_environment(gib) if emulated else environment(gib)),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    used("emulated GPU" if emulated else "null CUDA")
    return json.loads(done.stdout.splitlines()[-1])


def write_model(folder: Path, config: dict[str, Any] = QWEN) -> Path:
    """A configuration beside a model without weights; returns the configuration's file."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    made_model.add_image_processor(folder / "model")
    file = folder / "config.yaml"
    file.write_text(CONFIG.replace("path: model", f"path: {folder / 'model'}"))
    return file


def rehearse(*arguments: str, code: int = 0, timeout: float = 600) -> dict[str, Any]:
    """The JSON of the command `rehearse` with these arguments; it must end with exit code `code`."""
    environment()
    command = [sys.executable, "-m", "megatron_gvpo", "rehearse", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    assert done.returncode == code, done.stderr[-3000:] + done.stdout[-2000:]
    used("null CUDA")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def counts_of(
    models: Mapping[str, dict[str, Any]], micro_batches: Sequence[int], folder: Path
) -> dict[tuple[str, int], dict[str, dict[str, int]]]:
    """The counts of one rank's phases up to its second update, by (model, micro-batches of an update).

    One process rehearses all models, each once for every number of micro-batches of an update.
    """
    environment()
    variables = environment_of_ranks(DEVICES["h100"], 8, 8 * 2**30)
    variables["PYTHONPATH"] += f":{wheel_source('fla-core')}"
    jobs: dict[tuple[str, int], RankJob] = {}
    for number, (name, model) in enumerate(models.items()):
        for count in micro_batches:
            own = folder / f"{number}-{count}"
            file = write_model(own, model)
            jobs[name, count] = RankJob(
                [str(file)], [], 0, 1, count, [str(own / "model")], until="second update"
            )
    (folder / "ranks").mkdir()
    results = run_jobs(list(jobs.values()), variables, folder / "ranks")
    used("null CUDA")
    return {
        key: {phase["name"]: phase["counts"] for phase in result["phases"]}
        for key, result in zip(jobs, results, strict=True)
    }


def phase(result: dict[str, Any], name: str, rank: int = 0) -> dict[str, Any]:
    """One phase of one of the result's ranks, by its place among them."""
    [match] = [one for one in result["ranks"][rank]["phases"] if one["name"] == name]
    return dict(match)


def fill(directory: Path) -> None:
    """Write weights of zeros. An embedding has one other value, because a run refuses embeddings of zeros."""
    made_model.fill(directory)
    for file in directory.glob("*.safetensors"):
        with file.open("r+b") as opened:
            size = int.from_bytes(opened.read(8), "little")
            for name, tensor in json.loads(opened.read(size)).items():
                if name.endswith("embed_tokens.weight"):
                    opened.seek(8 + size + tensor["data_offsets"][0])
                    opened.write(b"\x80\x3f")  # 1.0 in bfloat16

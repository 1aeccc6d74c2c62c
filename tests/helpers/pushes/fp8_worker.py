"""Rank function of test_fp8.py: a bf16 trainer pushes weights to a real server whose model is in FP8."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from helpers.inputs.rows import make_rows
from helpers.pushes.push_worker import end, served_engine
from helpers.servers.real_servers import PROMPTS, checksum, receiver
from helpers.tiny_run import configure
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.weights.fp8 import SCALE, quantise


def quantise_checkpoint(source: Path, target: Path) -> None:
    """Write a Hugging Face checkpoint with its projections in FP8, in the form in which such models are
    published.
    """
    target.mkdir()
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[name + SCALE] = quantise(tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": how}))


def run(engine: str, url: str, task: str, served: str, out: str) -> None:
    """Push before and after a step, over either transport; write the server's checksums and log-probs.

    Each is written together with those of the server after it has read the trainer's export as an FP8
    checkpoint.
    """
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "1"
    directory = Path(out)
    overrides = [f"rollout.engine={engine}", f"rollout.servers.urls=[{url}]", "algorithm=grpo"]
    overrides += ["optimizer.lr=1.0e-2", "model.dtype=bfloat16", f"rollout.servers.model_path={served}"]
    overrides += ["rollout.weights.bucket_mb=1", f"rollout.weights.directory={directory}/weights"]
    policy = None
    for step, transport in enumerate(("broadcast", "disk")):
        config = configure(Path(task), directory, *overrides, f"rollout.weights.transport={transport}")
        policy = policy or Policy.of(config)
        rollouts = served_engine(config, policy).__enter__()
        if step:
            policy.update(make_rows([[1.0, 0.0, 0.5]]), at_step_start=True)
        [handle] = rollouts.servers.pool.handles
        call = rollouts.servers.loop.run
        answers = {"before": call(handle.server.score(PROMPTS[0], 60))}
        rollouts.sync(step)
        answers["pushed"] = checksum(rollouts.servers.loop, handle.server)
        answers["score"] = call(handle.server.score(PROMPTS[0], 60))
        policy.model.save_hf(directory / f"export-{step}")
        quantise_checkpoint(directory / f"export-{step}", directory / f"fp8-{step}")
        call(handle.server.pause(30))
        call(receiver(handle.server, "disk").load_directory(directory / f"fp8-{step}", str(step), 60))
        call(handle.server.flush_cache(30))
        call(handle.server.resume(30))
        answers["from files"] = checksum(rollouts.servers.loop, handle.server)
        (directory / f"answers-{step}").write_text(json.dumps(answers, indent=1))
        end(rollouts)
    torch.manual_seed(0)
    dist.barrier()

"""A small version of the quickstart's model and problems, and runs with it, for tests of whole runs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))

import make_task
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from helpers.distributed import forget_layout
from helpers.suite.real_parts import used
from megatron_gvpo.core.signals import Interrupted
from megatron_gvpo.groups import Group
from megatron_gvpo.observe import read_metrics
from megatron_gvpo.observe.rollouts.table import Responses
from megatron_gvpo.settings.config import Config, load_config
from megatron_gvpo.training.callbacks import Callback, Recorder
from megatron_gvpo.training.trainer import Trainer

CONFIG = """
model: {{path: {task}/model, dtype: float32}}
data:
  train: {{path: {task}/data/train.jsonl, demonstration_key: solution}}
  eval: {{path: {task}/data/test.parquet, limit: 4}}
  max_prompt_tokens: 32
rollout: {{n: 4, max_tokens: 10}}
rewards: {{timeout: 600, components: [{{name: variety, function: "{task}/reward.py:reward"}}]}}
train: {{steps: 4, prompts_per_step: 4, max_tokens_per_micro_batch: 128}}
optimizer: {{lr: 1.0e-3, warmup_steps: 1, decay: linear}}
eval: {{every: 2, n: 2, k: [1, 2], sampling: {{max_tokens: 10}}}}
logging: {{progress: lines, tensorboard: false}}
"""

GVPO = ("algorithm=gvpo", "train.mini_batches=2")
ENGINE_REFERENCE = (*GVPO, "algorithm.reference_logprobs=engine")
SHORT = ("train.max_tokens_per_micro_batch=4096", "data.eval=null", "checkpoint.export_hf=false")

# An untrained model is never right, so this rewards variety. In the middle of step `signal_in` the trainer,
# the parent of a worker's guard, gets SIGTERM (with `killed`, the processes of the reward get it, too). In
# the middle of step `disk_full_in` the disk is full: no file can grow any more. The reward of the first
# response of step `poison_in` is so large that gradients overflow. Responses of step s come from weight
# version s - 1.
REWARD = """
import os, resource, signal, subprocess

import psutil

poisoned, trainer = False, psutil.Process(os.getppid()).ppid()

def reward(prompt, rollout, signal_in=0, killed=False, disk_full_in=0, poison_in=0, coarse=False):
    global poisoned
    step = rollout.weight_version + 1
    if step == signal_in:
        os.kill(trainer, signal.SIGTERM)
        if killed:
            subprocess.run(["sh", "-c", "kill $$"], check=True)
    if step == disk_full_in:
        limit = resource.RLIMIT_FSIZE
        resource.prlimit(trainer, limit, (1, resource.prlimit(trainer, limit)[1]))
    if step == poison_in and not poisoned:
        poisoned = True
        return 1e38
    variety = len(set(rollout.token_ids)) / len(rollout.token_ids)
    return rollout.token_ids[0] % 2 if coarse else variety

if "SIGNAL_WHILE_LOADING" in os.environ:
    os.kill(trainer, signal.SIGTERM)
"""


def make(directory: Path) -> None:
    """Write directory/{model,data,reward.py,run.yaml}."""
    sizes = {"train": 48, "validation": 4, "test": 8}
    make_task.SIZES, before = sizes, make_task.SIZES
    try:
        make_task.make_model(directory / "model", seed=0)
        _recommend_sampling(directory / "model" / "generation_config.json")
        make_task.make_data(directory / "data", seed=0)
    finally:
        make_task.SIZES = before
    (directory / "reward.py").write_text(REWARD)
    (directory / "run.yaml").write_text(CONFIG.format(task=directory))


def _recommend_sampling(file: Path) -> None:
    """Write sampling options into generation_config.json, as released models do: servers must ignore them."""
    recommended = {"do_sample": True, "top_k": 2, "repetition_penalty": 1.5, "temperature": 0.3}
    file.write_text(json.dumps(json.loads(file.read_text()) | recommended))


def configure(task: Path, out: Path, *overrides: str) -> Config:
    return load_config([task / "run.yaml"], [f"output_dir={out}", *overrides])


def reward_options(task: Path, **options: Any) -> str:
    """An override that gives the reward function these options."""
    component = {"name": "variety", "function": f"{task}/reward.py:reward", "options": options}
    return f"rewards.components={json.dumps([component])}"


class KeepGroups(Callback):
    """Keeps the groups that the trainer trained on."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def on_responses(self, trainer: Trainer, responses: Responses) -> None:
        self.groups += responses.groups


class StopAfter(Callback):
    """Callback that sends SIGTERM to this process at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class AskToStop(Callback):
    """Makes an environment or a program stop the trainer in the second step."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        if step == 1:
            self._mark.touch()


def fit(config: Config, callbacks: Sequence[Callback] = (), **how: Any) -> Trainer:
    """Train with the command line's recorder until the end or an interruption; keep the process group.

    A resumed run may have other reward options, because those of this file's reward interrupt runs.
    """
    if how.get("resume"):
        how["allow_change"] = ("rewards", *how.get("allow_change", ()))
    has_failed = True
    try:
        trainer = Trainer(config, [Recorder(), *callbacks], **how)
        used("megatron-core and Megatron-Bridge, 1 rank")
        if config.samples_responses:
            used("reward workers")
            if config.rollout.engine == "local":
                used("embedded rollout engine")
        with suppress(Interrupted):
            trainer.fit()
        has_failed = False
        return trainer
    finally:
        if dist.is_initialized():
            forget_layout(has_failed)


def records(out: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl without times, throughput and memory."""
    return [
        {
            name: value
            for name, value in record.items()
            if not name.startswith(("time/", "throughput/", "memory/", "server/"))
        }
        for record in read_metrics(out / "metrics.jsonl")
    ]


def weights(out: Path) -> dict[str, Tensor]:
    """The weights that the run exported."""
    return {name: t for file in (out / "hf").glob("*.safetensors") for name, t in load_file(file).items()}


def assert_same_run(one: Path, other: Path) -> None:
    for ran, again in zip(records(one), records(other), strict=True):
        differ = {key: (ran.get(key), again.get(key)) for key in ran.keys() | again.keys()}
        differ = {key: pair for key, pair in differ.items() if pair[0] != pair[1]}
        assert not differ, f"step {ran['step']} differs: {differ}"
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)

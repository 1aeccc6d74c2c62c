"""One training step of the same configuration with a tiny model of the same architecture, in a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.image_families import takes_images
from megatron_gvpo.inspection.verdict import RunVerdict, failure, not_tried, ok
from megatron_gvpo.runs.one_machine import laptop_values
from megatron_gvpo.settings.config import Config
from megatron_gvpo.verify.shrink import save_tiny, shrink

PATIENCE = 300.0  # the longest wait for the step, in seconds
_TOKENS = 8  # tokens in a response
_MOST = 4  # responses to a prompt
_LARGEST = 2**26  # bytes of the largest file of a tokenizer
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".gguf", ".pt", ".pth")
_VOCABULARY = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
_REWARD = "megatron_gvpo.inspection.made_up_reward:reward"


class TinyStep:
    """The process of the step. It runs beside the other verdicts: `start`, then `verdict`."""

    def __init__(self, config: Config, card: ModelCard, folder: Path) -> None:
        self._config, self._card, self._folder = config, card, folder
        self._reason: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder / "tiny_step.log"

    def start(self) -> None:
        config = self._config
        if takes_images(self._card):
            self._reason = "no tiny model is made of one that takes images"
        elif config.rollout.conversation is not None or config.rewards.is_served:
            self._reason = "it would need the environment, or servers"
        elif config.teacher is not None:
            self._reason = "no tiny teacher is made"
        elif config.algorithm.critic is not None and config.algorithm.critic.path is not None:
            self._reason = "no tiny critic is made of another model"
        if self._reason is not None:
            return
        file = self._folder / "tiny.yaml"
        try:
            _make_model(Path(config.model.path), self._card, self._folder / "model")
            file.write_text(json.dumps(tiny_values(config, self._folder)))  # JSON is YAML
        except ConfigError as error:
            self._reason = str(error)
            return
        except (OSError, SafetensorError) as error:  # shutil's has a list of errors
            self._reason = (
                f"its model cannot be written to {self._folder.parent} (TMPDIR): {str(error)[:200]}"
            )
            return
        self._begin = time.perf_counter()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "megatron_gvpo", "train", str(file)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def verdict(self) -> RunVerdict:
        """Wait for the step. The verdict is a failure only if the step itself ends with an error."""
        if self._process is None:
            return not_tried("tiny step", str(self._reason))
        try:
            code = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.stop()
            return not_tried("tiny step", f"it took more than {PATIENCE:.0f} s on this machine")
        seconds = time.perf_counter() - self._begin
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if "error" in line.lower()), (lines or ["no word"])[-1])
        if code == 0:
            return ok("tiny step", f"{self._parts()} with a tiny model in {seconds:.0f} s")
        return failure("tiny step", f"it ended with exit code {code}: {last[:400]}")

    def _parts(self) -> str:
        is_sampled = self._config.algorithm.sampler == "engine"
        return "sampled, scored and trained" if is_sampled else "trained on the data"

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def tiny_values(config: Config, folder: Path) -> dict[str, Any]:
    """The keys of the run's configuration with which a step takes seconds, its model and output in `folder`.

    `train.stop_early` goes with `checkpoint.keep_best`, which the step lacks.
    """
    values = laptop_values(config, **_sizes(config, folder))
    values["data"].pop("eval", None)
    values.pop("eval", None)
    values["checkpoint"] = {"export_hf": False}
    values["train"].pop("stop_early", None)
    values["output_dir"] = str(folder / "run")
    return values


def _sizes(config: Config, folder: Path) -> dict[str, dict[str, Any]]:
    """The settings with which a step takes seconds; they do not change the method."""
    prompts = config.train.mini_batches * (2 if config.train.mini_batches < 8 else 1)
    changes: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "model")},
        "train": {
            "steps": 1,
            "prompts_per_step": prompts,
            "max_tokens_per_micro_batch": config.train.max_tokens_per_micro_batch,
        },
        "rollout": {"n": min(config.rollout.n, _MOST), "max_tokens": min(config.rollout.max_tokens, _TOKENS)},
        "optimizer": {"warmup_steps": 0},
    }
    if config.algorithm.samples_from_policy:
        # Blocks may read components by name.
        names = [(component.name, component.weight) for component in config.rewards.components]
        changes["rewards"] = {
            "components": [{"name": n, "weight": weight, "function": _REWARD} for n, weight in names]
        }
    return changes


def _not_needed(directory: str, names: list[str]) -> list[str]:
    """Weights in whatever format, and what git and the hub keep beside them, such as .git with gigabytes."""
    return [
        name
        for name in names
        if name.startswith(".")
        or name.endswith(_WEIGHTS)
        or os.path.getsize(f"{directory}/{name}") > _LARGEST
    ]


def _make_model(model: Path, card: ModelCard, tiny: Path) -> None:
    """Write a tiny model of the same architecture, with the tokenizer and the vocabulary of `model`.

    Raises ConfigError for an architecture of which there is no tiny one.
    """
    shutil.copytree(model, tiny, ignore=_not_needed)
    vocabulary = {key: card[key] for key in _VOCABULARY if key in card}
    save_tiny(shrink(dict(card), "no tiny model") | vocabulary, tiny, "no tiny model")

"""Rank function of test_feature_pairs.py: runs in a layout, and an engine that makes responses up."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from helpers.distributed import run_number
from helpers.tiny_run import StopAfter, configure, fit
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.servers.request import derived_seed
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.settings.servers import ENGINES
from megatron_gvpo.supports import Support


@dataclass(frozen=True)
class Run:
    """A run, or one half of it."""

    task: str
    out: str
    overrides: tuple[str, ...]
    ranks: int = 1
    stops: bool = False  # the run stops after its first step
    resumes: bool = False

    @property
    def error_file(self) -> Path:
        return Path(f"{self.out}.error")


class MadeEngine:
    """Draws responses at random, for models that the embedded engine cannot sample from."""

    shares_gpus = False

    def __init__(self, model: Any, rollout: Any, output_dir: str, cards: Any, task: Any, policy: Any) -> None:
        self.version, self.metrics = -1, dict[str, float]()
        self._policy, self._ends, self._vocabulary = policy, task.end_token_ids, cards.policy["vocab_size"]

    def __enter__(self) -> MadeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def sync(self, version: int) -> None:
        for _ in self._policy.weights(on_host=False):
            pass
        self.version = version

    def submit(self, prompts: Sequence[Prompt], n: int, sampling: SamplingConfig, seed: int) -> Any:
        return prompts, n, sampling, seed

    def collect(self, tickets: Sequence[Any], on_wait: object = None) -> list[Group]:
        groups = []
        for prompts, n, sampling, seed in tickets:
            for i, prompt in enumerate(prompts):
                rollouts = [self._drawn(sampling, derived_seed(seed, i, number)) for number in range(n)]
                groups.append(Group(prompt, rollouts))
        return groups

    def _drawn(self, sampling: SamplingConfig, seed: int) -> Rollout:
        draw, [end, *_] = np.random.default_rng(seed), self._ends
        length = int(draw.integers(1, sampling.max_tokens + 4))
        is_truncated = length > sampling.max_tokens
        # Token ids begin with those of the tokenizer's own tokens, such as the end token.
        tokens = draw.integers(6, self._vocabulary, min(length, sampling.max_tokens)).tolist()
        if not is_truncated:
            tokens[-1] = end
        support, choices = None, self._vocabulary
        if sampling.wants_support:
            choices = 8
            support = Support.of(
                [sorted({token, *draw.choice(self._vocabulary, 8).tolist()}) for token in tokens]
            )
        logprobs = (-np.log(choices) + 0.1 * draw.normal(size=len(tokens))).tolist()
        reason = "length" if is_truncated else "stop"
        return Rollout(tokens, logprobs, "", reason, self.version, support=support)


def write_work(directory: Path, runs: Sequence[Run]) -> None:
    (directory / "work.json").write_text(json.dumps([asdict(run) for run in runs]))


def run(directory: str) -> None:
    """Do one run of work.json. Rank 0 writes an error to a file, so that other rows still run."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    values = json.loads((Path(directory) / "work.json").read_text())[run_number()]
    of_rank = Run(**values | {"overrides": tuple(values["overrides"])})
    ENGINES["made"] = f"{__name__}:MadeEngine"  # in this process alone: other tests list the engines
    if of_rank.error_file.exists():  # the first half has failed
        return
    try:
        config = configure(Path(of_rank.task), Path(of_rank.out), *of_rank.overrides)
        stop = [StopAfter(1)] if of_rank.stops and dist.get_rank() == 0 else []
        fit(config, stop, resume=of_rank.resumes)
    except Exception:
        of_rank.error_file.write_text(traceback.format_exc())

"""Rank functions of tests of whole runs on two ranks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.small_constants import small_constants
from helpers.tiny_run import StopAfter, configure, fit, reward_options
from megatron_gvpo.core.collectives import all_gather_msgpack, all_have_failed
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.user_functions import UserFunctionError
from megatron_gvpo.replay.findings import Finding
from megatron_gvpo.replay.run import replay
from megatron_gvpo.runs.one_machine import load_run
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer


def fit_once(task: str, out: str, *overrides: str) -> None:
    """Run to the end."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    fit(configure(Path(task), Path(out), *overrides))


def fail_on_one_rank(task: str, out: str, *overrides: str) -> None:
    """Rank 1 fails after the first step, and notes when; rank 0 goes on."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())

    class Failing(Callback):
        def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
            if step == 1 and dist.get_rank() == 1:
                Path(out, "failed_at").write_text(str(time.time()))
                raise OSError("only rank 1 has this error")

    fit(configure(Path(task), Path(out), *overrides), [Failing()])


def replay_step(out: str, told_to: str, *layout: str) -> None:
    """Replay step 2 of a run in a layout; rank 0 writes the findings; all ranks have the same first."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    findings: list[Finding] = []
    first = replay(load_run(Path(out)), 2, True, findings.append, layout)
    for other in all_gather_msgpack(None if first is None else [first.component, first.tensor]):
        assert other == (None if first is None else [first.component, first.tensor])
    if dist.get_rank() == 0:
        lines = [[finding.component, finding.outcome, finding.tensor, finding.text] for finding in findings]
        Path(told_to).write_text(json.dumps(lines))


def fit_with_a_faulty_rank(task: str, out: str, fault: str, *overrides: str) -> None:
    """Run two steps. In the second, rank 1 has `stale` shards of others, or its gradient is `halved`."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())

    class Faulty(Callback):
        def on_start(self, trainer: Trainer) -> None:
            self.before = [p.detach().clone() for p in trainer.components.policy.model.weights()]

        def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
            if step != 1 or dist.get_rank() != 1:
                return
            if fault == "stale":
                model = trainer.components.policy.model
                buckets = [b for chunk in model.chunks for buffer in chunk.buffers for b in buffer.buckets]
                shards = [bucket.param_data.chunk(2)[1] for bucket in buckets]
                own = [shard.clone() for shard in shards]
                with torch.no_grad():
                    for p, stale in zip(model.weights(), self.before, strict=True):
                        p.copy_(stale)
                    for shard, right in zip(shards, own, strict=True):
                        shard.copy_(right)
            else:
                for chunk in trainer.components.policy.model.chunks:
                    chunk.finish_grad_sync = partial(finish_halved, chunk, chunk.finish_grad_sync)

    def finish_halved(chunk: Any, finish: Callable[..., None], *args: object, **kwargs: object) -> None:
        for buffer in chunk.buffers:
            buffer.grad_data.mul_(0.5)
        finish(*args, **kwargs)

    fit(configure(Path(task), Path(out), *overrides), [Faulty()])


def interrupted_and_not(task: str, runs: str) -> None:
    """Run without a stop, and interrupted in the second step and resumed, both data- and tensor-parallel.

    The signal reaches one rank only. The data-parallel runs overlap communication, with small constants.
    """
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    overlap = ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true")
    layouts = {"dp2": (overlap, small_constants()), "tp2": (("parallel.tp=2",), nullcontext())}
    for layout, (overrides, sizes) in layouts.items():
        common = (*overrides, "algorithm=gvpo", "train.mini_batches=2", "train.deterministic=true")
        uninterrupted, parts = (Path(runs) / f"{layout}-{name}" for name in ("whole", "parts"))
        with sizes:
            fit(configure(Path(task), uninterrupted, *common))
            signal = reward_options(Path(task), signal_in=2 if dist.get_rank() == 0 else 0)
            stopped = fit(configure(Path(task), parts, *common, signal))
            assert stopped.step == 2
            fit(configure(Path(task), parts, *common), resume=True)


def conversations(task: str, runs: str, settings: str) -> None:
    """Run without a stop, and interrupted after the second step and resumed, data-parallel."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    common = (*json.loads(settings), "train.deterministic=true")
    uninterrupted, parts = Path(runs) / "whole", Path(runs) / "parts"
    fit(configure(Path(task), uninterrupted, *common))
    stop = [StopAfter(2)] if dist.get_rank() == 0 else []
    assert fit(configure(Path(task), parts, *common), stop).step == 2
    fit(configure(Path(task), parts, *common), resume=True)


def a_reward_that_one_rank_lacks(task: str, out: str) -> None:
    """Let a reward's file be missing on one node; all ranks must raise its error."""
    rank = dist.get_rank()
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(dist.get_world_size())
    file = "reward" if rank == 0 else "missing"
    reward = f'rewards.components=[{{"name": "variety", "function": "{task}/{file}.py:reward"}}]'
    with pytest.raises(ConfigError) as error:
        fit(configure(Path(task), Path(out) / "run", "algorithm=gvpo", reward))
    (Path(out) / f"{rank}.txt").write_text(str(error.value))


def a_loss_that_fails(task: str, out: str, *overrides: str) -> None:
    """Train with a loss that fails on one rank; all ranks must raise its error."""
    rank = dist.get_rank()
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(dist.get_world_size())
    with pytest.raises(UserFunctionError) as error:
        fit(configure(Path(task), Path(out) / "run", *overrides))
    (Path(out) / f"{rank}.txt").write_text(str(error.value))


def one_rank_fails(out: str) -> None:
    """Fail on rank 0 alone, then on both ranks."""
    first = all_have_failed(0.2) if dist.get_rank() == 0 else None
    dist.barrier()
    if dist.get_rank() == 1:
        all_have_failed(0.2)
    dist.barrier()
    both = all_have_failed(20.0)
    if dist.get_rank() == 0:
        (Path(out) / "alone.txt").write_text(str([first, both]))

"""One rank of one point of scaling.py: it times training steps, then counts the messages of one more step.

    torchrun --nproc-per-node 2 worker.py POINT.json --steps 3 CONFIG.yaml key=value ...

The first rank writes POINT.json. At the beginning of every phase the ranks wait for one another, and
`waiting` is the time that they wait. So no phase contains the delay of the phase before it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_gvpo import Trainer, load_config
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.megatron.microbatch import my_share
from megatron_gvpo.observe.timer import PhaseTimer
from megatron_gvpo.planner import architecture, workload
from megatron_gvpo.planner.traffic import Pack, on_the_wire, update_bytes
from megatron_gvpo.planner.workload import Layout
from megatron_gvpo.settings.config import Config
from megatron_gvpo.training import components as parts
from megatron_gvpo.training.callbacks import Callback

sys.path.append(str(Path(__file__).parents[2]))

from lib.scaling.traffic_counter import TrafficCounter, group_names

BOOKKEEPING = (
    "world",
    "norm",
)  # groups that send a few bytes: metrics, log-probs for the mismatch, the gradient's norm


class AlignedTimer(PhaseTimer):
    """A PhaseTimer whose phases begin on all ranks at once."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase("waiting"):
            dist.barrier()
        with super().phase(name):
            yield


class Watch(Callback):
    """Records the times of the measured steps, and the messages of the step after them."""

    def __init__(self, steps: int, model: architecture.Architecture) -> None:
        self._steps, self._model = steps, model
        self._flops = self._optimizer = 0.0
        self._traffic: TrafficCounter | None = None
        self._expected: dict[tuple[str, str], int] | None = {}  # None: there is no formula for this layout
        self._counted: dict[tuple[str, str], int] = {}
        self.seconds: list[dict[str, float]] = []
        self.tokens: list[float] = []
        self.flops: list[float] = []
        self.messages: dict[tuple[str, str], tuple[int, int]] = {}
        self.updates_equal: bool | None = None

    def attach(self, trainer: Trainer) -> None:
        policy = trainer.components.policy
        apply, update = policy.optimizer.apply, policy.update

        def timed_apply() -> Any:
            begin = _now()
            result = apply()
            self._optimizer += _now() - begin
            return result

        def counted_update(rows: Any, **how: Any) -> Any:
            self._flops += sum(
                3 * (self._model.layer_flops(p + r, (p + r) / 2) + self._model.head_flops(r))
                for p, r in zip(map(len, rows.prompt_ids), map(len, rows.response_ids), strict=True)
            )
            if self._traffic is None:
                return update(rows, **how)
            with TrafficCounter(group_names()) as traffic:
                result = update(rows, **how)
            for key, volume in traffic.volumes.items():
                if key[1] not in BOOKKEEPING:
                    self._counted[key] = self._counted.get(key, 0) + volume.bytes
            if (formula := _formula(trainer, self._model, rows)) is None or self._expected is None:
                self._expected = None
            else:
                for key, size in formula.items():
                    self._expected[key] = self._expected.get(key, 0) + size
            return result

        policy.optimizer.apply, policy.update = timed_apply, counted_update  # type: ignore[method-assign]

    def on_step(self, trainer: Trainer, step: int, metrics: Any) -> None:
        if 1 < step <= 1 + self._steps:  # the first step warms up
            times = {k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/")}
            times["optimizer"] = self._optimizer
            times["training"] -= self._optimizer
            self.seconds.append(times)
            self.tokens.append(metrics["throughput/tokens_per_s"] * times["step"])
            self.flops.append(self._flops)
        self._flops = self._optimizer = 0.0
        if step == 1 + self._steps:
            self._traffic = TrafficCounter(group_names())
            self._traffic.__enter__()
        elif step == 2 + self._steps and self._traffic is not None:
            self._traffic.__exit__(None, None, None)
            self.messages = {k: (v.calls, v.bytes) for k, v in self._traffic.volumes.items()}
            if self._expected is not None:
                self.updates_equal = {k: v for k, v in self._expected.items() if v} == self._counted


def _formula(
    trainer: Trainer, model: architecture.Architecture, rows: Any
) -> dict[tuple[str, str], int] | None:
    """Return the messages that this rank should send in an update of these rows; None without a formula."""
    from megatron.core import parallel_state

    policy, sizes = trainer.components.policy, trainer.config.parallel
    config = trainer.config
    budget, keep_groups = config.train.max_tokens_per_micro_batch, config.algorithm.loss.couples_groups
    share = my_share(policy.model, rows, budget, keep_groups)
    pads, shares = policy.model.padding, policy.model.shares_prompts_of
    packs = [PackedBatch.pack(pack, pads, shares(pack)) for pack in share.packs(rows)]
    try:
        return update_bytes(
            model,
            Layout(dist.get_world_size(), tp=sizes.tp, pp=sizes.pp, vpp=sizes.vpp, cp=sizes.cp),
            parallel_state.get_pipeline_model_parallel_rank(),
            [Pack(len(pack.token_t), len(pack.label_r)) for pack in packs],
            element=4 if config.model.dtype == "float32" else 2,
            sequence_parallel=sizes.sequence_parallel,
        )
    except ValueError:  # experts, latent attention, context parallelism, interleaving
        return None


def measure(config: Config, steps: int, gpu: str | None) -> dict[str, Any]:
    """Train and return the results of all ranks. A collective; every rank returns the same."""
    parts.PhaseTimer = AlignedTimer  # type: ignore[misc]
    model = architecture.load(config.model.path)
    watch = Watch(steps, model)
    trainer = Trainer(config, [watch], overwrite=True)
    watch.attach(trainer)
    trainer.fit()
    peak = workload.gpu(gpu).bf16_tflops * 1e12 if gpu else cpu_peak()
    named: dict[Any, str] = dict(group_names())
    ranks_of = {name: dist.distributed_c10d._resolve_process_group(g).size() for g, name in named.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    local = (watch.seconds, watch.messages, watch.updates_equal, peak)
    dist.all_gather_object(everyone, local)
    world, seconds = dist.get_world_size(), {}
    for name in sorted({key for rank in everyone for step in rank[0] for key in step}):
        of_ranks = [median(step.get(name, 0.0) for step in rank[0]) for rank in everyone]
        seconds[name] = sum(of_ranks) / world
    step = seconds.pop("step")
    peaks = sum(rank[3] for rank in everyone)
    flops = median(watch.flops)
    equal = [rank[2] for rank in everyone]
    return {
        "ranks": world,
        "tokens_per_step": median(watch.tokens),
        "seconds_per_step": step,
        "tokens_per_s": median(watch.tokens) / step,
        "tokens_per_s_per_rank": median(watch.tokens) / step / world,
        "seconds": seconds | {"other": step - sum(seconds.values())},
        "peak_tflops_per_rank": peaks / world / 1e12,
        "mfu_of_step": flops / step / peaks,
        "mfu_of_training": flops / seconds["training"] / peaks,
        "messages": _messages([rank[1] for rank in everyone], ranks_of),
        "updates_equal_formula": None if None in equal else all(equal),
    }


def _messages(of_ranks: Sequence[dict[tuple[str, str], tuple[int, int]]], sizes: dict[str, int]) -> list[Any]:
    """Sum a step's messages of all ranks by operation and group: calls, bytes, bytes on a ring's wire."""
    rows = []
    for operation, group in sorted({key for rank in of_ranks for key in rank}):
        seen = [rank.get((operation, group), (0, 0)) for rank in of_ranks]
        size = sum(bytes_ for _, bytes_ in seen)
        ranks = sizes.get(group, len(group.split("-")))
        rows.append(
            {
                "operation": operation,
                "group": group,
                "calls": sum(calls for calls, _ in seen),
                "bytes": size,
                "wire_bytes": round(on_the_wire(operation, size, ranks)),
            }
        )
    return rows


def cpu_peak() -> float:
    """Return operations a second of a matrix product in fp32, on all ranks at once."""
    a = torch.randn(768, 768)
    best = float("inf")
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(4):
            a @ a
        best = min(best, (time.perf_counter() - begin) / 4)
    return 2 * 768**3 / best


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="POINT.json")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gpu", help="name in the planner's gpus.json; its peak is MFU's 100 %%")
    parser.add_argument("--point", default="{}", help="JSON to put before the results")
    # Job scripts pass them; a point is always measured again.
    for how in ("--resume", "--resume=auto", "--overwrite"):
        parser.add_argument(how, action="store_true", help=argparse.SUPPRESS)
    args, words = parser.parse_known_args()
    files = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    # No warm-up of the learning rate, which may be longer than these few steps, and nothing between the
    # steps.
    quiet = ["optimizer.warmup_steps=0", "checkpoint.every=0", "checkpoint.export_hf=false", "eval.every=0"]
    config = load_config(files, [*overrides, *quiet, f"train.steps={args.steps + 2}"])
    result = measure(config, args.steps, args.gpu)
    if os.environ.get("RANK", "0") == "0":
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(json.loads(args.point) | result, indent=1) + "\n")
    parallel.shut_down()


if __name__ == "__main__":
    main()

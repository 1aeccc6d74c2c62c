"""Measures seconds and bytes of a weight push, by transport, to real SGLang and vLLM servers on this machine.

It makes models of Qwen2's architecture with random bf16 weights, and pushes them as a run does: close the
gate, pause the server, move and load the weights, set the version, flush the prefix cache, resume the server.
Between pushes every `--changed`-th element changes by a unit in its last place. In turn with each push it
measures a plain torch.distributed.broadcast of the same bytes, in the same buckets, to a process that only
receives them.

  in-process  into the embedded engine
  broadcast   over a process group with the server (gloo on CPU, NCCL on GPU)
  delta       like broadcast, but changed elements only
  shared      memory of this machine, or of one GPU (CUDA IPC), that the server maps
  disk        safetensors files
  adapter     a low-rank adapter of all linear layers alone (`--rank`), by files, to a server started for it

`push_s` is the whole push. `transfer_s` is the time from the first byte read to the last one loaded in the
server, and `of_plain` = plain_s / transfer_s (target for broadcast: 0.8). `wire_of_plain` is the same ratio
for the transfer of bytes alone, without the server's loading. `first_s` is the first push, which forms the
group. `parts_s` are medians: the transport's begin, send and end, the filling of buckets between the sends,
and the steps around the transport (pause, flush, resume). Ratios compare neighbouring measurements. On a
machine that runs other programs, read `of_fastest`, the ratio of the fastest ones.

NCCL needs one GPU for this process and one for the server: with a single GPU, broadcast and delta are left
out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lib.sync.model import change, make_adapter, make_model
from lib.sync.ranks import measure_ranks
from lib.sync.server import ROOT, cpu_seconds, device, engine_python, served, two_gpus
from torch import Tensor

from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.sampling.local_model import LocalModel
from megatron_gvpo.servers.launch.start import DIALECTS
from megatron_gvpo.servers.leader import BackgroundLoop, Push
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.settings.config import Config
from megatron_gvpo.weights.adapter import Adapter
from megatron_gvpo.weights.broadcast import Broadcast
from megatron_gvpo.weights.bucket import Bucket
from megatron_gvpo.weights.delta import Delta
from megatron_gvpo.weights.disk import Disk
from megatron_gvpo.weights.node import NodeMemory
from megatron_gvpo.weights.publisher import Publisher
from megatron_gvpo.weights.receivers import receiver_class
from megatron_gvpo.weights.relay import ORDERS, Relays
from megatron_gvpo.weights.shared import Shared
from megatron_gvpo.weights.transport import PushSettings

CPU = torch.device("cpu")
TIMEOUT = 120.0  # seconds for one step of a push
TARGET = 0.8
TRANSPORTS = ("in-process", "broadcast", "delta", "shared", "disk", "adapter")
Weights = dict[str, Tensor]


def main() -> None:
    args = parse()
    if args.ranks:
        against_ranks(args)
        return
    path = args.out or ROOT / "benchmarks" / "results" / f"weight_sync_{args.device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(args), "settings": settings(args), "results": []}
    with Plain(args) as plain:
        for megabytes in args.megabytes:
            with tempfile.TemporaryDirectory(dir=args.directory) as directory:
                weights = make_model(Path(directory) / "model", megabytes, device(args))
                for row in measure_model(Path(directory), weights, plain, args):
                    report["results"].append(row)
                    print_row(row)
                    report["machine"]["load_at_end"] = os.getloadavg()[0]
                    path.write_text(json.dumps(report, indent=2) + "\n")
                del weights


def against_ranks(args: argparse.Namespace) -> None:
    """Measure pushes by shards against the trainer's ranks; writes results/sync_ranks_cpu.json."""
    path = args.out or ROOT / "benchmarks" / "results" / "sync_ranks_cpu.json"
    args.engines = []
    report: dict[str, Any] = {"machine": machine(args), "rounds": args.rounds, "results": []}
    for ranks in args.ranks:
        row = measure_ranks(ranks, args.megabytes[0], args.rounds)
        report["results"].append(row)
        print(row, flush=True)
        path.write_text(json.dumps(report, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 200, 2000], metavar="MB")
    parser.add_argument("--engines", nargs="*", choices=DIALECTS, default=list(DIALECTS))
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        metavar="N",
        help="measure pushes by shards from N trainer ranks, without engines (parts/sync/ranks.py)",
    )
    parser.add_argument("--rank", type=int, default=16, help="of the adapter (16)")
    parser.add_argument("--rounds", type=int, default=5, help="measured pushes of each transport (5)")
    parser.add_argument("--bucket-mb", type=int, default=512, help="rollout.weights.bucket_mb (512)")
    parser.add_argument("--changed", type=int, default=50, help="every N-th element changes a push (50)")
    parser.add_argument(
        "--python", nargs="*", default=[], metavar="ENGINE=PYTHON", help="default: make_env.sh"
    )
    parser.add_argument("--directory", type=Path, help="for models and the disk transport; default: TMPDIR")
    parser.add_argument("--out", type=Path, help="default: results/weight_sync_DEVICE.json beside this file")
    return parser.parse_args()


def measure_model(
    directory: Path, weights: Weights, plain: Plain, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    if "in-process" in args.transports:
        target = LocalModel(
            str(directory / "model"),
            load_tokenizer(str(directory / "model")),
            device=device(args),
            dtype=torch.bfloat16,
            batch_size=1,
            end_token_ids=(1,),
        )

        def push_in_process(version: int) -> dict[str, float]:
            target.load(weights.items(), version)
            return {}

        yield measure("none", "in-process", push_in_process, weights, plain, args)
        del target
    full = [name for name in args.transports if name not in ("in-process", "adapter")]
    alone = [name for name in args.transports if name == "adapter"]
    for name, transports in [(name, kind) for name in args.engines for kind in (full, alone) if kind]:
        pushed = make_adapter(weights, args.rank) if transports is alone else weights
        with served(name, directory, args, args.rank if transports is alone else None) as server:
            for transport in transports:
                if transport in ("broadcast", "delta") and args.device == "cuda" and not two_gpus():
                    print(f"{transport} is left out: NCCL needs a second GPU", file=sys.stderr)
                    continue
                pushing = Pushing(transport, *server, pushed, args)
                try:
                    yield measure(name, transport, pushing, pushed, plain, args)
                finally:
                    pushing.close()


def measure(
    engine: str,
    transport: str,
    push: Callable[[int], dict[str, float]],
    weights: Weights,
    plain: Plain,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Measure the first push alone, then rounds of a plain broadcast and a push."""
    size = sum(tensor.nbytes for tensor in weights.values())
    rounds: list[dict[str, float]] = []
    for i in range(args.rounds + 1):
        change(weights, args.changed)
        plain_s = plain(size)
        begin = time.perf_counter()
        parts = push(i)
        push_s = time.perf_counter() - begin
        rounds.append({"plain_s": plain_s, "push_s": push_s, "transfer_s": push_s, "bytes": size} | parts)
        print(f"{engine} {transport} {size / 1e6:.0f} MB: {rounds[-1]}", file=sys.stderr, flush=True)
    first, rounds = rounds[0], rounds[1:]
    row: dict[str, Any] = {"engine": engine, "transport": transport, "megabytes": size / 1e6}
    row |= {"first_s": round(first["push_s"], 4), "bytes": median(r["bytes"] for r in rounds)}
    row |= {name: spread([r[name] for r in rounds]) for name in ("push_s", "transfer_s", "plain_s")}
    row["gb_per_s"] = round(size / row["transfer_s"]["median"] / 1e9, 3)
    ratios = spread([r["plain_s"] / r["transfer_s"] for r in rounds])
    row["of_plain"] = ratios | {"of_fastest": round(row["plain_s"]["min"] / row["transfer_s"]["min"], 3)}
    spent = [name for name in rounds[0] if name.endswith("_part")]
    row["parts_s"] = {name[:-5]: round(median(r[name] for r in rounds), 4) for name in spent}
    for name in ("wire_s", "trainer_cpu_s", "server_cpu_s"):
        if name in rounds[0]:
            row[name] = spread([r[name] for r in rounds])
    if "wire_s" in rounds[0]:
        row["wire_of_plain"] = spread([r["plain_s"] / r["wire_s"] for r in rounds])
    return row


class Pushing:
    """Pushes by one transport to one server, and times the parts."""

    def __init__(
        self,
        transport: str,
        loop: BackgroundLoop,
        pool: ServerPool,
        config: Config,
        pid: int,
        weights: Weights,
        args: argparse.Namespace,
    ) -> None:
        where, backend = device(args), "nccl" if args.device == "cuda" else "gloo"
        receiver: Any = receiver_class(config.rollout.engine, transport)
        self._timed: Any
        if transport == "disk":
            self._timed = Timed(Disk(receiver, Path(config.output_dir) / "weights", TIMEOUT))
            where = CPU
        elif transport == "adapter":
            settings = PushSettings.of(
                config.model, config.rollout, config.output_dir, ModelCards(config), CPU
            )
            self._timed = Timed(Adapter.create(settings, receiver))
            where = CPU
        elif transport == "shared":
            memory = NodeMemory(f"megatron_gvpo-{os.getpid()}", where)
            relays = Relays(dist.HashStore(), [], TIMEOUT, ORDERS)
            self._timed = Timed(Shared(receiver, TIMEOUT, memory, relays))
        else:
            kind = Delta if transport == "delta" else Broadcast
            self._timed = Timed(kind(receiver, "127.0.0.1", backend, TIMEOUT))
        self._pool, self._weights, self._pid = pool, weights, pid
        self._publisher = Publisher(
            pool,
            loop,
            self._timed,
            config.rollout.weights,
            dtype=torch.bfloat16,
            device=where,
            expected={name: tuple(tensor.shape) for name, tensor in weights.items()},
            optional=frozenset(),
            fp8=None,
            report=lambda message: print(message, file=sys.stderr),
            colocated=False,
        )

    def __call__(self, version: int) -> dict[str, float]:
        self._timed.clear()
        assert self._publisher.next_command(version) == Push()
        cpu, own, begin = cpu_seconds(self._pid), time.process_time(), time.perf_counter()
        self._publisher.attempt(self._weights.items(), version)
        seconds = time.perf_counter() - begin
        own, cpu = time.process_time() - own, cpu_seconds(self._pid) - cpu
        assert self._pool.handles[0].has(version), "the push failed"
        metrics = self._publisher.metrics
        spent = {"bytes": metrics["sync/bytes"], "trainer_cpu_s": own, "server_cpu_s": cpu}
        if "sync/wire_s" in metrics:
            spent["wire_s"] = metrics["sync/wire_s"]
        return self._timed.parts(seconds) | spent

    def close(self) -> None:
        self._publisher.close()


class Timed:
    """A transport whose parts are timed."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.clear()

    def clear(self) -> None:
        self._begun: float | None = None
        self._spent = {"begin": 0.0, "send": 0.0, "end": 0.0}

    def parts(self, seconds: float) -> dict[str, float]:
        """Return seconds of each part; transfer_s is from the end of `begin` to the end of `end`."""
        assert self._begun is not None
        transfer = self._ended - self._begun
        parts = dict(self._spent)
        parts["fill"] = transfer - parts["send"] - parts["end"]
        parts["around"] = seconds - transfer - parts["begin"]
        return {f"{name}_part": value for name, value in parts.items()} | {"transfer_s": transfer}

    @property
    def metrics(self) -> dict[str, float]:
        return self._transport.metrics

    async def begin(self, handles: Any, version: int) -> None:
        await self._clocked("begin", self._transport.begin(handles, version))
        self._begun = time.perf_counter()

    async def send(self, bucket: Bucket) -> int:
        return await self._clocked("send", self._transport.send(bucket))

    async def end(self) -> None:
        await self._clocked("end", self._transport.end())
        self._ended = time.perf_counter()

    def over(self) -> None:
        self._transport.over()

    async def close(self) -> None:
        await self._transport.close()

    async def _clocked(self, part: str, call: Any) -> Any:
        begin = time.perf_counter()
        result = await call
        self._spent[part] += time.perf_counter() - begin
        return result


class Plain:
    """A plain broadcast to another process, which receives everything into one buffer."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._bucket = args, args.bucket_mb * 2**20
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Plain:
        args = self._args
        if args.device == "cuda" and not two_gpus():
            return self
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        command = [sys.executable, str(ROOT / "benchmarks" / "lib" / "sync" / "plain.py"), args.device]
        self._process = subprocess.Popen([*command, str(store.port), str(self._bucket)])
        backend = "nccl" if args.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=2)
        self._buffer = torch.ones(self._bucket, dtype=torch.uint8, device=device(args))
        return self

    def __call__(self, size: int) -> float:
        """Send `size` bytes in buckets; returns the seconds until the other process has them."""
        if self._process is None:
            return float("nan")
        self._announce(size)
        begin = time.perf_counter()
        for start in range(0, size, self._bucket):
            dist.broadcast(self._buffer[: min(self._bucket, size - start)], 0)
        dist.barrier()
        if self._args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def _announce(self, size: int) -> None:
        dist.broadcast(torch.tensor([size], device=self._buffer.device), 0)
        dist.barrier()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._announce(0)
            self._process.wait(30)
            dist.destroy_process_group()


def spread(values: list[float]) -> dict[str, float]:
    return {name: round(f(values), 4) for name, f in (("min", min), ("median", median), ("max", max))}


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {"target": TARGET} | {n: vars(args)[n] for n in ("rounds", "bucket_mb", "changed", "rank")}


def machine(args: argparse.Namespace) -> dict[str, Any]:
    versions = {name: version(name) for name in ("torch", "transformers", "safetensors", "aiohttp")}
    for engine in args.engines:
        name = "vllm" if engine == "vllm" else "sglang"
        code = f"import importlib; print(importlib.import_module('{name}.version').__version__)"
        lines = subprocess.run(
            [engine_python(engine, args), "-c", code], capture_output=True, text=True
        ).stdout.split()
        versions[engine] = lines[-1] if lines else "unknown"
    return {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "command": shlex.join(["python", *sys.argv]),
        "load_at_start": os.getloadavg()[0],
        **versions,
    }


def print_row(row: dict[str, Any]) -> None:
    where = f"{row['engine']:>7} {row['transport']:<10} {row['megabytes']:7.0f} MB"
    print(
        f"{where}  push {row['push_s']['median']:7.3f} s  transfer {row['transfer_s']['median']:7.3f} s  "
        f"{row['gb_per_s']:6.2f} GB/s  sent {row['bytes'] / 1e6:7.0f} MB  plain "
        f"{row['plain_s']['median']:6.3f} s  of plain {row['of_plain']['median']:.2f} "
        f"(fastest {row['of_plain']['of_fastest']:.2f}"
        + (f", wire {row['wire_of_plain']['median']:.2f})" if "wire_of_plain" in row else ")"),
        flush=True,
    )


if __name__ == "__main__":
    main()

"""Starts the real server on this machine that weight_sync.py pushes to, and chooses each side's device."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers.http import Http, open_session
from megatron_gvpo.servers.launch.start import DIALECTS, start_servers
from megatron_gvpo.servers.leader import BackgroundLoop
from megatron_gvpo.servers.pool import ServerPool
from megatron_gvpo.settings.config import Config, build_config

ROOT = Path(__file__).parents[3]


@contextmanager
def served(
    engine: str, directory: Path, args: argparse.Namespace, rank: int | None = None
) -> Iterator[tuple[BackgroundLoop, ServerPool, Config, int]]:
    """Yield a healthy server of `engine` with the model, a pool of only this server, its process group.

    With `rank` it takes adapters of this rank.
    """
    small = ["--max-total-tokens", "4096"] if engine == "sglang" else ["--max-num-seqs", "8"]
    servers = {"python": engine_python(engine, args), "context_length": 128, "args": small}
    weights = {"bucket_mb": args.bucket_mb, "transport": "broadcast" if rank is None else "adapter"}
    rollout = {"engine": engine, "servers": servers, "weights": weights}
    adapter = None if rank is None else {"rank": rank, "alpha": rank}
    config = build_config(
        {
            "output_dir": str(directory / engine),
            "model": {"path": str(directory / "model"), "dtype": "bfloat16", "adapter": adapter},
            "data": {"train": {"path": "unused"}},
            "rollout": rollout,
            "train": {"steps": 1, "prompts_per_step": 1},
            "optimizer": {"lr": 1.0},
        }
    )
    loop = BackgroundLoop("benchmark")
    supervisor = start_servers(
        config.model,
        config.rollout,
        config.output_dir,
        ModelCards(config),
        None,
        lambda message: print(message, file=sys.stderr),
    )
    session = loop.run(open_session())
    server = DIALECTS[engine](Http(session, supervisor.processes[0].url))
    pool = ServerPool([server], config.rollout.servers, (1,), print, supervisor)
    try:
        loop.run(pool.start())
        yield loop, pool, config, supervisor.processes[0].pid or 0
    finally:
        loop.run(pool.stop())
        supervisor.close()
        loop.run(session.close())
        loop.close()


def engine_python(engine: str, args: argparse.Namespace) -> str:
    pythons = dict(choice.split("=", 1) for choice in args.python)
    if engine in pythons:
        return pythons[engine]
    script = ROOT / "tools" / "engines" / "make_env.sh"
    built = subprocess.run([script, engine], stdout=subprocess.PIPE, text=True, check=True)
    return built.stdout.strip().splitlines()[-1]


def device(args: argparse.Namespace) -> torch.device:
    """Return the trainer's device: the last GPU, because servers start on the first."""
    return (
        torch.device("cuda", torch.cuda.device_count() - 1) if args.device == "cuda" else torch.device("cpu")
    )


def cpu_seconds(group: int) -> float:
    """Return the CPU seconds that a process group has used so far."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def two_gpus() -> bool:
    return torch.cuda.device_count() > 1

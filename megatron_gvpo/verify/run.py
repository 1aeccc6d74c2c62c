"""Runs both sides in processes of their own, and prints a line for every layout and a verdict."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_gvpo.config.errors import ConfigError
from megatron_gvpo.megatron.cpu.bridge import import_bridge
from megatron_gvpo.verify import candidate  # noqa: F401 - imported once, before the forks
from megatron_gvpo.verify.layout import Layout
from megatron_gvpo.verify.measures import Limits
from megatron_gvpo.verify.sides import Result, candidate_side, read_result, reference_side

SECONDS = 600.0  # that a side may take in one layout
_COLLECTIVE = timedelta(seconds=120)


def verify(
    config: dict[str, Any],
    layouts: Sequence[Layout],
    where: str,
    said: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Compare the architecture of a shrunk config.json in every layout with transformers.

    `said` gets each result as it comes. The process must not have used torch's threads before, because it
    forks. Raises ConfigError, which begins with `where`, if transformers cannot build the model.
    """
    import_bridge()
    results = []
    with tempfile.TemporaryDirectory(prefix="verify-") as name:
        directory = Path(name)
        _in_processes(1, reference_side, config, directory, where)
        limits = Limits()
        for layout in layouts:
            try:
                _in_processes(layout.ranks, candidate_side, layout, directory)
                result = read_result(layout, directory)
            except ConfigError as error:
                result = Result(layout, limits, None, str(error), refused=True)
            except RuntimeError as error:
                result = Result(layout, limits, None, str(error))
            said(result)
            results.append(result)
    return results


def _in_processes(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work` in forks of this process, the ranks of a gloo process group.

    Raises ConfigError if a fork does, RuntimeError with the first other error or where one is not done in
    SECONDS.
    """
    fork = get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        processes = [
            fork.Process(target=_rank, args=(r, ranks, place, work, arguments)) for r in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + SECONDS
        try:
            while any(process.is_alive() for process in processes):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not done after {SECONDS:.0f} s")
                if any(process.exitcode for process in processes):
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.join()
        for file in sorted(place.glob("refused-*")):
            raise ConfigError(file.read_text())
        for file in sorted(place.glob("failed-*"), key=lambda file: file.stat().st_mtime):
            raise RuntimeError(file.read_text())
        if codes := [process.exitcode for process in processes if process.exitcode]:
            raise RuntimeError(f"a rank ended with exit code {codes[0]}")


def _rank(rank: int, ranks: int, place: Path, work: Callable[..., None], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    with suppress(OSError):
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{place}/store", rank=rank, world_size=ranks, timeout=_COLLECTIVE
        )
        work(*arguments)
    except ConfigError as error:
        (place / f"refused-{rank}").write_text(str(error))
        os._exit(1)
    except BaseException as error:
        first = " ".join(str(error).split())[:400]
        (place / f"failed-{rank}").write_text(f"{type(error).__name__}: {first}")
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)

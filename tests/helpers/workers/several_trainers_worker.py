"""Rank function of test_several_trainers.py: three runs in a process that nobody else uses."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from helpers.tiny_run import GVPO, SHORT, configure
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.training.callbacks import Callback, Recorder
from megatron_gvpo.training.trainer import Trainer

STEPS = (*GVPO, *SHORT, "train.steps=2")


class Fails(Callback):
    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        if step == 1:
            raise ZeroDivisionError("a callback of the user's")


def state_of_process() -> dict[str, Any]:
    """Return everything that a run could leave behind in its process."""
    gc.collect()
    process = psutil.Process()
    return {
        "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "logging": [str(handler) for handler in logging.getLogger().handlers],
        "children": [child.pid for child in process.children(recursive=True)],
        "threads": [thread.name for thread in threading.enumerate()],
        "groups": len(dist.distributed_c10d._world.pg_map),
        # matplotlib keeps its fonts open
        "files": sorted(f.path for f in process.open_files() if not f.path.endswith(".ttf")),
        "connections": len(process.net_connections()),
        "tasks": process.num_threads(),
    }


def run(task: str, out: str) -> None:
    """A run that fails, then one from a dict in another thread, and one in a running event loop."""
    dist.destroy_process_group()  # the first run makes a process group, as in a notebook
    folder = Path(out)
    failing = Trainer(configure(Path(task), folder / "failed", *STEPS), [Recorder(), Fails()])
    with pytest.raises(ZeroDivisionError):
        failing.fit()
    states = {"before": state_of_process()}

    values = configure(Path(task), folder / "thread", *STEPS).model_dump(mode="json", exclude_unset=True)
    in_thread = threading.Thread(target=lambda: Trainer(values, [Recorder()]).fit())
    in_thread.start()
    in_thread.join()
    states["between"] = state_of_process()

    async def in_a_loop() -> Trainer:
        trainer = Trainer(configure(Path(task), folder / "loop", *STEPS), [Recorder()])
        trainer.fit()
        return trainer

    trainer = asyncio.run(in_a_loop())
    states["after"] = state_of_process()
    (folder / "found.json").write_text(json.dumps(states))

    once = r"fit\(\) of this Trainer has been called before; the run is at step 2 of train\.steps=2: con"
    with pytest.raises(ConfigError, match=once):
        trainer.fit()
    with pytest.raises(ConfigError, match="this Trainer is closed"):  # the next Trainer closed it
        failing.fit()
    assert not hasattr(failing, "components"), "its model's memory is free"

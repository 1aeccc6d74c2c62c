"""Several Trainers in one process, one after the other, as in a notebook: nothing is torn down between."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from suite.real_parts import used
from tiny_run import GVPO, SHORT, configure, records

from megatron_gvpo.callbacks import Callback, Recorder
from megatron_gvpo.config.schema import Config, ConfigError
from megatron_gvpo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("leave_the_process_group")

STEPS = (*GVPO, *SHORT, "train.steps=2")


class Fails(Callback):
    def on_step(self, trainer: Trainer, step: int, metrics: object) -> None:
        if step == 1:
            raise ZeroDivisionError("a callback of the user's")


def state_of_process() -> dict[str, Any]:
    """Everything that a run could leave behind in its process."""
    return {
        "signals": [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "logging": list(logging.getLogger().handlers),
        "children": [child.pid for child in psutil.Process().children(recursive=True)],
        "threads": [thread.name for thread in threading.enumerate()],
        "groups": len(dist.distributed_c10d._world.pg_map),
        # matplotlib keeps its fonts open
        "files": sorted(f.path for f in psutil.Process().open_files() if not f.path.endswith(".ttf")),
        "connections": len(psutil.Process().net_connections()),
    }


@pytest.fixture(scope="module")
def runs(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that fails, then one from a dict in another thread, and one in a running event loop."""
    found: dict[str, Any] = {name: tmp_path_factory.mktemp(name) for name in ("failed", "thread", "loop")}
    failing = Trainer(configure(task, found["failed"], *STEPS), [Recorder(), Fails()])
    with pytest.raises(ZeroDivisionError):
        failing.fit()
    found["failing"], found["before"] = failing, state_of_process()
    found["threads before"] = len(list(Path("/proc/self/task").iterdir()))

    values = configure(task, found["thread"], *STEPS).model_dump(mode="json", exclude_unset=True)
    in_thread = threading.Thread(target=lambda: Trainer(values, [Recorder()]).fit())
    in_thread.start()
    in_thread.join()
    found["between"] = state_of_process()

    async def in_a_loop() -> Trainer:
        trainer = Trainer(configure(task, found["loop"], *STEPS), [Recorder()])
        trainer.fit()
        return trainer

    found["trainer"] = asyncio.run(in_a_loop())
    found["after"] = state_of_process()
    found["threads"] = len(list(Path("/proc/self/task").iterdir()))
    used("megatron-core and Megatron-Bridge, 1 rank")
    return found


def test_each_does_what_it_would_do_alone(runs):
    assert records(runs["thread"]) == records(runs["loop"])
    assert [line["step"] for line in records(runs["loop"])] == [0, 1, 2]


def test_they_leave_nothing_in_the_process(runs):
    for name, before in runs["before"].items():
        for left in (runs["between"][name], runs["after"][name]):
            # less is fine: other tests' threads end and their connections close at any time
            added = left > before if isinstance(left, int) else Counter(left) - Counter(before)
            assert not added, (name, before, left)
    assert runs["before"]["signals"] == runs["after"]["signals"], "each signal has the handler that it had"
    assert runs["threads"] < runs["threads before"] + 10, "the groups of one model have some twenty threads"


def test_fit_runs_once_and_says_how_to_go_on(runs):
    said = (
        r"fit\(\) of this Trainer has been called before; the run is at step 2 of train\.steps=2: construct"
    )
    with pytest.raises(ConfigError, match=said):
        runs["trainer"].fit()


def test_a_trainer_is_closed_by_the_next(runs):
    with pytest.raises(ConfigError, match="this Trainer is closed"):
        runs["failing"].fit()
    assert not hasattr(runs["failing"], "components"), "its model's memory is free"


@pytest.mark.parametrize("given", ["run.yaml", Path("run.yaml"), None, Config])
def test_other_things_than_configurations_are_refused(given):
    with pytest.raises(ConfigError, match=r"a configuration is what load_config\(\[file, ...\]\) returns"):
        Trainer(given)


def test_one_fit_at_a_time(task, tmp_path):
    met: list[str] = []

    class Another(Callback):
        def on_start(self, trainer: Trainer) -> None:
            with pytest.raises(ConfigError, match=r"fit\(\) of another Trainer is running") as error:
                Trainer(configure(task, tmp_path / "other", *STEPS))
            met.append(str(error.value))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Trainer(configure(task, tmp_path / "one", *STEPS), [Another()]).fit()
    assert len(met) == 1

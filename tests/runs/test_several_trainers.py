"""Several Trainers in one process, one after the other, as in a notebook: nothing is torn down between."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from helpers.distributed import launch
from helpers.tiny_run import configure, records
from helpers.workers.several_trainers_worker import STEPS

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.settings.config import Config
from megatron_gvpo.training.callbacks import Callback
from megatron_gvpo.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


@pytest.fixture(scope="module")
def runs(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that fails, one in another thread, and one in a running event loop.

    They are in a process of their own: in pytest's, other tests' threads, servers and garbage come and go.
    """
    out = tmp_path_factory.mktemp("several")
    launch("helpers.workers.several_trainers_worker:run", [1], str(task), str(out))
    return out


def test_each_does_what_it_would_do_alone(runs):
    assert records(runs / "thread") == records(runs / "loop")
    assert [line["step"] for line in records(runs / "loop")] == [0, 1, 2]


def test_they_leave_nothing_in_the_process(runs):
    states = json.loads((runs / "found.json").read_text())
    tasks = [state.pop("tasks") for state in states.values()]
    assert tasks[2] < tasks[0] + 10, "the groups of one model have some twenty threads"
    for name, before in states["before"].items():
        for resources in (states["between"][name], states["after"][name]):
            added = resources > before if isinstance(resources, int) else Counter(resources) - Counter(before)
            assert not added, (name, before, resources)
    assert states["before"]["signals"] == states["after"]["signals"], (
        "each signal has the handler that it had"
    )


@pytest.mark.parametrize("value", ["run.yaml", Path("run.yaml"), None, Config])
def test_other_things_than_configurations_are_refused(value):
    with pytest.raises(ConfigError, match=r"a configuration is what load_config\(\[file, ...\]\) returns"):
        Trainer(value)


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

"""Messages about rewards that fail, and about a worker that is never ready: real worker processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from helpers.suite.real_parts import used

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.settings.rewards import RewardConfig, RewardsConfig

STRICT = """
def strict(prompt, rollout):
    return {"fine": 1.0, "none": None}[rollout.text]
"""


KILLED = """
import os, pathlib, signal

def strict(prompt, rollout):
    mark = pathlib.Path(prompt.record["mark"])
    if rollout.text == "always" or (rollout.text == "once" and not mark.exists()):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0
"""


def pool(file: Path, text: str, module: str = "") -> RewardPool:
    file.write_text(text)
    strict = RewardConfig(name="mine", function=f"{module or file}:strict")
    return RewardPool(RewardsConfig(components=(RewardConfig(name="format"), strict)))


def test_failures_are_told_at_first_and_when_their_share_doubles(tmp_path: Path) -> None:
    with pool(tmp_path / "strict.py", STRICT) as rewards:
        used("reward workers")

        def warnings_of(*texts: str) -> list[str]:
            rollouts = [Rollout([i], [0.0], text, "stop") for i, text in enumerate(texts)]
            rewards.score([group := Group(Prompt("p", (1,), "?"), rollouts)])
            return rewards.warnings([group])

        assert warnings_of("fine") == []
        assert warnings_of("other", "fine", "fine", "fine") == [
            "rewards.components.1 (mine) failed for 1 of 4 responses, and counts 0 for them: "
            "KeyError: 'other' (strict.py, line 3)"
        ]
        assert warnings_of("none", "fine", "fine") == []
        [warning] = warnings_of("other", "none", "none", "fine")
        assert (
            "failed for 3 of 4 responses" in warning and "it returned NoneType instead of a number" in warning
        )
        assert warnings_of("none") == []


def test_a_job_whose_worker_was_killed_is_tried_once_more(tmp_path: Path) -> None:
    """The kernel kills a worker where others have taken the memory; its response should not pay for that."""
    rollouts = [Rollout([i], [0.0], text, "stop") for i, text in enumerate(["", "once", "always", "fine"])]
    with pool(tmp_path / "killed.py", KILLED) as rewards:
        rewards.score([Group(Prompt("p", (1,), "?", record={"mark": str(tmp_path / "mark")}), rollouts)])
    assert [rollout.rewards["mine"] for rollout in rollouts] == [1.0, 1.0, 0.0, 1.0]
    [error] = [rollout.reward_errors["mine"] for rollout in rollouts if rollout.reward_errors]
    assert error == "it ended its process (signal 9, Killed)"


@contextmanager
def many_open_files(count: int) -> Iterator[None]:
    """So many further files are open, as in a run with a connection for each response of a step."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 256, hard))
    try:
        with ExitStack() as opened, open(os.devnull, "rb") as nothing:
            for _ in range(count):
                opened.callback(os.close, os.dup(nothing.fileno()))
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_workers_start_beside_a_thousand_connections(tmp_path: Path) -> None:
    """Fails on the old code, which asked select about them: a run ended with its first late reward."""
    rollouts = [Rollout([i], [0.0], text, "stop") for i, text in enumerate(["once", "fine"])]
    with many_open_files(1100), pool(tmp_path / "killed.py", KILLED) as rewards:
        rewards.score([Group(Prompt("p", (1,), "?", record={"mark": str(tmp_path / "mark")}), rollouts)])
    assert (tmp_path / "mark").exists()
    assert [rollout.rewards["mine"] for rollout in rollouts] == [1.0, 1.0]


@pytest.mark.parametrize("edit", ["edited", "deleted"])
def test_a_worker_that_is_replaced_has_the_functions_that_the_run_began_with(
    tmp_path: Path, edit: str
) -> None:
    """The responses of one batch would be scored by different rewards."""
    file, record = tmp_path / "killed.py", {"mark": str(tmp_path / "mark")}
    rollouts = [Rollout([i], [0.0], text, "stop") for i, text in enumerate(["", "once", "fine"])]
    with pool(file, KILLED) as rewards:
        file.write_text(KILLED.replace("1.0", "7.0")) if edit == "edited" else file.unlink()
        rewards.score([Group(Prompt("p", (1,), "?", record=record), rollouts)])
    assert (tmp_path / "mark").exists()
    assert [rollout.rewards["mine"] for rollout in rollouts] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("edit", ["edited", "deleted"])
def test_a_worker_that_is_replaced_has_the_imports_that_the_run_began_with(tmp_path: Path, edit: str) -> None:
    file, helper = tmp_path / "killed.py", tmp_path / "kept_package" / "value.py"
    helper.parent.mkdir()
    helper.write_text("from .one import ONE\n")
    (helper.parent / "one.py").write_text("ONE = 1.0\n")
    text = KILLED.replace("import os", "from kept_package.value import ONE\nimport os").replace("1.0", "ONE")
    rollouts = [Rollout([i], [0.0], text, "stop") for i, text in enumerate(["", "once", "fine"])]
    with pool(file, text) as rewards:
        for path in helper.parent.glob("*.py"):
            path.write_text("ONE = 7.0\n") if edit == "edited" else path.unlink()
        record = {"mark": str(tmp_path / "mark")}
        rewards.score([Group(Prompt("p", (1,), "?", record=record), rollouts)])
    assert (tmp_path / "mark").exists()
    assert [rollout.rewards["mine"] for rollout in rollouts] == [1.0, 1.0, 1.0]


def test_a_worker_that_is_replaced_has_the_package_that_the_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file, record = tmp_path / "killed_package" / "__init__.py", {"mark": str(tmp_path / "mark")}
    file.parent.mkdir()
    rollouts = [Rollout([i], [0.0], text, "stop") for i, text in enumerate(["", "once", "fine"])]
    with pool(file, KILLED, "killed_package") as rewards:
        file.write_text(KILLED.replace("1.0", "7.0"))
        rewards.score([Group(Prompt("p", (1,), "?", record=record), rollouts)])
    assert (tmp_path / "mark").exists()
    assert [rollout.rewards["mine"] for rollout in rollouts] == [1.0, 1.0, 1.0]


def test_a_function_that_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_gvpo.workers.process.START", 0.1)
    problem = (
        r"not ready after 0\.1 seconds: importing .*endless\.py:strict takes longer, or waits for something"
    )
    with (
        pytest.raises(ConfigError, match=problem),
        pool(tmp_path / "endless.py", "import time\ntime.sleep(3600)\n") as rewards,
    ):
        rewards.score([])


BUSY = """
import time

def busy(prompt, rollout):
    begin = time.process_time()
    while time.process_time() < begin + 0.5:
        pass
    return 0.5
"""
# Scores a response, while another process stops this one, and all that it has started, for 13 s.
STOPPED = """
import subprocess, sys

from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.settings.rewards import RewardConfig, RewardsConfig

reward = RewardConfig(name="busy", function=sys.argv[1])
rollouts = [Rollout([1], [-0.5], "", "stop")]
with RewardPool(RewardsConfig(components=(reward,), timeout=12)) as pool:
    stopper = subprocess.Popen([sys.executable, "-c", sys.argv[2]])
    pool.score([Group(Prompt("p", (1,), "?"), rollouts)])
    stopper.wait()
print(rollouts[0].reward, rollouts[0].reward_errors)
"""
STOPPER = """
import os, psutil, time

trainer = psutil.Process(os.getppid())
processes = [trainer, *(p for p in trainer.children(recursive=True) if p.pid != os.getpid())]
for process in processes:
    process.suspend()
time.sleep(13)
for process in processes:
    process.resume()
"""


def test_the_time_in_which_a_whole_job_is_stopped_does_not_count(tmp_path: Path) -> None:
    """As `scontrol suspend` stops it: every response that was being scored had a reward of 0."""
    (tmp_path / "mine.py").write_text(BUSY)
    program = [sys.executable, "-c", STOPPED, f"{tmp_path}/mine.py:busy", STOPPER]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.stdout == "0.5 {}\n", done.stderr

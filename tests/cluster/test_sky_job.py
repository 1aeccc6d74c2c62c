"""A job for SkyPilot: its own reader takes the file; the nodes' parts, starts and the hook, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from helpers.machine.pods import PATIENCE, Pod
from helpers.paths import HELPERS
from helpers.programs.environments import environment_of
from helpers.suite.real_parts import used
from helpers.tiny_run import records

from megatron_gvpo.cli import main
from megatron_gvpo.core.launch import free_ports

SERVED = ("rollout.engine=vllm", "--rollout-nodes", "1")


def sky(task: Path, *arguments: str) -> int:
    mount = ("--mount", f"data={task.parent}", "--container", "registry/trainer:1")
    return main(["sky", str(task / "run.yaml"), f"output_dir={task.parent / 'sky-run'}", *mount, *arguments])


def test_the_task_agrees_with_skypilots_own_reader(task: Path, tmp_path: Path, capsys):
    gpus = ("--gpu", "H100", "--secret", "WANDB_API_KEY", "--env", "A=1")
    assert sky(task, *SERVED, "--nodes", "3", *gpus, "--dry-run") == 0
    file = tmp_path / "task.yaml"
    file.write_text(capsys.readouterr().out)
    command = [environment_of("skypilot.txt"), HELPERS / "programs" / "check_task.py"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run([*command, file], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 nodes, H100:8, secrets ROLLOUT_KEY WANDB_API_KEY" in done.stdout
    task_with_a_mistake = yaml.safe_load(file.read_text()) | {"nodes": 2}
    file.write_text(yaml.dump(task_with_a_mistake))
    done = subprocess.run([*command, file], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "nodes" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "H100", "--name", "_a"], "--name _a: SkyPilot's names"),
        ([], "--gpu is missing"),
        (["--gpu", "H100:8"], "--gpu H100:8: expected a kind of GPU"),
        (["--gpu", "H100", "--secret", "a-b"], "--secret a-b: expected a variable"),
        (["--gpu", "H100", "--container", ""], "--container is missing"),
        (["--gpu", "H100", "output_dir=/elsewhere/run"], "output_dir=/elsewhere/run: is not on a volume"),
        (["--gpu", "H100", "parallel.tp=3"], "8 process(es) cannot hold parallel.tp=3"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(task: Path, capsys, arguments: list[str], words: str):
    assert sky(task, "--nodes", "1", *arguments, "--dry-run") == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


class Nodes:
    """The nodes of a task that run as processes. `does`: the script that is `python` there; None: Python."""

    def __init__(self, task: Path, directory: Path, does: str | None, *arguments: str) -> None:
        self.out = directory / "run"
        mounts = ("--mount", f"data={directory}", "--mount", f"task={task}", "--container", "a/b")
        job = ("--nodes", "2", "--ranks-per-node", "1", "--no-gpus", f"output_dir={self.out}")
        assert main(["sky", str(task / "run.yaml"), *job, *mounts, *arguments]) == 0
        self.task = yaml.safe_load((self.out / "sky" / "task.yaml").read_text())
        self.directory = directory
        self.path = Path(sys.executable).parent
        if does is None:
            return
        self.path = folder = directory / "bin"
        folder.mkdir()
        for name in ("python", "python3"):
            (folder / name).write_text(f"#!/bin/bash\n{does}\n")
            (folder / name).chmod(0o755)

    def start(self, number: int) -> list[Pod]:
        """Starts all nodes, as SkyPilot does for the job of this number on the same machines."""
        count = self.task["num_nodes"]
        ports = map(str, free_ports(2, "127.0.0.1"))
        common = {
            "PATH": f"{self.path}:/usr/bin:/bin",
            "HOME": os.environ["HOME"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            **self.task.get("envs", {}),
            **dict(zip(("MEETING_PORT", "ROLLOUT_PORT"), ports, strict=True)),
            "SKYPILOT_NUM_NODES": str(count),
            "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * count),
            "SKYPILOT_TASK_ID": "sky-managed-1",
            "SKYPILOT_INTERNAL_JOB_ID": str(number),
        }
        return [
            Pod(
                ["bash", "-c", self.task["run"]],
                common | {"SKYPILOT_NODE_RANK": str(node)},
                str(self.directory),
                self.directory / f"node_{node}.{number}.log",
            )
            for node in range(count)
        ]

    def logs(self, start: int) -> Path:
        return self.out / "sky" / f"sky-managed-1.{start}"


def codes(nodes: list[Pod]) -> list[int]:
    return [node.process.wait(PATIENCE) for node in nodes]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_nodes_agree_on_starts_and_servers_end_with_the_trainer(task: Path, tmp_path: Path):
    """A start that fails asks for another; the next has a number of its own, and resumes."""
    does = """
if [[ "$*" == *" serve "* ]]; then exec sleep 600; fi
[[ "$*" == *torch.distributed.run* ]] || exit 0
echo "$*" > "$MEGATRON_GVPO_LOGS/said.$NODE"
[[ "$MEGATRON_GVPO_LOGS" == *.1 ]]
"""
    nodes = Nodes(task, tmp_path, does, *SERVED, "--overwrite")
    first = nodes.start(5)
    assert codes(first[:2]) == [75, 75]
    for node in first:  # SkyPilot ends the other nodes where one has failed
        node.kill()
    assert codes(nodes.start(6)) == [0, 0, 0]
    for start, how in ((0, "--overwrite"), (1, "--resume=auto")):
        for node in range(2):
            assert how in (nodes.logs(start) / f"said.{node}").read_text().split()


@pytest.mark.proof  # test_pods.py has the same script on pods, and test_slurm.py on Slurm's nodes
def test_a_rank_trains_on_every_node_and_goes_on_after_a_lost_one(task: Path, tmp_path: Path):
    """The second start resumes from the checkpoint of the first, in which a node was lost."""
    steps = ("train.steps=12", "checkpoint.every=1", "checkpoint.export_hf=false", "eval.every=0")
    nodes = Nodes(task, tmp_path, None, *steps)
    first = nodes.start(1)
    log = nodes.logs(0) / "rank_00000.log"
    wait_for(lambda: (log.exists() and "checkpoint: " in log.read_text()) or first[0].process.poll())
    first[1].kill()
    assert codes(first)[0] != 0, log.read_text()
    again = nodes.start(2)
    assert codes(again) == [0, 0], [node.log.read_text()[-3000:] for node in again]
    used("torchrun")
    assert [record["step"] for record in records(nodes.out)] == list(range(13))
    starts = json.loads((nodes.out / "run.json").read_text())["starts"]
    assert [start["from_step"] > 0 for start in starts] == [False, True]
    for start in range(2):
        assert len(list(nodes.logs(start).glob("rank_*.log"))) == 2


def test_the_hook_finds_an_output_directory_that_is_named_from_the_working_directory(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """SkyPilot runs it in a directory of its own; the task's script changes to the working directory."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    job = ("--mount", f"data={tmp_path}", "--mount", f"task={task}", "--container", "a/b", "--no-gpus")
    assert main(["sky", str(task / "run.yaml"), "output_dir=runs/x", "--nodes", "1", *job, "--dry-run"]) == 0
    (hook,) = yaml.safe_load(capsys.readouterr().out)["config"]["hooks"]
    subprocess.run(["bash", "-c", hook["run"]], cwd=tmp_path / "elsewhere", check=True, timeout=60)
    assert (tmp_path / "runs" / "x" / "sky" / "stop").exists()


def test_the_hook_has_the_run_save_before_the_nodes_go(task: Path, tmp_path: Path):
    """The ranks get the signal on every node, and the job asks to be started again."""
    does = """
[[ "$*" == *torch.distributed.run* ]] || exit 0
rank() { trap 'touch "$MEGATRON_GVPO_LOGS/saved.$NODE"; exit 0' USR1; while :; do sleep 0.1; done; }
touch "$MEGATRON_GVPO_LOGS/rank_0000$NODE.log"
env --default-signal=USR1 bash -c "$(declare -f rank); rank" & wait $!
"""
    nodes = Nodes(task, tmp_path, does)
    started = nodes.start(1)
    wait_for(lambda: len(list(nodes.logs(0).glob("rank_*.log"))) == 2)
    time.sleep(1)
    (hook,) = nodes.task["config"]["hooks"]
    assert {"stop", "preemption", "down"} == set(hook["events"]) and hook["timeout"] == 600
    (nodes.out / "run.lock").touch()
    asking = subprocess.Popen(["bash", "-c", hook["run"]])
    assert codes(started) == [75, 75]
    assert sorted(file.name for file in nodes.logs(0).glob("saved.*")) == ["saved.0", "saved.1"]
    assert asking.poll() is None
    (nodes.out / "run.lock").unlink()
    assert asking.wait(60) == 0

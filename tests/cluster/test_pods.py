"""Jobs of Kubernetes as processes of this machine: lost pods, stops, restarts, and their ends."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from helpers.distributed import launch
from helpers.machine import pods
from helpers.suite.real_parts import used
from helpers.tiny_run import records

from megatron_gvpo.cli import main

STEPS = 6
SHORT = (
    f"train.steps={STEPS}",
    "rewards.timeout=600",
    "checkpoint.every=1",
    "checkpoint.export_hf=false",
    "eval.every=0",
)
# It says which step it is in, and slows the steps, so that the run cannot be over before something has
# happened to it.
REWARD = """
import pathlib, time

here = pathlib.Path(__file__).parent

def reward(prompt, rollout):
    (here / f"step_{rollout.weight_version + 1}").touch()
    time.sleep(0.1)
    return len(set(rollout.token_ids)) / len(rollout.token_ids)
"""


def reward(directory: Path) -> str:
    """An override that sets the reward above, which leaves files in `directory`."""
    file = directory / "reward.py"
    file.write_text(REWARD)
    return f"rewards.components={json.dumps([{'name': 'variety', 'function': f'{file}:reward'}])}"


def jobset_of(task: Path, directory: Path, *arguments: str) -> Path:
    """The JobSet's file of a run in `directory` of two nodes with one rank each."""
    job = ("--nodes", "2", "--ranks-per-node", "1", "--no-gpus", "--container", "registry/trainer:1")
    mounts = ("--mount", f"runs={directory}", "--mount", f"task={task}")
    out = f"output_dir={directory / 'run'}"
    assert main(["k8s", str(task / "run.yaml"), *SHORT, out, *job, *mounts, *arguments]) == 0
    return directory / "run" / "k8s" / "jobset.yaml"


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory) -> Path:
    """The same run on two ranks of this machine, without a cluster."""
    directory = tmp_path_factory.mktemp("undisturbed")
    launch(
        "helpers.workers.trainer_worker:fit_once",
        [2],
        *(str(task), str(directory / "run"), *SHORT, reward(directory)),
    )
    return directory / "run"


@pytest.mark.proof  # test_slurm.py has the same for Slurm
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_job_that_loses_a_pod_and_is_told_to_stop_ends_as_if_nothing_had_been(
    task: Path, undisturbed: Path, tmp_path: Path, is_lost: bool
):
    """One start may lose a pod without notice; in the next, one pod is drained from its node."""
    file = jobset_of(task, tmp_path, reward(tmp_path))
    with pods.running(file, tmp_path / "logs") as jobset:
        if is_lost:
            assert jobset.follow(until=(tmp_path / "step_3").exists) == ""
            jobset.pods["trainer", 1].kill()
        assert jobset.follow(until=(tmp_path / "step_5").exists) == ""
        drained = jobset.start
        assert drained == int(is_lost), jobset.logs()
        jobset.pods["trainer", 1].stop()
        assert jobset.follow() == "Completed", jobset.logs()
        assert jobset.start == drained + 1, jobset.logs()
        node_1 = (jobset.directory / f"trainer_1.{drained}.log").read_text()
        assert "node 1 is to stop: the ranks are asked to save" in node_1
        node_0 = (jobset.directory / f"trainer_0.{drained}.log").read_text()
        assert "stopped on request; the checkpoint is complete" in node_0
    used("torchrun")
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(STEPS + 1))
    assert records(tmp_path / "run") == records(undisturbed)


def python_that(directory: Path, does: str) -> dict[str, str]:
    """An image's PATH on which `python` is a script, which has the program's words in "$*"."""
    folder = directory / "bin"
    folder.mkdir()
    for name in ("python", "python3"):
        (folder / name).write_text(f"#!/bin/bash\n{does}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"}


def test_a_job_that_gets_nowhere_is_not_started_for_ever(task: Path, tmp_path: Path):
    """After five starts without a newer checkpoint the first pod ends the job."""
    image = python_that(tmp_path, 'if [[ "$*" == *torch.distributed.run* ]]; then exit 1; fi')
    file = jobset_of(task, tmp_path, reward(tmp_path), "--overwrite")
    with pods.running(file, tmp_path / "logs", image) as jobset:
        assert jobset.follow() == "Failed" and jobset.start == 5, jobset.logs()
        last = (jobset.directory / "trainer_0.5.log").read_text()
    assert "not started again: the last 5 starts have ended without a newer checkpoint" in last


def test_a_volume_that_cannot_be_written_ends_the_job_at_once(task: Path, tmp_path: Path):
    """Volumes often belong to root, and the images' user is another: pods would wait for each other."""
    file = jobset_of(task, tmp_path, reward(tmp_path))
    (tmp_path / "run" / "k8s").rename(tmp_path / "written")
    (tmp_path / "run" / "k8s").touch()  # root may write everywhere, but not in a file
    with pods.running(tmp_path / "written" / file.name, tmp_path / "logs") as jobset:
        assert jobset.follow() == "Failed" and jobset.start == 0, jobset.logs()
        logs = [(jobset.directory / f"trainer_{index}.0.log").read_text() for index in range(2)]
    assert any(f"user {os.getuid()} cannot write {tmp_path}/run/k8s/{pods.UID}.0" in log for log in logs)


def test_refused_input_ends_the_job_at_once(task: Path, tmp_path: Path):
    """A rank that exits with 2 would do so again."""
    refused = """
if [[ "$*" == *torch.distributed.run* ]]; then
  echo '{"node": "n", "time": 0, "problem": "exit code 2; see the end of its log"}' > \
    "$MEGATRON_GVPO_LOGS/rank_00000.failed.json"
  exit 1
fi"""
    file = jobset_of(task, tmp_path, reward(tmp_path))
    with pods.running(file, tmp_path / "logs", python_that(tmp_path, refused)) as jobset:
        assert jobset.follow() == "Failed" and jobset.start == 0, jobset.logs()


@pytest.mark.parametrize("over", [1, 2])
def test_the_trainer_and_the_servers_agree_on_addresses(task: Path, tmp_path: Path, over: int):
    """Every pod of servers listens where the trainer looks for it, and both have the Secret's key."""
    says = 'echo "$*" > "$MEGATRON_GVPO_LOGS/said.$NODE.$([[ "$*" == *" serve "* ]] && echo servers)"'
    servers = ("rollout.engine=sglang", f"rollout.servers.tp={over}", f"rollout.servers.nodes={over}")
    more = (*servers, "--rollout-nodes", "2", "--secret", "keys")
    file = jobset_of(task, tmp_path, reward(tmp_path), *more)
    with pods.running(file, tmp_path / "logs", python_that(tmp_path, says)) as jobset:
        assert jobset.follow() == "Completed", jobset.logs()
        logs = tmp_path / "run" / "k8s" / f"{pods.UID}.0"
        trainers = [(logs / f"said.{node}.").read_text().split() for node in range(2)]
        served = [(logs / f"said.{node}.servers").read_text().split() for node in range(2)]
    ports = [word.partition("=")[2] for arguments in served for word in arguments if "servers.port=" in word]
    urls = ",".join(f"http://127.0.0.1:{port}" for port in (ports if over == 1 else ports[:1]))
    for arguments in trainers:
        assert f"rollout.servers.urls=[{urls}]" in arguments
    for arguments in (*trainers, *served):
        assert "rollout.servers.api_key_env=ROLLOUT_KEY" in arguments
    if over == 2:
        for node, arguments in enumerate(served):
            assert {f"rollout.servers.node={node}", "rollout.servers.leader=127.0.0.1"} < set(arguments)


def test_servers_serve_until_the_trainer_has_saved(task: Path, tmp_path: Path):
    """All pods are told to stop at once, as by `kubectl delete`."""
    does = """
[[ "$*" == *torch.distributed.run* || "$*" == *" serve "* ]] || exit 0
part() {
  trap 'sleep $1; touch "$MEGATRON_GVPO_LOGS/$0.$NODE"; exit 0' $2
  touch "$MEGATRON_GVPO_LOGS/rank_$0$NODE.log"
  while :; do sleep 0.1; done
}
export -f part
if [[ "$*" == *" serve "* ]]; then exec bash -c 'part 0 TERM' served; fi
env --default-signal=USR1 bash -c 'part 2 USR1' saved & wait $!
"""
    servers = ("rollout.engine=sglang", "--rollout-nodes", "1", "--secret", "keys")
    file = jobset_of(task, tmp_path, reward(tmp_path), *servers)
    logs = tmp_path / "run" / "k8s" / f"{pods.UID}.0"
    with pods.running(file, tmp_path / "logs", python_that(tmp_path, does)) as jobset:
        assert jobset.follow(until=lambda: len([*logs.glob("rank_saved*.log")]) == 2) == ""
        jobset.end()
        codes = {pod: process.process.returncode for pod, process in jobset.pods.items()}
    assert codes == {("trainer", 0): 75, ("trainer", 1): 75, ("servers", 0): 0}, jobset.logs()
    ended = {file.name: file.stat().st_mtime for file in logs.glob("s*ed.?")}
    assert ended["served.0"] > max(ended["saved.0"], ended["saved.1"])

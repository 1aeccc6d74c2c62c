"""Jobs of Kubernetes as processes of this machine: lost pods, stops, restarts, and their ends."""

from __future__ import annotations

import json
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


def test_a_job_that_loses_a_pod_and_is_told_to_stop_ends_as_if_nothing_had_been(task: Path, tmp_path: Path):
    """The first start loses a pod without notice; in the second, one pod is drained from its node."""
    out, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    undisturbed.mkdir()
    launch(
        "helpers.workers.trainer_worker:fit_once",
        [2],
        *(str(task), str(undisturbed / "run"), *SHORT, reward(undisturbed)),
    )
    file = jobset_of(task, tmp_path, reward(tmp_path))
    with pods.running(file, tmp_path / "logs") as jobset:
        assert jobset.follow(until=(tmp_path / "step_3").exists) == ""
        jobset.pods["trainer", 1].kill()
        assert jobset.follow(until=(tmp_path / "step_5").exists) == ""
        assert jobset.start == 1, jobset.logs()
        jobset.pods["trainer", 1].stop()
        assert jobset.follow() == "Completed", jobset.logs()
        assert jobset.start == 2, jobset.logs()
        drained = (jobset.directory / "trainer_1.1.log").read_text()
        assert "node 1 is to stop: the ranks are asked to save" in drained
        first = (jobset.directory / "trainer_0.1.log").read_text()
        assert "stopped on request; the checkpoint is complete" in first, first
    used("torchrun")
    assert [record["step"] for record in records(out)] == list(range(STEPS + 1))
    assert records(out) == records(undisturbed / "run")


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
    ports = [word.partition("=")[2] for said in served for word in said if "servers.port=" in word]
    urls = ",".join(f"http://127.0.0.1:{port}" for port in (ports if over == 1 else ports[:1]))
    for said in trainers:
        assert f"rollout.servers.urls=[{urls}]" in said
    for said in (*trainers, *served):
        assert "rollout.servers.api_key_env=ROLLOUT_KEY" in said
    if over == 2:
        for node, said in enumerate(served):
            assert {f"rollout.servers.node={node}", "rollout.servers.leader=127.0.0.1"} < set(said)

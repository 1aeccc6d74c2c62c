"""A job for Kubernetes before it starts: the file agrees with the published schemas; refused input."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from helpers.paths import HELPERS, ROOT
from helpers.programs.environments import environment_of

from megatron_gvpo.cli import main

SERVED = ("rollout.engine=sglang", "--rollout-nodes", "2", "--secret", "keys")
COLOCATED = ("rollout.engine=sglang", "rollout.servers.colocated=true", "rollout.weights.transport=shared")
EXAMPLES = {
    "colocated": (*COLOCATED, "--nodes", "1", "--secret", "keys"),
    "split": (
        *("--nodes", "4", *SERVED, "rollout.servers.count=4", "rollout.servers.tp=2"),
        *("--rollout-container", "registry/rollout:1", "--env", "NCCL_SOCKET_IFNAME=eth0"),
    ),
}


def k8s(task: Path, *arguments: str, container: str = "registry/trainer:1") -> int:
    """Runs the command for the tiny run, whose files are on a volume."""
    mount = ("--mount", f"data={task.parent}", "--container", container)
    return main(["k8s", str(task / "run.yaml"), f"output_dir={task.parent / 'a-run'}", *mount, *arguments])


def test_unknown_keys_are_found_by_the_schemas(tmp_path: Path):
    """The comparison below can fail: for JobSet's own fields, for a Job's, and for wrong kinds of values."""
    base = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "a"},
        "spec": {"replicatedJobs": [{"name": "trainer", "template": {"spec": {"template": {}}}}]},
    }
    wrong = yaml.safe_load(yaml.dump(base))
    wrong["spec"]["restarts"] = 1
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["nodes"] = 2
    (tmp_path / "wrong.yaml").write_text(yaml.dump(wrong))
    printed = checked(tmp_path / "wrong.yaml").stdout
    assert ".spec.restarts" in printed and ".nodes" in printed and "'containers' is a required" not in printed


def checked(file: Path) -> subprocess.CompletedProcess[str]:
    command = [environment_of("cluster_schemas.txt"), HELPERS / "programs" / "check_jobset.py", file]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_jobset_agrees_with_the_published_schemas(name: str, task: Path, tmp_path: Path, capsys):
    assert k8s(task, *EXAMPLES[name], "--dry-run") == 0
    file = tmp_path / "jobset.yaml"
    file.write_text(capsys.readouterr().out)
    done = checked(file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_jobset_asks_of_the_cluster(task: Path, capsys):
    assert k8s(task, *EXAMPLES["split"], "--save-before", "900", "--dry-run") == 0
    jobset = yaml.safe_load(capsys.readouterr().out)
    trainer, servers = (job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"])
    assert jobset["metadata"]["name"] == "a-run"
    assert (trainer["parallelism"], servers["parallelism"]) == (4, 2)
    assert trainer["template"]["spec"]["terminationGracePeriodSeconds"] == 900
    for job, image in ((trainer, "registry/trainer:1"), (servers, "registry/rollout:1")):
        (container,) = job["template"]["spec"]["containers"]
        assert container["image"] == image
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
        assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"} in container["env"]
        subprocess.run(["bash", "-n", "-c", container["command"][2]], check=True)
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["trainer"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--name", "My_run"], "not ending with -, such as --name my-run; without --name it is that"),
        (["--name", "a" * 50], "--name aaaaaaaaaa"),
        (["--name", "7b"], "--name 7b: Kubernetes takes at most"),
        (["--container", ""], "--container is missing"),
        (["--container", "a b"], "--container 'a b': expected an image's name"),
        (["--mount", "data"], "--mount data: expected VOLUME=DIRECTORY"),
        (["--mount", "data=some/where"], "expected VOLUME=DIRECTORY with an absolute path"),
        (["--mount", "My_data=/data"], "--mount My_data: Kubernetes' names have small letters"),
        (["--secret", "A_B"], "--secret A_B: Kubernetes' names have small letters"),
        (["--env", "A"], "--env A: expected NAME=VALUE"),
        (["--env", "A-B=1"], "--env A-B: a variable's name has letters, digits and _ only"),
        (["--env", "WANDB_API_KEY=1"], "--env WANDB_API_KEY: its name says that it is a secret"),
        (["--env", "NODE=1"], "--env NODE: the job sets this variable itself"),
        (["--env", "A=1", "--env", "A=2"], "--env A=2: A is given twice"),
        (["output_dir=/elsewhere/a-run"], "output_dir=/elsewhere/a-run: is not on a volume"),
        (["data.unknown=1"], "data.unknown"),
        (["parallel.tp=3"], "8 process(es) cannot hold parallel.tp=3"),
        (["--save-before", "5"], "--save-before 5: must be at least 120 seconds"),
        (["--nproc", "2"], "--nproc 2: a job has --nodes times --ranks-per-node processes"),
        (
            ["rollout.engine=sglang", "--rollout-nodes", "1"],
            "--secret is missing: the Secret that has ROLLOUT_KEY",
        ),
        (
            [
                *(
                    "rollout.engine=sglang",
                    "rollout.servers.colocated=true",
                    "rollout.weights.transport=shared",
                ),
                *("--rollout-container", "a/b", "--secret", "keys"),
            ],
            "--rollout-container a/b: without --rollout-nodes the servers share the trainer's container",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(task: Path, capsys, arguments: list[str], words: str):
    assert k8s(task, "--nodes", "1", *arguments, "--dry-run") == 2
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_a_reward_outside_the_volumes_is_refused(task: Path, tmp_path: Path, capsys):
    (tmp_path / "reward.py").write_text((task / "reward.py").read_text())
    reward = f'rewards.components=[{{"name": "v", "function": "{tmp_path}/reward.py:reward"}}]'
    job = ("--nodes", "1", "--container", "a/b", "--mount", f"data={task}", "--dry-run")
    assert main(["k8s", str(task / "run.yaml"), f"output_dir={task}/run", reward, *job]) == 2
    printed = capsys.readouterr().err
    assert f"rewards.components.0.function={tmp_path}/reward.py: is not on a volume" in printed


def test_a_secrets_value_is_never_in_the_file(task: Path, monkeypatch, capsys):
    """A configuration's `{env: NAME}` stays a name, and --secret names what the cluster keeps."""
    monkeypatch.setenv("JUDGE_KEY", "sk-1234567890abcdef")
    reward = f"{task}/reward.py:reward"
    component = f'[{{"name": "v", "function": "{reward}", "options": {{"api_key": {{"env": "JUDGE_KEY"}}}}}}]'
    assert k8s(task, "--nodes", "1", "--secret", "keys", f"rewards.components={component}", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "sk-1234567890abcdef" not in printed and "JUDGE_KEY" in printed


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_what_is_rendered(name: str, task: Path, monkeypatch, capsys):
    """`REWRITE_EXAMPLES=1 pytest tests/cluster/test_k8s_job.py` writes k8s/*.yaml anew."""
    assert k8s(task, *EXAMPLES[name], "--dry-run") == 0
    text = capsys.readouterr().out.replace(str(task / "run.yaml"), "/data/gvpo.yaml")
    text = text.replace(str(task.parent), "/data")
    words = "k8s /data/gvpo.yaml output_dir=/data/a-run --mount data=/data --container registry/trainer:1 "
    text = re.sub("ritten by: .*", f"ritten by: megatron-gvpo {words}{' '.join(EXAMPLES[name])}", text)
    example = ROOT / "k8s" / f"{name}.yaml"
    if os.environ.get("REWRITE_EXAMPLES"):
        example.parent.mkdir(exist_ok=True)
        example.write_text(text)
    assert example.read_text() == text

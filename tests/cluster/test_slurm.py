"""Jobs on a real Slurm: two nodes with a rank each are told to stop, lose nodes and ranks, and start
again.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.distributed import launch
from helpers.doc_blocks import blocks
from helpers.machine import slurm as real
from helpers.machine.slurm import NODES, Slurm
from helpers.paths import ROOT
from helpers.servers.real_servers import engine_python
from helpers.suite.real_parts import used
from helpers.tiny_run import records

from megatron_gvpo.cli import main

STEPS = 8
SOON = 240.0  # seconds: quiet machines take ten, and a rank that waits for another one takes 1800
SHORT = (
    f"train.steps={STEPS}",
    "rewards.timeout=600",
    "checkpoint.every=1",
    "checkpoint.export_hf=false",
    "eval.every=0",
)
TWO_NODES = ("--nodes", "2", "--ranks-per-node", "1", "--no-gpus", "--save-before", "120")

# In the middle of a step it does something to the job, once in a start, and slows the steps after it, so that
# the run cannot be over before that has come about. It writes down what it is asked: start, step, prompt.
REWARD = """
import os, pathlib, signal, subprocess, time

import psutil

here = pathlib.Path(__file__).parent
start = os.environ.get("SLURM_RESTART_COUNT", "0")
rank = os.environ["RANK"]
begun = False

def reward(prompt, rollout, by_rank=0, **faults):
    global begun
    step = rollout.weight_version + 1
    with (here / f"asked.{rank}").open("a") as asked:
        asked.write(f"{start} {step} {prompt.id}\\n")
    in_step, action = faults.get(f"start_{start}", (10**9, ""))
    if step >= in_step:
        if rank == str(by_rank) and not begun:
            begun = True
            (here / "acted").touch()
            act(action)
        time.sleep(0.1)
    return len(set(rollout.token_ids)) / len(rollout.token_ids)

def act(action):
    if action.startswith("SIG"):
        os.kill(psutil.Process(os.getppid()).ppid(), getattr(signal, action))  # the worker's guard's parent
    else:
        subprocess.run(action, shell=True, check=True)
"""
STOP = "scancel --batch --signal=USR1 $SLURM_JOB_ID"  # what Slurm does before the time limit
# Where the job has been told, the rank is told, too, and then the step fails: it is never done.
STOP_WITHIN_A_STEP = f"""{STOP}
until [ $(grep -c 'asked to save' %s/slurm/$SLURM_JOB_ID.out) -gt ${{SLURM_RESTART_COUNT:-0}} ]
do sleep 0.2; done
guard=$(awk '/^PPid/ {{print $2}}' /proc/$PPID/status)
kill -USR1 $(awk '/^PPid/ {{print $2}}' /proc/$guard/status)
exit 1
"""
STOP_TWICE = f"{STOP}; sleep 2; {STOP}"  # a user has done it, too
LOSE_A_NODE = "; ".join(
    f"scontrol update nodename={NODES[1]} {to}" for to in ("state=down reason=test", "state=resume")
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    with real.running(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def reward(folder: Path, **faults: object) -> str:
    """An override that sets the reward above, with `start_<n>=(step, action)` for faults."""
    file = folder / "reward.py"
    file.write_text(REWARD)
    component = {"name": "variety", "function": f"{file}:reward", "options": faults}
    return f"rewards.components={json.dumps([component])}"


def submit(slurm: Slurm, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_gvpo", "slurm", *arguments, "--submit"]
    return subprocess.run(command, env=slurm.environment, capture_output=True, text=True, timeout=120)


def job_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1].rstrip(";")


def prompts_by_step(folder: Path) -> dict[int, set[str]]:
    """The prompts of every step in the start that completed it; equal responses ask for a reward only
    once.
    """
    rows = [line.split() for file in folder.glob("asked.*") for line in file.read_text().splitlines()]
    last = {step: max(start for start, other, _ in rows if other == step) for _, step, _ in rows}
    by_step: dict[int, set[str]] = {}
    for start, step, prompt in rows:
        if start == last[step]:
            by_step.setdefault(int(step), set()).add(prompt)
    return by_step


@pytest.fixture(scope="module")
def uninterrupted(task: Path, tmp_path_factory) -> Path:
    """The same run on two ranks of this machine, without Slurm."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    launch(
        "helpers.workers.trainer_worker:fit_once", [2], str(task), str(folder / "run"), *SHORT, reward(folder)
    )
    return folder


def with_an_error_of_rank_1(slurm: Slurm, folder: Path) -> Slurm:
    """The same Slurm, whose jobs raise an error in the rank that gets SIGUSR2."""
    (folder / "sitecustomize.py").write_text(
        "import signal\n"
        "def fail(*_):\n    raise RuntimeError('an error of rank 1 alone')\n"
        "signal.signal(signal.SIGUSR2, fail)\n"
    )
    failing = Slurm(slurm.base)
    failing.environment |= {"PYTHONPATH": f"{folder}:{slurm.environment.get('PYTHONPATH', '')}"}
    return failing


def assert_rank_1_is_named(slurm: Slurm, job: str, folder: Path) -> None:
    """The job ended soon after its fault, and its output names the error."""
    assert slurm.ended(job) - (folder / "acted").stat().st_mtime < SOON
    end = slurm.output(job).read_text()[-10_000:]  # tracebacks name long paths
    assert "first failure: rank 1 on gvpo-node" in end
    assert "Traceback" in end and "RuntimeError: an error of rank 1 alone" in end


def test_a_job_that_is_told_to_stop_goes_on_until_a_rank_raises(
    slurm: Slurm, task: Path, uninterrupted: Path, tmp_path: Path
):
    """The first start gets Slurm's signal before the time limit; in the second, a rank raises an error."""
    out, failing = tmp_path / "run", with_an_error_of_rank_1(slurm, tmp_path)
    faults = reward(tmp_path, start_0=(3, STOP), start_1=(5, "SIGUSR2"), by_rank=1)
    job = job_of(submit(failing, str(task / "run.yaml"), *SHORT, f"output_dir={out}", faults, *TWO_NODES))
    slurm.wait_for_start(job, 1)
    logs = slurm.logs(job)
    assert "stopped on request; the checkpoint is complete" in logs and "requeued" in logs
    assert slurm.end(job) == "FAILED", slurm.logs(job)
    assert_rank_1_is_named(slurm, job, tmp_path)
    assert [record["step"] for record in records(out)] == [0, 1, 2, 3, 4]
    assert records(out) == records(uninterrupted / "run")[:5]


@pytest.mark.proof
@pytest.mark.parametrize("loses_a_node", [False, True])
def test_a_job_that_is_told_to_stop_and_loses_a_node_ends_as_if_nothing_had_been(
    slurm: Slurm, task: Path, uninterrupted: Path, tmp_path: Path, loses_a_node: bool
):
    """The first start gets Slurm's signal before the time limit, the second may lose a node."""
    out = tmp_path / "run"
    lost = {"start_1": (5, LOSE_A_NODE)} if loses_a_node else {}
    faults = reward(tmp_path, start_0=(3, STOP), **lost)
    job = job_of(submit(slurm, str(task / "run.yaml"), *SHORT, f"output_dir={out}", faults, *TWO_NODES))
    slurm.wait_for_start(job, 1)
    logs = slurm.logs(job)
    assert "stopped on request; the checkpoint is complete" in logs and "requeued" in logs
    if loses_a_node:
        slurm.wait_for_start(job, 2)
    assert slurm.end(job) == "COMPLETED", slurm.logs(job)
    assert ("Node failure on gvpo-node2" in slurm.logs(job)) == loses_a_node
    assert records(out) == records(uninterrupted / "run")


@pytest.mark.proof
def test_a_step_that_is_longer_than_the_time_limit_ends_the_job(slurm: Slurm, task: Path, tmp_path: Path):
    """Every start would end with the same checkpoint: the job is requeued once, not for ever."""
    out = tmp_path / "run"
    stop = (3, STOP_WITHIN_A_STEP % out)
    faults = reward(tmp_path, start_0=stop, start_1=stop)
    overrides = (*SHORT, f"output_dir={out}", faults, "rewards.timeout=600")
    job = job_of(submit(slurm, str(task / "run.yaml"), *overrides, *TWO_NODES))
    slurm.wait_for_start(job, 1)
    assert slurm.end(job) == "FAILED", slurm.logs(job)
    output = slurm.output(job).read_text()
    assert "not requeued: start 1 ends with the checkpoint that it began with" in output, slurm.logs(job)
    assert "--sbatch=--time" in output and records(out)[-1]["step"] == 2


@pytest.mark.proof
@pytest.mark.parametrize("how", ["raises", "killed"])
def test_a_rank_that_fails_ends_the_job_in_seconds_and_is_named(
    slurm: Slurm, task: Path, tmp_path: Path, how: str
):
    failing = with_an_error_of_rank_1(slurm, tmp_path)
    fault = reward(tmp_path, start_0=(3, "SIGKILL" if how == "killed" else "SIGUSR2"), by_rank=1)
    out = f"output_dir={tmp_path / 'run'}"
    job = job_of(submit(failing, str(task / "run.yaml"), *SHORT, out, fault, *TWO_NODES))
    assert slurm.end(job) == "FAILED", slurm.logs(job)
    if how == "killed":
        assert slurm.ended(job) - (tmp_path / "acted").stat().st_mtime < SOON
        end = slurm.output(job).read_text()[-10_000:]
        assert re.search(r"first failure: rank 1 on gvpo-node\d at .* killed by SIGKILL: often because", end)
    else:
        assert_rank_1_is_named(slurm, job, tmp_path)


@pytest.mark.proof
def test_names_with_spaces_and_an_environment_of_its_own(slurm: Slurm, task: Path, tmp_path: Path):
    """Python, configuration, output and options have spaces in them. Only part of the environment is passed
    on, it belongs to another job, and nodes have names that other nodes do not know.
    """
    folder = tmp_path / "a place"
    folder.mkdir()
    (folder / "an environment").symlink_to(sys.prefix)
    (folder / "sitecustomize.py").write_text("import socket\nsocket.getfqdn = lambda *_: 'nowhere.invalid'\n")
    (folder / "run it.yaml").write_text((task / "run.yaml").read_text())
    isolated = Slurm(slurm.base)
    path = [str(folder), *filter(None, [slurm.environment.get("PYTHONPATH")])]
    isolated.environment |= {"PYTHONPATH": ":".join(path), "SLURM_RESTART_COUNT": "5"}
    exported = "--sbatch=--export=PATH,PYTHONPATH,HOME,SLURM_CONF,SLURM_RESTART_COUNT,GLOO_SOCKET_IFNAME"
    options = (*TWO_NODES, exported, "--sbatch=--comment=two words # and more", "--submit")
    prompts = f"data.train.path={shutil.copy(task / 'data' / 'train.jsonl', folder / 'its prompts.jsonl')}"
    words = (str(folder / "run it.yaml"), *SHORT, "train.steps=2", f"output_dir={folder / 'my run'}", prompts)
    python = str(folder / "an environment" / "bin" / Path(sys.executable).name)
    command = [python, "-m", "megatron_gvpo", "slurm", *words, "rewards.timeout=\n10", *options]
    done = subprocess.run(command, env=isolated.environment, capture_output=True, text=True, timeout=120)
    number = job_of(done)
    assert isolated.end(number) == "COMPLETED", isolated.logs(number)
    assert records(folder / "my run")[-1]["step"] == 2
    assert (folder / "my run" / "slurm" / f"{number}.0" / "rank_00001.log").is_file(), "its first start"
    details = isolated("scontrol", "show", "job", number)
    assert "Comment=two words # and more" in details and "JobName=my run" in details


@pytest.mark.proof
def test_servers_on_nodes_of_their_own(slurm: Slurm, task: Path, uninterrupted: Path, tmp_path: Path):
    """The job is told to stop in the middle of a step; afterwards no group is missing, doubled or stale."""
    out = tmp_path / "run"
    overrides = (
        *SHORT,
        f"output_dir={out}",
        reward(tmp_path, start_0=(3, STOP_TWICE)),
        "rollout.engine=vllm",
        f"rollout.servers.python={engine_python('vllm')}",
        "rollout.servers.context_length=256",
    )
    job = job_of(submit(slurm, str(task / "run.yaml"), *overrides, *TWO_NODES, "--rollout-nodes", "1"))
    slurm.wait_for_start(job, 1)
    assert slurm.end(job) == "COMPLETED", slurm.logs(job)
    used("vllm server")
    run_records = records(out)
    assert [record["step"] for record in run_records] == list(range(STEPS + 1))
    assert all(record["mismatch/abs_max"] < 2e-3 for record in run_records[1:])
    assert prompts_by_step(tmp_path) == prompts_by_step(uninterrupted)


@pytest.mark.proof
def test_a_scaling_benchmark_measures_its_points_in_jobs(slurm: Slurm, task: Path, tmp_path: Path):
    """benchmarks/scaling.py: a point on two nodes, one that fails, and the report."""

    def scaling(*arguments: str) -> str:
        command = [sys.executable, str(ROOT / "benchmarks" / "scaling.py"), *arguments]
        done = subprocess.run(
            command, env=slurm.environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    size = ("--nodes", "2", "--ranks-per-node", "1", "--no-gpus", "--modes", "strong")
    short = ("--prompts", "4", "--steps", "1", "--points", "points")
    layouts = ("--layout", "parallel.tp=2", "--layout", "data.train.path=nowhere.jsonl")
    printed = scaling(str(task / "run.yaml"), *size, *short, *layouts)
    fine, failed = re.findall(r"^strong-2-\S+: job (\d+)$", printed, re.MULTILINE)
    assert slurm.end(fine) == "COMPLETED", slurm.logs(fine)
    assert "| strong-2-tp2 |" in scaling("--report", "points", "--out", "scaling.json")
    (point,) = json.loads((tmp_path / "scaling.json").read_text())["points"]
    assert point["ranks"] == 2 and point["layout"] == "parallel.tp=2"
    assert point["updates_equal_formula"] is True
    assert 0 < point["seconds"]["training"] < point["seconds_per_step"]
    assert slurm.end(failed) == "FAILED", slurm.logs(failed)
    end = slurm.output(failed).read_text()
    assert "first failure: rank" in end and "nowhere.jsonl" in end


@pytest.mark.parametrize(
    ("options", "words", "advice"),
    [
        (
            ["--sbatch=--partition=nowhere"],
            "invalid partition specified: nowhere",
            "This cluster has: tests (3 nodes",
        ),
        (
            ["--sbatch=--partition=no where"],
            "invalid partition specified: no where",
            "This cluster has: tests",
        ),
        (["--nodes", "30"], "Partition", "Ask for less"),
        (["--sbatch=--time=never"], "Invalid --time specification", ""),
    ],
)
def test_what_slurm_refuses(slurm: Slurm, task: Path, tmp_path: Path, options, words: str, advice: str):
    arguments = [str(task / "run.yaml"), f"output_dir={tmp_path / 'run'}", *TWO_NODES, *options]
    done = submit(slurm, *arguments)
    assert done.returncode == 1
    assert words in done.stderr and advice in done.stderr


def page_command(program: str) -> str:
    """The command of docs/howto/slurm.md that begins with `program`."""
    page_blocks = [block for block in blocks("docs/howto/slurm.md") if f"\n{program}" in f"\n{block.text}"]
    lines = page_blocks[0].text.replace("\\\n", "").splitlines()
    return next(line.split("#")[0].strip() for line in lines if line.startswith(program))


def test_the_pages_commands_for_a_cluster_are_understood(task: Path, tmp_path: Path, capsys):
    """`plan` and `slurm` run as docs/howto/slurm.md has them, with the tiny run's configuration, and submit
    nothing.
    """
    plan = shlex.split(page_command("megatron-gvpo plan"))
    assert main([*plan[1:-1], str(tmp_path / "plan.yaml")]) == 0
    assert "All numbers are predicted" in capsys.readouterr().out
    job = shlex.split(page_command("megatron-gvpo slurm"))
    arguments = [str(task / "run.yaml") if word == "gvpo.yaml" else word for word in job[1:]]
    arguments = [word for word in arguments if word not in ("plan.yaml", "--submit")]
    served = ["rollout.engine=sglang", f"output_dir={tmp_path / 'run'}"]
    assert main([*arguments, *served, "--dry-run"]) == 0
    assert "#SBATCH --partition=h800" in capsys.readouterr().out


def test_the_pages_doctor_compares_the_nodes(slurm: Slurm):
    """The command runs on two nodes instead of eight, with one rank each and no GPUs."""
    command = page_command("srun")
    sizes = {"--nodes 8": "--nodes 2", "--nnodes 8": "--nnodes 2", "--nproc-per-node 8": "--nproc-per-node 1"}
    for documented, local in (sizes | {"--gpus-per-node 8 ": "", " --gpu h800": ""}).items():
        assert documented in command
        command = command.replace(documented, local)
    path = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        env=slurm.environment | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "2 ranks. Ready: no rank differs from the others." in done.stdout, done.stdout + done.stderr

"""Jobs on a real Slurm: two nodes with a rank each, told to stop, losing nodes and ranks, starting again."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_parts import used
from servers import engine_python
from tiny_run import records

import slurm as real
from megatron_gvpo.cli import main
from slurm import NODES, Slurm

ROOT = Path(__file__).parents[1]
STEPS = 8
SHORT = (f"train.steps={STEPS}", "checkpoint.every=1", "checkpoint.export_hf=false", "eval.every=0")
TWO_NODES = ("--nodes", "2", "--ranks-per-node", "1", "--no-gpus", "--save-before", "120")

# In the middle of a step it does something to the job, once in a start, and slows the steps after it, so that
# the run cannot be over before that has come about. It writes down what it is asked: start, step, prompt.
REWARD = """
import os, pathlib, signal, subprocess, time

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
        os.kill(os.getppid(), getattr(signal, action))
    else:
        subprocess.run(action, shell=True, check=True)
"""
STOP = "scancel --batch --signal=USR1 $SLURM_JOB_ID"  # what Slurm does before the time limit
LOSE_A_NODE = "; ".join(
    f"scontrol update nodename={NODES[1]} {to}" for to in ("state=down reason=test", "state=resume")
)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    with real.running(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def reward(place: Path, **faults: object) -> str:
    """An override: the reward above, with `start_<n>=(step, action)` for faults."""
    file = place / "reward.py"
    file.write_text(REWARD)
    component = {"name": "variety", "function": f"{file}:reward", "options": faults}
    return f"rewards.components={json.dumps([component])}"


def submit(slurm: Slurm, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_gvpo", "slurm", *arguments, "--submit"]
    return subprocess.run(command, env=slurm.environment, capture_output=True, text=True, timeout=120)


def job_of(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[1].rstrip(";")


def asked(place: Path) -> dict[int, set[str]]:
    """The prompts of every step, from the start that counts: rewards are asked once for equal responses."""
    rows = [line.split() for file in place.glob("asked.*") for line in file.read_text().splitlines()]
    last = {step: max(start for start, other, _ in rows if other == step) for _, step, _ in rows}
    by_step: dict[int, set[str]] = {}
    for start, step, prompt in rows:
        if start == last[step]:
            by_step.setdefault(int(step), set()).add(prompt)
    return by_step


@pytest.fixture(scope="module")
def uninterrupted(task: Path, tmp_path_factory) -> Path:
    """The same run on two processes of this machine, without Slurm."""
    place = tmp_path_factory.mktemp("uninterrupted")
    out = f"output_dir={place / 'run'}"
    command = [sys.executable, "-m", "megatron_gvpo", "train", str(task / "run.yaml"), *SHORT, "--nproc", "2"]
    done = subprocess.run([*command, out, reward(place)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return place


def test_a_job_that_is_told_to_stop_and_loses_a_node_ends_as_if_nothing_had_been(
    slurm: Slurm, task: Path, uninterrupted: Path, tmp_path: Path
):
    """Slurm's signal before the time limit in the first start, a node set down in the second."""
    out = tmp_path / "run"
    faults = reward(tmp_path, start_0=(3, STOP), start_1=(5, LOSE_A_NODE))
    job = job_of(submit(slurm, str(task / "run.yaml"), *SHORT, f"output_dir={out}", faults, *TWO_NODES))
    slurm.wait_for_start(job, 1)
    said = slurm.said(job)
    assert "stopped on request; the checkpoint is complete" in said and "requeued" in said
    slurm.wait_for_start(job, 2)
    assert slurm.end(job) == "COMPLETED", slurm.said(job)
    assert "Node failure on gvpo-node2" in slurm.said(job)
    assert records(out) == records(uninterrupted / "run")


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_fails_ends_the_job_in_seconds_and_is_named(
    slurm: Slurm, task: Path, tmp_path: Path, how: str
):
    (tmp_path / "sitecustomize.py").write_text(
        "import signal\n"
        "def fail(*_):\n    raise RuntimeError('an error of rank 1 alone')\n"
        "signal.signal(signal.SIGUSR2, fail)\n"
    )
    path = f"{tmp_path}:{slurm.environment.get('PYTHONPATH', '')}"
    slurm_here = Slurm(slurm.base)
    slurm_here.environment |= {"PYTHONPATH": path}
    fault = reward(tmp_path, start_0=(3, "SIGKILL" if how == "killed" else "SIGUSR2"), by_rank=1)
    out = f"output_dir={tmp_path / 'run'}"
    job = job_of(submit(slurm_here, str(task / "run.yaml"), *SHORT, out, fault, *TWO_NODES))
    assert slurm.end(job) == "FAILED", slurm.said(job)
    assert slurm.ended(job) - (tmp_path / "acted").stat().st_mtime < 60
    end = slurm.output(job).read_text()[-10_000:]  # tracebacks name long paths
    if how == "killed":
        assert re.search(r"first failure: rank 1 on gvpo-node\d at .* killed by SIGKILL: often for want", end)
    else:
        assert "first failure: rank 1 on gvpo-node" in end
        assert "Traceback" in end and "RuntimeError: an error of rank 1 alone" in end


def test_servers_on_nodes_of_their_own(slurm: Slurm, task: Path, uninterrupted: Path, tmp_path: Path):
    """Told to stop in the middle of a step: afterwards no group is missing, doubled or stale."""
    out = tmp_path / "run"
    given = (
        *SHORT,
        f"output_dir={out}",
        reward(tmp_path, start_0=(3, STOP)),
        "rollout.engine=vllm",
        f"rollout.servers.python={engine_python('vllm')}",
        "rollout.servers.context_length=256",
    )
    job = job_of(submit(slurm, str(task / "run.yaml"), *given, *TWO_NODES, "--rollout-nodes", "1"))
    slurm.wait_for_start(job, 1)
    assert slurm.end(job) == "COMPLETED", slurm.said(job)
    used("vllm server")
    kept = records(out)
    assert [record["step"] for record in kept] == list(range(STEPS + 1))
    assert all(record["mismatch/abs_max"] < 2e-3 for record in kept[1:])
    assert asked(tmp_path) == asked(uninterrupted)


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
    said = scaling(str(task / "run.yaml"), *size, *short, *layouts)
    fine, failed = re.findall(r"^strong-2-\S+: job (\d+)$", said, re.MULTILINE)
    assert slurm.end(fine) == "COMPLETED", slurm.said(fine)
    assert "| strong-2-tp2 |" in scaling("--report", "points", "--out", "scaling.json")
    (point,) = json.loads((tmp_path / "scaling.json").read_text())["points"]
    assert point["ranks"] == 2 and point["layout"] == "parallel.tp=2"
    assert point["updates_equal_formula"] is True
    assert 0 < point["seconds"]["training"] < point["seconds_per_step"]
    assert slurm.end(failed) == "FAILED", slurm.said(failed)
    end = slurm.output(failed).read_text()
    assert "first failure: rank" in end and "nowhere.jsonl" in end


@pytest.mark.parametrize(
    ("options", "words", "advice"),
    [
        (
            ["--sbatch=--partition=nowhere"],
            "invalid partition specified: nowhere",
            "Here there are: tests (3 nodes",
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "1", "parallel.tp=3"], "8 process(es) cannot hold parallel.tp=3"),
        (["--nodes", "1", "--rollout-nodes", "1"], "rollout.engine=local generates in the trainer's own"),
        (["--nodes", "0"], "--nodes and --ranks-per-node must be at least 1"),
        (["--nodes", "1", "--save-before", "5"], "--save-before 5: at least 120 seconds"),
        (["--nodes", "1", "--sbatch=time=1:00:00"], "options begin with -, as --sbatch=--time=1:00:00"),
        (["--nodes", "1", "--container", "nowhere.sif"], "--container nowhere.sif: no such file"),
        (
            ["--nodes", "1", "rollout.engine=sglang", "rollout.servers.count=9"],
            "needs more than the 8 GPUs of a node",
        ),
        (["--nodes", "1", "rollout.engine=sglang"], "the servers are on the trainer's GPUs"),
        (
            [
                *("--nodes", "1", "--rollout-nodes", "1", "rollout.engine=sglang"),
                *("rollout.servers.colocated=true", "rollout.weights.transport=disk"),
            ],
            "with --rollout-nodes 1 the servers have GPUs of their own",
        ),
        (
            ["--nodes", "1", "rollout.engine=sglang", "rollout.servers.urls=[http://a:1]"],
            "rollout.servers.urls: leave it out",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_it_waits_in_a_queue(
    task: Path, tmp_path, capsys, arguments, words
):
    out = f"output_dir={tmp_path / 'run'}"
    assert main(["slurm", str(task / "run.yaml"), out, *arguments, "--dry-run"]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_a_container_would_not_see_is_said(task: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = [str(task / "run.yaml"), "output_dir=run", "--nodes", "1", "--container", "registry/trainer"]
    assert main(["slurm", *job, "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert f"note: containers see {tmp_path} and what --mount names" in said
    assert f"model.path={task / 'model'}" in said and "output_dir" not in said
    assert main(["slurm", *job, "--mount", str(task), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "note: containers see" not in shown.err
    assert f"--container-mounts={tmp_path}:{tmp_path},{task}:{task} " in shown.out


def test_a_container_without_a_home_gets_one(tmp_path: Path):
    """Megatron-Bridge, Hugging Face and the engines write there; what pyxis starts may be read-only."""
    script = (ROOT / "slurm" / "split.sbatch").read_text()
    (line, again) = [line for line in script.splitlines() if "mkdir -p" in line and "HOME" in line]
    assert line == again, "the trainer's and the servers'"
    (tmp_path / "file").touch()

    def home(given: Path) -> Path:
        environment = {"PATH": os.environ["PATH"], "HOME": str(given), "TMPDIR": str(tmp_path)}
        command = ["bash", "-c", f"{line}; touch $HOME/written; echo $HOME"]
        return Path(subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip())

    assert home(tmp_path / "home") == tmp_path / "home"
    assert (made := home(tmp_path / "file" / "home")).parent == tmp_path and (made / "written").exists()


def test_the_signal_passes_apptainers_own_processes(tmp_path: Path):
    """They start with it blocked, and stay so; the ranks have it unblocked, and ignored until they listen."""
    script = (ROOT / "slurm" / "split.sbatch").read_text()
    outside = re.search(r"env --block-signal=\w+", script)
    inside = re.search(r"exec (env --default-signal=\w+ --ignore-signal=\w+)", script)
    assert outside and inside
    state = "grep -E SigBlk|SigIgn /proc/self/status"
    for command, blocked, ignored in ((outside[0], True, False), (f"{outside[0]} {inside[1]}", False, True)):
        said = subprocess.run([*command.split(), *state.split()], capture_output=True, text=True).stdout
        masks = {key: int(mask, 16) for key, mask in re.findall(r"(\w+):\s*([0-9a-f]+)", said)}
        bit = 1 << (signal.SIGUSR1 - 1)
        assert (bool(masks["SigBlk"] & bit), bool(masks["SigIgn"] & bit)) == (blocked, ignored)


EXAMPLES = {
    "colocated": ("--nodes", "4", "--sbatch=--partition=h800", "--sbatch=--time=12:00:00"),
    "split": (
        *("--nodes", "4", "--rollout-nodes", "2", "rollout.engine=sglang"),
        *("rollout.servers.count=4", "rollout.servers.tp=2", "--container", "trainer.sif"),
        *("--rollout-container", "registry/rollout:sglang", "--mount", "/data"),
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_what_is_rendered_and_bash_can_read_them(
    name: str, task: Path, tmp_path, monkeypatch, capsys
):
    """slurm/*.sbatch; written anew with `REWRITE_EXAMPLES=1 pytest tests/test_slurm.py`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer.sif").touch()
    run = tmp_path / "gvpo.yaml"
    run.write_text((task / "run.yaml").read_text())
    given = [str(run), "output_dir=runs/seven", *EXAMPLES[name], "--dry-run"]
    assert main(["slurm", *given]) == 0
    script = capsys.readouterr().out
    for here, there in (
        (str(run), "gvpo.yaml"),
        (sys.executable, "/opt/venv/bin/python"),
        (str(Path.cwd()), "/home/me/project"),
    ):
        script = script.replace(here, there)
    script = re.sub(
        "# Written by: .*", f"# Written by: megatron-gvpo slurm gvpo.yaml {' '.join(given[1:-1])}", script
    )
    example = ROOT / "slurm" / f"{name}.sbatch"
    if os.environ.get("REWRITE_EXAMPLES"):
        example.write_text(script)
    assert example.read_text() == script
    subprocess.run(["bash", "-n", str(example)], check=True)


def test_the_readme_commands_for_a_cluster_are_understood(task: Path, tmp_path: Path, capsys):
    """`plan` and `slurm` as they stand there, on the tiny run's configuration, and not submitted."""
    text = (ROOT / "README.md").read_text()
    section = text.split("## From laptop to cluster")[1].split("## ")[0].replace("\\\n", "")
    lines = [line.split("#")[0].strip() for line in section.splitlines() if line.startswith("    ")]
    plan = next(shlex.split(line) for line in lines if line.startswith("megatron-gvpo plan"))
    assert main([*plan[1:-1], str(tmp_path / "plan.yaml")]) == 0
    assert "All numbers are predicted" in capsys.readouterr().out
    job = next(shlex.split(line) for line in lines if line.startswith("megatron-gvpo slurm"))
    given = [str(task / "run.yaml") if word == "gvpo.yaml" else word for word in job[1:]]
    given = [word for word in given if word not in ("plan.yaml", "--submit")]
    served = ["rollout.engine=sglang", f"output_dir={tmp_path / 'run'}"]
    assert main([*given, *served, "--dry-run"]) == 0
    assert "#SBATCH --partition=h800" in capsys.readouterr().out

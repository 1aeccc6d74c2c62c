"""A Slurm job before it is submitted: the rendered script, and refused input."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.paths import ROOT

from megatron_gvpo.cli import main
from megatron_gvpo.cluster.job import Job, unseen
from megatron_gvpo.cluster.slurm_job import _seconds
from megatron_gvpo.settings.config import load_config


def over_two_nodes(tp: int) -> tuple[str, ...]:
    """Settings of a server on two nodes; the task's model has fewer heads than the server has GPUs."""
    attention = "rollout.servers.args=[--enable-dp-attention]"
    return (f"rollout.servers.tp={tp}", "rollout.servers.nodes=2", attention)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "1", "parallel.tp=3"], "8 process(es) cannot hold parallel.tp=3"),
        (["--nodes", "1", "--rollout-nodes", "1"], "rollout.engine=local generates in the trainer's own"),
        (["--nodes", "0"], "--nodes and --ranks-per-node must be at least 1"),
        (["--nodes", "1000000000"], "8000000000 ranks, 0 nodes of servers: at most 65536"),
        (["--nodes", "1", "--save-before", "5"], "--save-before 5: must be at least 120 seconds"),
        (
            ["--nodes", "1", "--sbatch=time=1:00:00"],
            "options of sbatch begin with a dash; write --sbatch=--time=1:00:00",
        ),
        (["--nodes", "1", "--nproc", "2"], "--nproc 2: a job has --nodes times --ranks-per-node processes"),
        (
            ["--nodes", "1", "--sbatch=--nodes=3"],
            "the job sets --nodes itself; use --nodes and",
        ),
        (["--nodes", "1", "--sbatch=-N3"], "--sbatch=-N3: the job sets --nodes itself"),
        (["--nodes", "1", "--sbatch=--array=0-3"], "--array itself; use one job for each"),
        (["--nodes", "1", "--sbatch=--comment=a\n#SBATCH -N3"], "an option is one line"),
        (["--nodes", "1", "--sbatch=--gpus-per-node=h100:4"], "use --ranks-per-node 4 instead"),
        (["--nodes", "1", "--sbatch=--time=10"], "the job saves and requeues itself 600 s before this limit"),
        (["--nodes", "1", "--sbatch=-t 0-00:02", "--save-before", "120"], "120 s before this limit"),
        (["--nodes", "1", "output_dir=runs/100%n"], "Slurm expands % in the name"),
        (["--nodes", "1", "--container", ""], "--container : no such file"),
        (
            ["--nodes", "1", "--mount", "/data"],
            "--mount /data: needs --container; without one",
        ),
        (
            ["--nodes", "1", "--container", "a/b", "--mount", "/a:/b"],
            "--mount /a:/b: expected one directory, which has the",
        ),
        (["--nodes", "1", "--rollout-container", "a/b"], "rollout.engine=local has no servers"),
        (["--nodes", "1", "--container", "nowhere.sif"], "--container nowhere.sif: no such file"),
        (
            ["--nodes", "1", "rollout.engine=sglang", "rollout.servers.count=9"],
            "needs more than the 8 GPUs of a node",
        ),
        (["--nodes", "1", "rollout.engine=sglang"], "the servers run on the trainer's GPUs"),
        (
            [*("--nodes", "1", "--rollout-nodes", "3", "rollout.engine=sglang"), *over_two_nodes(16)],
            "--rollout-nodes 3 must be a multiple of 2",
        ),
        (
            [*("--nodes", "1", "--rollout-nodes", "2", "rollout.engine=sglang"), *over_two_nodes(32)],
            "rollout.servers.tp=32 / rollout.servers.nodes=2 needs more than the 8 GPUs of a node",
        ),
        (
            [
                *("--nodes", "1", "--rollout-nodes", "1", "rollout.engine=sglang"),
                *("rollout.servers.colocated=true", "rollout.weights.transport=disk"),
            ],
            "with --rollout-nodes 1 the servers have GPUs of their own",
        ),
        (
            ["--nodes", "1", "rollout.engine=sglang", "rollout.servers.urls=[http://a:1]"],
            "rollout.servers.urls: remove this key",
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


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("10", 600),
        ("10:30", 630),
        ("2:00:30", 7230),
        ("1-2", 93600),
        ("1-02:03", 93780),
        ("1-02:03:04", 93784),
        ("UNLIMITED", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(limit: str, seconds: int | None):
    assert _seconds(limit) == seconds


def test_a_directory_that_cannot_be_written_is_said(task: Path, tmp_path: Path, capsys):
    (tmp_path / "slurm").touch()
    for output_dir, words in (
        (tmp_path / "slurm" / "run", "slurm is not a directory"),
        (tmp_path, "cannot write .*job.sbatch: (Not a directory|File exists)"),
    ):
        assert main(["slurm", str(task / "run.yaml"), f"output_dir={output_dir}", "--nodes", "1"]) == 2
        printed = capsys.readouterr()
        assert re.search(f"error: output_dir=.*: .*{words}", printed.err)
        assert not printed.out


def test_a_job_without_its_reward_is_refused_before_it_waits(task: Path, tmp_path: Path, capsys):
    reward = f'rewards.components=[{{"name": "mine", "function": "{tmp_path}/none.py:mine"}}]'
    assert main(["slurm", str(task / "run.yaml"), f"output_dir={tmp_path}", "--nodes=1", reward]) == 2
    assert "error: rewards.components.0.function=" in capsys.readouterr().err


def test_a_job_asks_for_the_gpus_of_the_servers_that_the_run_starts(task: Path, tmp_path: Path, capsys):
    """A judge's servers have GPUs beside the ranks', on the trainer's nodes alone."""

    def script(servers: str) -> tuple[list[str], str]:
        path = f'"path": "{task}/model", ' if "urls" not in servers else '"model": "judge", '
        judge = f'rewards.components=[{{"name": "j", "judge": {{{path}"servers": {servers}}}}}]'
        job = ["--nodes=1", "--rollout-nodes=1", "--ranks-per-node=6", "--dry-run", "rollout.engine=sglang"]
        assert main(["slurm", str(task / "run.yaml"), f"output_dir={tmp_path}", judge, *job]) == 0
        printed = capsys.readouterr()
        return re.findall(r"#SBATCH --gpus-per-node=(\d+)", printed.out), printed.err

    gpus, notes = script('{"tp": 2}')
    assert gpus == ["8", "6"] and "8 GPUs a node: 6 for ranks and 2" in notes
    assert "for rewards.components.0.judge.servers." in notes
    gpus, notes = script('{"urls": ["http://judge:1"]}')
    assert gpus == ["6", "6"] and "GPUs a node" not in notes


def test_every_node_of_a_server_gets_its_part(task: Path, tmp_path: Path, capsys):
    """The script's own lines, with the nodes that Slurm would name and the commands that it would start."""
    job = ["--nodes=1", "--rollout-nodes=4", "--dry-run", "rollout.engine=sglang", *over_two_nodes(16)]
    assert main(["slurm", str(task / "run.yaml"), f"output_dir={tmp_path}", *job]) == 0
    script = capsys.readouterr().out
    lines = script[script.index("rollout_hosts=(") : script.index("servers=$!")]
    slurm = """
    export ROLLOUT_PORT=20000
    scontrol() { printf '%s\n' a b c d; }
    srun() {
      while [ "$1" != bash ]; do shift; done
      for node in 0 1 2 3; do
        SLURM_NODEID=$node SLURMD_NODENAME=node$node bash -c "$3" echo "${@:5}"
      done
    }
    """
    words = ["bash", "-c", f"{slurm}\n{lines}\nwait; echo $ROLLOUT_URLS"]
    *served, urls = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert urls == "[http://a:20000,http://c:20006]" and len(served) == 4
    for node, arguments in enumerate(served):
        part = {
            "host": f"node{node}",
            "node": node % 2,
            "leader": "aacc"[node],
            "port": 20000 + node // 2 * 6,
        }
        assert {f"rollout.servers.{key}={value}" for key, value in part.items()} < set(arguments.split()), (
            arguments
        )


def test_without_slurm_the_script_is_written_and_it_says_where_to_submit_it(
    task: Path, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = [str(task / "run.yaml"), f"output_dir={tmp_path / 'my run'}", "--nodes", "1", "--submit"]
    assert main(["slurm", *arguments]) == 1
    script = tmp_path / "my run" / "slurm" / "job.sbatch"
    assert (
        "error: there is no sbatch on this machine: run this command where Slurm is installed, or submit "
        f"the script there: `sbatch '{script}'`" in (capsys.readouterr().err)
    )
    assert script.is_file()


def test_what_a_container_would_not_see_is_said(task: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = [str(task / "run.yaml"), "output_dir=run", "--nodes", "1", "--container", "registry/trainer"]
    assert main(["slurm", *job, "--dry-run"]) == 0
    printed = capsys.readouterr().err
    assert f"note: containers see {tmp_path} and what --mount names" in printed
    assert f"model.path={task / 'model'}" in printed and "output_dir" not in printed
    assert main(["slurm", *job, "--mount", str(task), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "note: containers see" not in shown.err
    assert f"--container-mounts={tmp_path}:{tmp_path},{task}:{task} " in shown.out


def test_all_files_that_a_container_would_not_see_are_named(task: Path, tmp_path: Path, monkeypatch):
    """A name of a model on a server is not a path, even if there is a directory of this name."""
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    code = elsewhere / "own.py"
    for directory in (here / "judge", elsewhere):
        directory.mkdir(parents=True)
    code.write_text("def f(*_, **__): ...\n")
    monkeypatch.chdir(here)
    judge = {"model": "judge", "servers": {"urls": ["http://judge"], "engine": "openai"}}
    components = [
        {"name": "a", "function": f"{code}:f", "options": {"path": str(elsewhere)}},
        {"name": "b", "model": {"path": str(elsewhere)}},
        {"name": "c", "judge": {"path": str(elsewhere)}},
        {"name": "d", "judge": judge},
    ]
    talk = {"tools": ["python", f"{code}:f"], "parser": f"{code}:f", "sandbox": {"packages": str(elsewhere)}}
    paths = {
        "teacher.path": "algorithm=opd",
        "model.adapter.path": "model.adapter.rank=4",
        "rollout.speculation.model": "rollout.speculation.method=draft",
        "rollout.servers.model_path": "rollout.engine=sglang",
    }
    overrides = [
        *(f"{key}={elsewhere}" for key in paths),
        *paths.values(),
        f"data.train.convert={code}:f",
        f"rewards.components={json.dumps(components)}",
        f"rollout.conversation={json.dumps(talk)}",
    ]
    config = load_config([task / "run.yaml"], [f"output_dir={here / 'run'}", *overrides])
    job = Job(nodes=1, container="registry/trainer", mounts=(str(task),))
    assert sorted(unseen(config, [str(task / "run.yaml")], job)) == sorted(
        [
            *(f"{key}={elsewhere}" for key in paths),
            f"data.train.convert={code}",
            f"rewards.components.0.function={code}",
            f"rewards.components.0.options.path={elsewhere}",
            f"rewards.components.1.model.path={elsewhere}",
            f"rewards.components.2.judge.path={elsewhere}",
            f"rollout.conversation.tools.1={code}",
            f"rollout.conversation.parser={code}",
            f"rollout.conversation.sandbox.packages={elsewhere}",
        ]
    )
    for part in ("environment", "program"):
        config = load_config([task / "run.yaml"], ["output_dir=run", f"rollout.conversation.{part}={code}:f"])
        assert f"rollout.conversation.{part}={code}" in unseen(config, [], job)


def test_an_image_in_a_file_is_not_looked_for_in_a_registry(task: Path, tmp_path: Path, monkeypatch, capsys):
    """pyxis takes a name that begins with neither / nor . for one of a registry (its pyxis_slurmstepd.c)."""
    monkeypatch.chdir(tmp_path)
    for image in ("trainer.sqsh", "images/trainer.sqsh", "./trainer.sqsh"):
        (tmp_path / image).parent.mkdir(exist_ok=True)
        (tmp_path / image).touch()
        arguments = ["--nodes", "1", "--container", image, "--dry-run"]
        assert main(["slurm", str(task / "run.yaml"), f"output_dir={tmp_path / 'run'}", *arguments]) == 0
        assert f"--container-image={tmp_path / image} " in capsys.readouterr().out


def in_container(name: str) -> str:
    """The commands that the trainer's and the servers' containers run first."""
    script = (ROOT / "slurm" / f"{name}.sbatch").read_text()
    prologue, again = re.findall(r"bash -c '\n((?:  .*\n)+?)  exec", script)
    assert prologue == again
    return prologue


def test_a_container_without_a_home_gets_one(tmp_path: Path):
    """Megatron-Bridge, Hugging Face and the engines write to the home directory; pyxis may start a read-only
    image.
    """
    (tmp_path / "file").touch()

    def home(configured: Path, temporary: Path) -> Path:
        environment = {"PATH": os.environ["PATH"], "HOME": str(configured), "TMPDIR": str(temporary)}
        command = ["bash", "-c", f"{in_container('split')}touch $HOME/written && echo $HOME"]
        return Path(subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip())

    assert home(tmp_path / "home", tmp_path) == tmp_path / "home"
    nowhere = tmp_path / "file" / "home"
    assert (made := home(nowhere, tmp_path)).parent == tmp_path and (made / "written").exists()
    made = home(nowhere, Path("/the node's own"))
    assert made.parent == Path("/tmp") and (made / "written").exists()
    shutil.rmtree(made)


def test_a_new_image_brings_its_own_triton_cache(tmp_path: Path):
    """The cache is copied to a writable place although the home knew another image; the image has no
    compiler.
    """
    for image in ("first", "second"):
        (tmp_path / image).mkdir()
        (tmp_path / image / f"{image}.so").touch()
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
        environment |= {"TRITON_CACHE_DIR": str(tmp_path / image), "IMAGE": str(tmp_path / image)}
        read_only = (
            '[() { ! builtin [ "$1 $2" = "-w $IMAGE" ] && builtin [ "$@"; }\n'  # as root, all is writable
        )
        command = [
            "bash",
            "-c",
            f"{read_only}{in_container('split')}ls $TRITON_CACHE_DIR; echo $TRITON_CACHE_DIR",
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        file, directory = done.stdout.split()
        assert file == f"{image}.so" and directory != str(tmp_path / image), done.stderr


def test_the_signal_passes_apptainers_own_processes(tmp_path: Path):
    """Apptainer's processes start with the signal blocked; ranks have it unblocked, and ignored until they
    listen.
    """
    script = (ROOT / "slurm" / "split.sbatch").read_text()
    outside = re.search(r"env --block-signal=\w+", script)
    inside = re.search(r"exec (env --default-signal=\w+ --ignore-signal=\w+)", script)
    assert outside and inside
    state = "grep -E SigBlk|SigIgn /proc/self/status"
    for command, blocked, ignored in ((outside[0], True, False), (f"{outside[0]} {inside[1]}", False, True)):
        status = subprocess.run([*command.split(), *state.split()], capture_output=True, text=True).stdout
        masks = {key: int(mask, 16) for key, mask in re.findall(r"(\w+):\s*([0-9a-f]+)", status)}
        bit = 1 << (signal.SIGUSR1 - 1)
        assert (bool(masks["SigBlk"] & bit), bool(masks["SigIgn"] & bit)) == (blocked, ignored)


class Starts:
    """Runs the part of the script that precedes the launch, as the starts of job 7."""

    def __init__(self, task: Path, out: Path, capsys: pytest.CaptureFixture[str], *how: str) -> None:
        self.out = out
        arguments = [str(task / "run.yaml"), f"output_dir={out}", "--nodes", "1", *how, "--dry-run"]
        assert main(["slurm", *arguments]) == 0
        script = capsys.readouterr().out
        self.part = script[script.index("# A job that starts again") : script.index("# One torchrun a node")]

    def __call__(self, number: int) -> subprocess.CompletedProcess[str]:
        logs = self.out / "slurm" / f"7.{number}"
        logs.mkdir(parents=True)
        variables = {"restarts": str(number), "SLURM_JOB_ID": "7", "MEGATRON_GVPO_LOGS": str(logs)}
        return subprocess.run(
            ["bash", "-c", f'{self.part}echo "trains $HOW"'],
            env={"PATH": os.environ["PATH"], **variables},
            capture_output=True,
            text=True,
        )

    def save(self, step: int, when: float) -> None:
        """Write a complete checkpoint that is `when` seconds older or newer than now."""
        state = self.out / "checkpoints" / f"step_{step:08d}" / "state.json"
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text(f'{{"step": {step}}}')
        moment = time.time() + when
        os.utime(state, (moment, moment))


def test_a_job_that_gets_nowhere_is_not_started_for_ever(task: Path, tmp_path: Path, capsys):
    """Nodes fail, or other jobs come first: after five starts in a row without a newer checkpoint the job
    ends.
    """
    start = Starts(task, tmp_path / "my run", capsys)
    for number in range(3):
        assert start(number).returncode == 0
    start.save(1, when=0)
    for number in range(3, 8):
        assert "trains --resume=auto" in start(number).stdout
    refused = start(8)
    assert refused.returncode == 1 and "trains" not in refused.stdout
    assert "not started again: the last 5 starts have ended without a newer checkpoint" in refused.stdout
    start.save(2, when=0)
    assert start(9).returncode == 0


def test_a_job_that_replaces_a_run_never_continues_it(task: Path, tmp_path: Path, capsys):
    """The job lost a node before its first checkpoint, so the files there are still the earlier run's. Later
    checkpoints are its own, though the command still says --overwrite.
    """
    start = Starts(task, tmp_path / "my run", capsys, "--overwrite")
    start.save(4, when=-60)
    assert [start(number).stdout.split()[-1] for number in range(2)] == ["--overwrite"] * 2
    start.save(4, when=60)
    assert start(2).stdout.split()[-1] == "--resume=auto"
    shutil.rmtree(start.out / "slurm" / "7.0")
    start.save(4, when=-60)
    assert start(3).stdout.split()[-1] == "--resume=auto", "not known: nothing is lost"


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
    """`REWRITE_EXAMPLES=1 pytest tests/cluster/test_slurm_job.py` writes slurm/*.sbatch anew."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer.sif").touch()
    run = tmp_path / "gvpo.yaml"
    run.write_text((task / "run.yaml").read_text())
    arguments = [str(run), "output_dir=runs/seven", *EXAMPLES[name], "--dry-run"]
    assert main(["slurm", *arguments]) == 0
    script = capsys.readouterr().out
    for local, documented in (
        (str(run), "gvpo.yaml"),
        (sys.executable, "/opt/venv/bin/python"),
        (str(Path.cwd()), "/home/me/project"),
    ):
        script = script.replace(local, documented)
    script = re.sub(
        "# Written by: .*", f"# Written by: megatron-gvpo slurm gvpo.yaml {' '.join(arguments[1:-1])}", script
    )
    example = ROOT / "slurm" / f"{name}.sbatch"
    if os.environ.get("REWRITE_EXAMPLES"):
        example.write_text(script)
    assert example.read_text() == script
    subprocess.run(["bash", "-n", str(example)], check=True)

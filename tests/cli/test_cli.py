"""The command line as a user meets it: wrong input, signals, several processes, a clean terminal."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from helpers.suite.real_parts import used
from helpers.tiny_run import records, reward_options

from megatron_gvpo.cli import main
from megatron_gvpo.cli.train import warn_of_learning_rate
from megatron_gvpo.core import launch as launcher
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.megatron import policy
from megatron_gvpo.settings.config import load_config

STEP = re.compile(r"step +\d+/\d+  ")
SHORT = ("algorithm=gvpo", "train.steps=2", "data.eval=null", "checkpoint.export_hf=false")


def data_file(name: str, *lines: str, algorithm: str = "gvpo") -> Callable[[Path, Path], list[str]]:
    def make(task: Path, directory: Path) -> list[str]:
        (directory / name).write_text("".join(line + "\n" for line in lines))
        return [f"data.train.path={directory / name}", f"algorithm={algorithm}"]

    return make


def overrides(*texts: str) -> Callable[[Path, Path], list[str]]:
    return lambda task, directory: [text.format(task=task, directory=directory) for text in texts]


def damaged_model(pattern: str, bytes_left: int | None) -> Callable[[Path, Path], list[str]]:
    """A copy of the model in which files with these names are cut off, or missing (None)."""

    def make(task: Path, directory: Path) -> list[str]:
        shutil.copytree(task / "model", directory / "model")
        for file in (directory / "model").glob(pattern):
            if bytes_left is None:
                file.unlink()
            else:
                os.truncate(file, bytes_left)
        return [f"model.path={directory / 'model'}"]

    return make


def incomplete_model(task: Path, directory: Path) -> list[str]:
    """A copy of the model whose index names a file that does not exist."""
    shutil.copytree(task / "model", directory / "model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (directory / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    return [f"model.path={directory / 'model'}"]


def pointer_in_place_of_weights(task: Path, directory: Path) -> list[str]:
    shutil.copytree(task / "model", directory / "model")
    [weights] = (directory / "model").glob("*.safetensors")
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return [f"model.path={directory / 'model'}"]


def changed_model(file: str, **changes: object) -> Callable[[Path, Path], list[str]]:
    """A copy of the model with changed or removed (None) keys of a JSON file."""

    def make(task: Path, directory: Path) -> list[str]:
        shutil.copytree(task / "model", directory / "model")
        values = json.loads((directory / "model" / file).read_text()) | changes
        remaining_values = {key: value for key, value in values.items() if value is not None}
        (directory / "model" / file).write_text(json.dumps(remaining_values))
        return [f"model.path={directory / 'model'}"]

    return make


GOOD = '{"prompt": "1+1=", "answer": "2", "solution": "2"}'
WRONG = {
    "malformed line": (
        data_file("bad.jsonl", GOOD, '{"prompt": '),
        r"bad\.jsonl, line 2: not valid JSON",
    ),
    "empty": (data_file("empty.jsonl"), r"empty\.jsonl: no records"),
    "no answer": (
        data_file("blind.jsonl", GOOD, '{"prompt": "2+2="}'),
        r"blind\.jsonl, line 2: field 'answer' is missing; fields there: prompt",
    ),
    "long prompt": (
        data_file("long.jsonl", GOOD.replace("1+1", "1+" * 20)),
        r"long\.jsonl, line 1: the prompt has 41 tokens, more than data\.max_prompt_tokens=32",
    ),
    "long demonstration": (
        data_file("long.jsonl", GOOD, GOOD.replace('"2"}', f'"{"2" * 252}"}}'), algorithm="sft"),
        r"long\.jsonl, line 2: the prompt has 4 tokens and its demonstration 253 .*embeddings=256",
    ),
    "longer than the model": (
        overrides("data.max_prompt_tokens=250"),
        r"data\.max_prompt_tokens=250 plus rollout\.max_tokens=10 exceeds .*max_position_embeddings=256",
    ),
    "no end token": (  # transformers then gives a Qwen2 tokenizer one that this model has never seen
        changed_model("tokenizer_config.json", eos_token=None),
        r"the tokenizer's end token '<\|endoftext\|>' has id \d+, and the model knows only \d+ tokens",
    ),
    "no such token": (
        changed_model("config.json", vocab_size=19),
        r"train\.jsonl:1: it has '=', token 19, and the model knows only 19: the tokenizer in model\.path=",
    ),
    "a variable": (overrides("output_dir=runs/${{train.seed}}"), r"nothing fills in \$\{\.\.\.\} here"),
    "wrong key": (overrides("train.stepz=3"), r"train\.stepz: no such key; did you mean 'train\.steps'\?"),
    "tp": (
        overrides("parallel.tp=3", "--nproc=3"),
        r"parallel\.tp=3 does not divide the model's num_attention_heads=4; possible: \[1, 2\]",
    ),
    "no model": (overrides("model.path={directory}/none"), r"model\.path=.*none: no config\.json there"),
    "unknown architecture": (
        changed_model("config.json", architectures=["GPT2LMHeadModel"], model_type="gpt2"),
        r"model\.path=.*: architecture GPT2LMHeadModel in config\.json; supported: .*",
    ),
    "no tokenizer": (damaged_model("tokenizer.json", None), r"model\.path=.*: no tokenizer there"),
    "damaged tokenizer": (
        damaged_model("tokenizer.json", 100),
        r"model\.path=.*model: the tokenizer there, or its config\.json, cannot be read: ",
    ),
    "no weights": (damaged_model("*.safetensors", None), r"model\.path=.*model: no weights there"),
    "damaged weights": (
        damaged_model("*.safetensors", 100_000),
        r"model\.path=.*model: model\.safetensors is not whole: ",
    ),
    "a pointer in place of weights": (
        pointer_in_place_of_weights,
        r"model\.path=.*model\.safetensors is not whole: it is a pointer of Git LFS: fetch the file",
    ),
    "missing weights": (
        incomplete_model,
        r"model\.path=.*model: model-2\.safetensors is missing there, and .*\.index\.json names it",
    ),
    "no such reward": (
        overrides('rewards.components=[{{"name": "mine", "function": "{task}/reward.py:none"}}]'),
        r"rewards\.components\.0\.function=.*reward\.py:none: .* has no function 'none'; it has: reward",
    ),
    "output in a file": (
        overrides("output_dir={task}/run.yaml/run"),
        r"output_dir=.*/run\.yaml/run: .*/run\.yaml is not a directory",
    ),
    "output in the root": (overrides("output_dir=/"), r"output_dir=/ is the root of the file system"),
    "one response": (overrides("rollout.n=1"), r"rollout\.n=1: .* so it needs rollout\.n >= 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_named_and_destroys_nothing(task, tmp_path, capfd, case):
    make, message = WRONG[case]
    out = tmp_path / "run"
    out.mkdir()
    earlier = {"metrics.jsonl": '{"step": 7}\n', "run.json": '{"files": {}, "starts": []}'}
    for name, text in earlier.items():
        (out / name).write_text(text)
    arguments = ["algorithm=gvpo", f"output_dir={out}", *make(task, tmp_path), "--overwrite"]
    assert main(["train", str(task / "run.yaml"), *arguments]) == 2
    printed, error = capfd.readouterr()
    assert printed == ""
    assert error.startswith("error: ") and re.search(message, error), error
    assert "Traceback" not in error
    assert {path.name: path.read_text() for path in out.iterdir()} == earlier


@pytest.mark.parametrize(("name", "message"), [("none.py", "there is no file"), ("broken.py", "SyntaxError")])
def test_a_reward_is_looked_for_before_anything_is_loaded(task, tmp_path, capsys, monkeypatch, name, message):
    """Otherwise a large model would be loaded for minutes before the reward worker fails to import it."""
    monkeypatch.setitem(sys.modules, "megatron_gvpo.training.trainer", None)
    (tmp_path / "broken.py").write_text("def mine(prompt, response:\n")
    reward = f'rewards.components=[{{"name": "mine", "function": "{tmp_path}/{name}:mine"}}]'
    assert main(["train", str(task / "run.yaml"), f"output_dir={tmp_path / 'run'}", reward]) == 2
    where, _, what = capsys.readouterr().err.partition(":mine: ")
    assert where == f"error: rewards.components.0.function={tmp_path}/{name}" and message in what


def test_a_logger_that_is_not_installed(task, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    command = ["train", str(task / "run.yaml"), f"output_dir={tmp_path / 'run'}", "logging.wandb_project=p"]
    assert main(command) == 2
    message = "error: logging.wandb_project=p: Weights & Biases is not installed: pip install wandb"
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(("rate", "is_warned_of"), [("1.0e-3", False), ("1.0", True)])
def test_a_learning_rate_far_above_the_usual_is_warned_of(task, tmp_path, capsys, rate, is_warned_of):
    overrides = [f"output_dir={tmp_path}", f"optimizer.lr={rate}"]
    config = load_config([task / "run.yaml"], overrides)
    warn_of_learning_rate(config, ModelCards(config).policy)
    error = capsys.readouterr().err
    assert error.startswith("warning: optimizer.lr=1 for a model of") is is_warned_of
    assert ("the run would diverge: try optimizer.lr=" in error) is is_warned_of


def test_wrong_use_of_a_command(task, tmp_path, capsys):
    config, out = str(task / "run.yaml"), f"output_dir={tmp_path / 'run'}"

    def error_of(code: int, *arguments: str) -> str:
        assert main(arguments) == code
        return capsys.readouterr().err

    assert "no configuration file given" in error_of(2, "train", "train.steps=1")
    assert "error: data.eval is missing" in error_of(2, "eval", config, out, "data.eval=null")
    assert "this directory is not empty" in error_of(2, "export", config, out, "--out", str(task))
    nothing_yet = error_of(1, "export", config, out, "--out", str(tmp_path / "hf"))
    assert nothing_yet == f"error: {tmp_path / 'run' / 'checkpoints'}: there is no complete checkpoint\n"


def test_what_lies_where_a_run_would_write_is_not_removed_unasked(task, tmp_path, capsys):
    """A run keeps files that may be someone else's, and, even with --overwrite, the files that it reads
    itself.
    """
    config, out = str(task / "run.yaml"), f"output_dir={tmp_path}"
    shutil.copytree(task / "model", tmp_path / "hf")
    assert main(["train", config, out]) == 2
    error = capsys.readouterr().err
    assert "holds files that a run would replace" in error and "(hf/" in error
    assert main(["train", config, out, f"model.path={tmp_path}/hf", "--overwrite"]) == 2
    assert capsys.readouterr().err == (
        f"error: model.path={tmp_path}/hf is in {tmp_path}/hf, which a run in {out} replaces: give another "
        "output_dir\n"
    )
    reward = f"rewards.components=[{{name: own, function: '{tmp_path}/hf/reward.py:f'}}]"
    for key, *more in (
        ("teacher.path", "algorithm=opd", f"teacher.path={tmp_path}/hf"),
        ("model.adapter.path", f"model.adapter={{rank: 4, path: {tmp_path}/hf}}"),
        ("rewards.components.0.function", reward),
        ("rollout.conversation.program", f"rollout.conversation.program={tmp_path}/hf/reward.py:f"),
        ("rollout.conversation.tools.0", f"rollout.conversation.tools=['{tmp_path}/hf/reward.py:f']"),
    ):
        (tmp_path / "hf" / "reward.py").touch()
        assert main(["train", config, out, *more, "--overwrite"]) == 2
        assert capsys.readouterr().err.startswith(f"error: {key}={tmp_path}/hf")
    assert (tmp_path / "hf" / "config.json").is_file()
    out = f"output_dir={tmp_path / 'hf'}"
    assert main(["train", config, out, f"model.path={tmp_path}/hf"]) == 2
    assert capsys.readouterr().err == f"error: {out} is model.path: a run must not write into what it reads\n"


def test_what_one_node_lacks_is_said_by_its_first_rank(task, tmp_path, capsys, monkeypatch):
    """Two nodes with 8 ranks each may have different file systems."""
    arguments = ["train", str(task / "run.yaml"), f"output_dir={tmp_path}", "model.path=/none"]
    for name, value in {"WORLD_SIZE": "16", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    for rank, local_rank in ((8, 0), (9, 1)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        assert main(arguments) == 2
    message = f"error on node {platform.node()} (rank 8): model.path=/none: no config.json there"
    error = capsys.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


def test_eval_and_export_of_a_finished_run(task, tmp_path, capsys, monkeypatch):
    out, exported = tmp_path / "run", tmp_path / "exported"
    arguments = [str(task / "run.yaml"), "algorithm=gvpo", "train.steps=2", f"output_dir={out}"]
    assert main(["train", *arguments]) == 0
    last = {name: value for name, value in records(out)[-1].items() if name.startswith("eval/")}
    assert main(["train", *arguments]) == 2
    assert "holds an earlier run" in capsys.readouterr().err

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["train", *arguments, "--resume"]) == 0
    assert "this run is finished, nothing is left to do: its newest" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before

    monkeypatch.setattr(policy, "Optimizer", None)  # neither needs its memory
    assert main(["eval", *arguments, f"model.path={out / 'hf'}"]) == 0
    assert json.loads(capsys.readouterr().out) == last
    assert main(["eval", *arguments, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out) == last
    no_data = "data.train.path=/nowhere.jsonl"
    assert main(["export", *arguments, no_data, "--out", str(exported)]) == 0
    assert capsys.readouterr().out == f"step 2 written to {exported}\n"
    assert (exported / "model.safetensors").read_bytes() == (out / "hf" / "model.safetensors").read_bytes()


def test_doctor(capsys):
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["ready"] else 1)


def test_a_thread_that_never_ends_does_not_keep_a_process_that_is_done():
    """A loss of the user's may start one: the run was finished, and its process waited for ever."""
    program = """
import atexit, sys, threading, time
from megatron_gvpo import cli

cli.LEAVING = 0.5
atexit.register(lambda: (time.sleep(1.0), print("handled")))  # as a tracking service that still sends
if "for ever" in sys.argv:
    threading.Thread(target=time.sleep, args=(3600,), name="beats").start()
sys.argv[1:] = ["recipes"]
sys.exit(cli.main())
"""
    command = [sys.executable, "-c", program]
    usual = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert usual.returncode == 0 and usual.stdout.endswith("handled\n") and usual.stderr == ""
    result = subprocess.run([*command, "for ever"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and "gvpo" in result.stdout
    assert result.stderr == "warning: the command is done; it ends without threads that still run: beats\n"


def test_a_rank_that_is_killed_costs_the_others_a_line_each(capfd, monkeypatch):
    """Each other rank wrote a traceback of Gloo's, sixty lines before the one that said what had happened."""
    program = """
import os, signal, sys
import torch, torch.distributed as dist
from megatron_gvpo import cli

def command(arguments):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))

cli.run_command = command
sys.exit(cli.main())
"""
    monkeypatch.setattr(launcher, "program", ["-c", program])
    assert launcher.launch(2, []) == 128 + signal.SIGKILL
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == [  # rank and launcher each write a line, in any order
        "error: rank 0 has lost another rank, which ended: see its message, or the launcher's",
        "rank 1 was killed by SIGKILL: the others are ended",
    ]


def test_ranks_that_wait_in_vain_say_so_in_a_line(capfd, monkeypatch):
    """Each wrote a traceback that named neither the rank nor the setting."""
    program = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from megatron_gvpo import cli

def command(arguments):
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(seconds=2))
    dist.barrier()
    if os.environ["RANK"] == "1":
        time.sleep(1000)
    dist.all_reduce(torch.zeros(1), group=group)

cli.run_command = command
sys.exit(cli.main())
"""
    monkeypatch.setattr(launcher, "program", ["-c", program])
    monkeypatch.setattr(launcher, "PATIENCE", 1.0)
    assert launcher.launch(2, []) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: rank 0 waited in vain for another rank, which hangs or is much slower ")
    assert "parallel.timeout_seconds" in line and "imed out" in line


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.proof  # tests/runs/test_stopping.py stops two ranks by Ctrl-C
def test_sigterm_stops_both_ranks_and_the_terminal_shows_only_the_run(task, tmp_path):
    quiet = ("algorithm=gvpo", "train.mini_batches=2")
    arguments = [str(task / "run.yaml"), *quiet, f"output_dir={tmp_path}", "checkpoint.every=2"]
    launched = start(
        "megatron_gvpo", "train", *arguments, "train.steps=100000", "--nproc=2", PYTHONWARNINGS=""
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "checkpoints" / "step_00000002").exists():
        assert launched.poll() is None and time.monotonic() < deadline, launched.communicate()
        time.sleep(0.2)
    launched.send_signal(signal.SIGTERM)
    printed, error = launched.communicate(timeout=120)
    assert (launched.returncode, error) == (0, "")
    *lines, last = printed.splitlines()
    newest = max((tmp_path / "checkpoints").iterdir())
    message = f"stopped on request; the checkpoint is complete ({newest}): continue with `train ... --resume`"
    assert last == message
    others = ("train.share_prompts=auto: ", "checkpoint: ", "memory of the first update", "  ")
    assert all(STEP.match(line) or line.startswith(others) for line in lines), printed
    assert json.loads((newest / "state.json").read_text())["step"] == records(tmp_path)[-1]["step"]


@pytest.mark.proof  # tests/observe/test_observe.py fills the disk of a single process
def test_a_disk_full_while_logging_is_said_once_and_costs_no_checkpoint(task, tmp_path):
    quiet = ("algorithm=gvpo", "train.mini_batches=2")
    arguments = [str(task / "run.yaml"), *quiet, f"output_dir={tmp_path}", "checkpoint.every=1"]
    full = reward_options(task, disk_full_in=2)
    launched = start("megatron_gvpo", "train", *arguments, full, "--nproc=2", PYTHONWARNINGS="")
    _, error = launched.communicate(timeout=300)
    assert re.fullmatch(r"error: cannot write the records in output_dir=.*: .*File too large; .*\n", error), (
        error
    )
    assert launched.returncode == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert [line["step"] for line in records(tmp_path)] == [0, 1]


def handles_sigterm(process: psutil.Process) -> bool:
    """True once the process has a handler: it has read its command line, and imported almost nothing yet."""
    (caught,) = re.findall(r"SigCgt:\s+(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_sigterm_while_starting_leaves_nothing(task, tmp_path):
    arguments = [str(task / "run.yaml"), f"output_dir={tmp_path / 'run'}", *SHORT]
    launched = start("megatron_gvpo", "train", *arguments, "--nproc=2")
    ranks: list[psutil.Process] = []
    while len(ranks) < 2 or not all(map(handles_sigterm, ranks)):
        time.sleep(0.05)
        ranks = psutil.Process(launched.pid).children()
    launched.send_signal(signal.SIGTERM)
    _, error = launched.communicate(timeout=300)
    assert launched.returncode == 128 + signal.SIGTERM
    assert error == "stopped on request before training began; nothing was written\n"
    assert not (tmp_path / "run").exists()


FAILS = """
import atexit, time

Table = None

def init(**_):
    atexit.register(time.sleep, 3600)
    raise BaseException("an error of the first rank alone")
"""


@pytest.mark.proof  # test_slurm.py and test_failures.py have a rank that raises
def test_a_rank_that_raises_ends_the_others(task, tmp_path):
    """Exit handlers of a library, here a stand-in for a logger, could otherwise wait for the other ranks."""
    (tmp_path / "wandb.py").write_text(FAILS)
    arguments = [str(task / "run.yaml"), f"output_dir={tmp_path / 'run'}", *SHORT, "logging.wandb_project=p"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    launched = start("megatron_gvpo", "train", *arguments, "--nproc=2", PYTHONPATH=path, WANDB_MODE="offline")
    _, error = launched.communicate(timeout=300)
    assert launched.returncode == 1 and "BaseException: an error of the first rank alone" in error


@pytest.mark.proof  # tests/cluster/test_checkup.py begins ranks by torchrun, too
def test_torchrun(task, tmp_path):
    arguments = [str(task / "run.yaml"), f"output_dir={tmp_path}", *SHORT]
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "megatron_gvpo")
    launched = start(*torchrun, "train", *arguments, TMPDIR=str(tmp_path))
    _, error = launched.communicate(timeout=300)
    assert launched.returncode == 0, error
    assert error.count("train.mini_batches=1: a step's only update is its own reference") == 1, "a warning"
    assert [line["step"] for line in records(tmp_path)] == [0, 1, 2]
    used("torchrun")


def test_wrong_data_on_two_ranks_is_said_once(task, tmp_path):
    (tmp_path / "bad.jsonl").write_text("{\n")
    arguments = [
        str(task / "run.yaml"),
        f"output_dir={tmp_path}",
        *SHORT,
        f"data.train.path={tmp_path}/bad.jsonl",
    ]
    launched = start("megatron_gvpo", "train", *arguments, "--nproc=2", PYTHONWARNINGS="")
    printed, error = launched.communicate(timeout=300)
    assert (launched.returncode, printed) == (2, "")
    assert re.fullmatch(r"error: .*bad\.jsonl, line 1: a record over several lines, .*\n", error)

"""The command `plan`: the configuration that it chooses, its output, and refused input."""

from __future__ import annotations

import json
import shlex
from importlib import resources
from pathlib import Path

import pytest
from helpers.paths import ROOT

from megatron_gvpo.cli import main
from megatron_gvpo.settings.config import load_config

KNOWN = json.loads(resources.files("megatron_gvpo.planner").joinpath("models.json").read_text())
ASKED = (
    "--gpus",
    "16",
    "--gpu",
    "h800",
    "--k",
    "5",
    "--prompts",
    "1024",
    "--response-length",
    "850,p95=2000",
)


def test_the_chosen_layout_is_a_configuration(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "plan.yaml"
    assert main(["plan", "--model", "Qwen/Qwen2.5-7B", *ASKED, "--write", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["predicted"] is True and answer["parameters"] == 7_615_616_512
    best = answer["best"]
    first, *others = [one["predicted_seconds"]["step"] for one in best]
    assert others == sorted(others) and first <= 1.01 * others[0], "as fast as the fastest, and the simplest"
    assert all(one["predicted_gib"]["total"] < 79.6 for one in best)
    assert answer["losers"] and answer["impossible"]
    assert "Predicted, not measured" in out.read_text()

    one = ("--model", "Qwen/Qwen2.5-1.5B", *ASKED, "--gpus", "1", "--write", str(out))
    assert main(["plan", *one, "--batch-epochs", "3"]) == 0
    config = load_config([task / "run.yaml", out], ["output_dir=x"])
    assert config.train.batch_epochs == 3
    assert config.rollout.n == 5 and config.train.prompts_per_step == 1024
    assert (config.parallel.tp, config.parallel.pp) == (1, 1)


def test_optimizer_states_in_host_memory_make_room(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    """72.7 B weights on the 8 GPUs of a node, with 16 bytes for each weight."""
    out = tmp_path / "plan.yaml"
    command = ("plan", "--model", "Qwen/Qwen2.5-72B", *ASKED, "--gpus", "8", "--offload", "1")
    assert main([*command, "--write", str(out), "--json"]) == 0
    for one in json.loads(capsys.readouterr().out)["best"]:
        assert one["predicted_gib"]["optimizer"] == 0 and "offload1" in one["layout"]
        assert one["predicted_host_gib_of_a_node"] == pytest.approx(16 * 72.7e9 / 2**30, rel=1e-3)
    assert load_config([task / "run.yaml", out], ["output_dir=x"]).optimizer.offload_fraction == 1
    assert main(list(command)) == 0
    assert "in host memory, for the optimizer: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "options", "keys"),
    [
        ("Qwen/Qwen2.5-7B", ["--gpus", "8"], ("colocated: true", "transport: colocated")),
        ("Qwen/Qwen2.5-7B", ["--gpus", "64", "--fp8"], ("recipe: blockwise",)),
        # 94 layers, which no power of two but 2 divides
        ("Qwen/Qwen3-235B-A22B", ["--gpus", "256"], ("stage_layers",)),
        pytest.param("deepseek-ai/DeepSeek-V2", ["--gpus", "256"], ("ep: ",), marks=pytest.mark.proof),
        # Servers on several nodes each, and shards for them
        ("deepseek-ai/DeepSeek-V3", ["--gpus", "256"], ("nodes: 4", "transport: sharded")),
    ],
)
def test_a_plan_goes_into_a_job_with_the_command_that_it_names(
    name: str, options: list[str], keys: tuple[str, ...], task, tmp_path, capsys
):
    """`megatron-gvpo slurm` checks the layout against the model and the machines."""
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(KNOWN[name]))
    out = tmp_path / "plan.yaml"
    assert main(["plan", "--model", str(config.parent), *ASKED, *options, "--write", str(out)]) == 0
    written = out.read_text()
    assert all(key in written for key in keys), written
    command = shlex.split(written.splitlines()[1].removeprefix("# megatron-gvpo"))
    files = {"CONFIG.yaml": str(task / "run.yaml"), "THIS.yaml": str(out)}
    arguments = [files.get(word, word) for word in command]
    own = [f"model.path={config.parent}", "model.dtype=bfloat16", f"output_dir={tmp_path / 'run'}"]
    assert main([*arguments, *own, "--dry-run"]) == 0, capsys.readouterr().err
    assert "-m megatron_gvpo serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpus", "options", "taken", "command"),
    [
        (8, ["--reward-gpus", "2"], 2, "train CONFIG.yaml THIS.yaml --nproc 6"),
        (24, ["--reward-gpus", "2"], 8, "slurm CONFIG.yaml THIS.yaml --nodes "),
        (8, ["--reward-gpus", "2", "--teacher-gpus", "2"], 4, "train CONFIG.yaml THIS.yaml --nproc 4"),
        (24, ["--reward-gpus", "4", "--teacher-gpus", "2"], 8, "slurm CONFIG.yaml THIS.yaml --nodes "),
    ],
)
def test_servers_leave_the_other_gpus(
    gpus: int,
    options: list[str],
    taken: int,
    command: str,
    task: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
):
    """The plan is that of so many GPUs fewer, and its servers fit on them."""
    model = ["--model", "Qwen/Qwen2.5-7B", *ASKED]
    taught = ["--recipe", "opd", "--teacher", "Qwen/Qwen2.5-1.5B"] if "--teacher-gpus" in options else []
    out, plans = tmp_path / "plan.yaml", []
    for words in (["--gpus", str(gpus), *options], ["--gpus", str(gpus - taken)]):
        assert main(["plan", *model, *taught, *words, "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert [plan["server_gpus"] for plan in plans] == [taken, 0]
    if not taught:  # without servers of its own a teacher would be the trainer's
        assert plans[0]["best"] == plans[1]["best"]
    assert main(["plan", *model, *taught, "--gpus", str(gpus), *options, "--write", str(out)]) == 0
    assert f"{gpus - taken} train and generate" in " ".join(capsys.readouterr().out.split())
    assert f"# megatron-gvpo {command}" in out.read_text()
    overrides = ["output_dir=x", *(["algorithm=opd", f"teacher.path={tmp_path}"] if taught else [])]
    config = load_config([task / "run.yaml", out], overrides)
    servers = config.rollout.servers
    assert servers.count * servers.tp <= min(8, gpus - taken)
    if taught and gpus <= 8:
        assert config.teacher.server.count * config.teacher.server.tp == 2


def test_what_is_printed_says_that_it_is_predicted(capsys: pytest.CaptureFixture):
    assert main(["plan", "--model", "Qwen/Qwen2.5-7B", *ASKED]) == 0
    printed = capsys.readouterr().out
    assert "All numbers are predicted" in printed and "why not otherwise (predicted)" in printed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--model", "nobody/nothing"], "or one of the known models: Qwen/Qwen2.5-0.5B"),
        (["--gpu", "h900"], "--gpu h900: unknown; planner/gpus.json describes h800, h100"),
        (["--gpus", "12"], "--gpus 12: more than one node of 8 GPUs; give a multiple of 8"),
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--prompts", "0"], "--prompts 0: must be at least 1"),
        (["--batch-epochs", "0"], "--batch-epochs 0: must be at least 1"),
        (["--async-steps", "-1"], "--async-steps -1: must be at least 0"),
        (["--write", "nowhere/plan.yaml"], "--write nowhere/plan.yaml: there is no directory nowhere"),
        (["--write", str(ROOT / "README.md")], "README.md: this exists and is not a plan"),
        (["--write", "."], "--write .: this exists and is not a plan"),
        (["--response-length", "many"], "expected MEAN[,p95=TOKENS]"),
        (["--response-length", "inf"], "expected MEAN[,p95=TOKENS]"),
        (["--response-length", "nan"], "expected MEAN[,p95=TOKENS]"),
        (["--response-length", "850,p95"], "expected MEAN[,p95=TOKENS]"),
        (["--response-length", "850,p95=100"], "expected 0 < mean < p95 <= max"),
        (["--mini-batches", "3"], "--mini-batches 3 does not divide --prompts 1024"),
        (["--gpu", "a800", "--fp8"], "the GPU a800 does not support FP8"),
        (["--model", "Qwen/Qwen2.5-72B", "--gpus", "1"], "no layout can run"),
        (["--model", "Qwen/Qwen2.5-72B", "--gpus", "8"], "in host memory: try --offload 1"),
        (["--offload", "12"], "--offload 12.0: must be a fraction from 0 to 1"),
        (["--model", "Qwen/Qwen2.5-Math-7B"], "max_position_embeddings=4096"),
        (["--reward-gpus", "-1"], "--reward-gpus -1: must be at least 0"),
        (["--gpus", "2", "--reward-gpus", "2"], "--reward-gpus 2: --gpus 2 leaves none to train on"),
        (["--reward-gpus", "9"], "--reward-gpus 9, which are 16 in whole nodes: --gpus 16 leaves none"),
        (
            ["--gpus", "8", "--reward-gpus", "4", "--teacher-gpus", "4"],
            "--reward-gpus 4 and --teacher-gpus 4: --gpus 8 leaves none to train on",
        ),
        (["--k", "1"], "--k 1: must be at least 2; --recipe gvpo compares the responses to a prompt"),
        (["--recipe", "gppo"], "there is no recipe 'gppo'; did you mean 'ppo'?"),
        (["--recipe", "sft"], "--recipe sft: a plan needs a method that samples responses"),
        (
            ["--model", "deepseek-ai/DeepSeek-V3", "--gpus", "16"],
            "a rollout server needs 32 GPUs, on 4 nodes that do not train, to hold the 1250 GiB of bf16",
        ),
    ],
)
def test_what_cannot_be_planned(changes: list[str], words: str, capsys: pytest.CaptureFixture):
    arguments = ["plan", "--model", "Qwen/Qwen2.5-7B", *ASKED, "--response-length", "850,p95=3000", *changes]
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_model_of_ones_own(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    for model in (task / "model", task / "model" / "config.json"):
        options = [*ASKED[:-2], "--response-length", "20", "--gpus", "1", "--prompt-tokens", "8"]
        assert main(["plan", "--model", str(model), *options]) == 0
    assert main(["plan", "--model", str(tmp_path), *ASKED]) == 2
    assert f"--model={tmp_path}: no config.json there" in capsys.readouterr().err


QWEN = KNOWN["Qwen/Qwen2.5-7B"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not valid JSON"),
        ([], "expected an object of names and values, found list"),
        ({"model_type": "mamba"}, "architecture not named in config.json; supported: DeepseekV2ForCausalLM"),
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM in config.json"),
        (
            KNOWN["deepseek-ai/DeepSeek-V2"] | {"q_lora_rank": None},
            "q_lora_rank=null in config.json (DeepSeek-V2-Lite)",
        ),
        (QWEN | {"hidden_size": None}, "no hidden_size in config.json"),
        (QWEN | {"num_attention_heads": 0}, "num_attention_heads=0 in config.json: must be at least 1"),
        (QWEN | {"hidden_size": "3584"}, "hidden_size='3584' in config.json: expected a whole number"),
    ],
)
def test_a_model_that_cannot_be_trained_is_not_planned(config: object, words: str, tmp_path: Path, capsys):
    """The message is the trainer's; a file that is not a config.json is refused, too."""
    file = tmp_path / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    for path in (tmp_path, file):
        assert main(["plan", "--model", str(path), *ASKED]) == 2
        printed = capsys.readouterr()
        assert words in printed.err and not printed.out


@pytest.mark.parametrize("option", ["--top", "--prompts", "--gpus"])
def test_counts_have_an_end(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"--model": "Qwen/Qwen2.5-7B", "--gpus": "8", "--gpu": "h100", "--prompts": "64", "--k": "8"}
    words |= {"--response-length": "50", option: "9" * 20}
    assert main(["plan", *(word for pair in words.items() for word in pair)]) == 2
    assert capsys.readouterr().err == f"error: {option}: must be at most 10000000\n"


def test_lengths_that_nobody_gave_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The old error named a sum of two defaults and neither of them."""
    words = [
        "plan",
        "--model",
        "mistralai/Mistral-7B-v0.3",
        "--gpus",
        "8",
        "--gpu",
        "h100",
        "--prompts",
        "64",
        "--k",
        "8",
    ]
    assert main([*words, "--response-length", "50000"]) == 2
    printed = capsys.readouterr().err
    assert (
        "a prompt has 256 (--prompt-tokens), the longest response 250000 (--response-length MEAN,max=N"
        in printed
    )

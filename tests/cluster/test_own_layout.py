"""`plan CONFIG.yaml`: whether that layout fits, which part is largest, what to change; what --write keeps."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
import yaml

from megatron_gvpo.cli import main
from megatron_gvpo.planner import architecture, workload
from megatron_gvpo.planner.prediction import least
from megatron_gvpo.planner.workload import parse_lengths
from megatron_gvpo.rehearsal import made_model
from megatron_gvpo.settings.config import load_config

KNOWN = json.loads(resources.files("megatron_gvpo.planner").joinpath("models.json").read_text())
CONFIG = """
output_dir: runs/x
model: {path: models/Qwen2.5-7B}
data: {train: {path: train.jsonl}}
rollout:
  engine: vllm
  n: 8
  max_tokens: 4096
  servers: {python: /opt/vllm/bin/python, count: 4, tp: 2, colocated: true}
  weights: {transport: shared}
train: {steps: 20, prompts_per_step: 128, mini_batches: 2, max_tokens_per_micro_batch: 400000}
optimizer: {lr: 1e-5}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG)
    return str(file)


def test_a_layout_that_does_not_fit_names_the_part_and_changes_that_are_enough(config, tmp_path, capsys):
    assert main(["plan", config, "--nodes", "4", "--gpu", "h100", "--json"]) == 1
    reported = json.loads(capsys.readouterr().out)
    assert not reported["fits"] and reported["gpus"] == 32 and reported["needed_gib"] > reported["usable_gib"]
    assert max(reported["parts_gib"], key=reported["parts_gib"].get) == "activations"
    first = reported["changes"][0]
    assert first["fits"] and first["settings"].startswith("train.max_tokens_per_micro_batch=")
    path = made_model.prepare("Qwen2.5-7B", "model.path", tmp_path)
    changed = load_config([config], [*first["settings"].split(), f"model.path={path}"])
    assert least(changed, 32) == pytest.approx(first["gib"])
    assert main(["plan", config, "--nodes", "4", *first["settings"].split()]) == 0
    assert "\nfits: " in capsys.readouterr().out


def test_changes_together_where_none_is_enough_alone(config, capsys):
    assert main(["plan", config]) == 1
    printed = capsys.readouterr().out
    assert "does not fit: needs " in printed and "the largest part is activations" in printed
    enough = [line for line in printed.splitlines() if line.endswith(", fits")]
    assert enough[0].startswith("  parallel.recompute=full train.max_tokens_per_micro_batch=")


def test_a_layout_that_fits_is_written_for_one_that_does_not(config, tmp_path, capsys):
    plan = tmp_path / "plan.yaml"
    assert main(["plan", config, "--nodes", "4", "--write", str(plan)]) == 0
    assert "does not fit: needs " in capsys.readouterr().out
    assert main(["plan", config, str(plan), "--nodes", "4"]) == 0


def test_servers_that_are_too_small_are_a_part_too(config, capsys):
    small = ["model.path=Qwen/Qwen2.5-72B", "train.max_tokens_per_micro_batch=8192", "parallel.tp=8"]
    assert main(["plan", config, *small, "--nodes", "16", "parallel.recompute=full"]) == 1
    assert "rollout.servers.tp=2 cannot hold the 135 GiB of bf16 weights" in capsys.readouterr().out
    enough = [*small, "rollout.servers.tp=4"]
    assert main(["plan", config, *enough, "--nodes", "16", "parallel.recompute=full"]) == 0


def test_servers_of_fp8_weights_need_half_the_room(config, capsys, tmp_path):
    large = ["model.path=deepseek-ai/DeepSeek-V3", "rollout.servers.tp=8", "rollout.servers.count=1"]
    large += ["--gpu", "h200", "--nodes", "32", "parallel.ep=32", "--json"]
    (tmp_path / "fp8").mkdir()
    for quantised, problem in (({}, "the 1250 GiB of bf16 weights"), ({"quant_method": "fp8"}, None)):
        values = KNOWN["deepseek-ai/DeepSeek-V3"] | ({"quantization_config": quantised} if quantised else {})
        (tmp_path / "fp8" / "config.json").write_text(json.dumps(values))
        main(["plan", config, *large[:3], f"rollout.servers.model_path={tmp_path / 'fp8'}", *large[3:]])
        reported = json.loads(capsys.readouterr().out)
        assert reported["server"] is None if problem is None else problem in reported["server"]


@pytest.mark.parametrize("gpu", ["a100", "A100", "b200"])
def test_gpus_by_name(config, capsys, gpu):
    main(["plan", config, "--gpu", gpu])
    assert f"on 8 x {gpu.lower()}, GiB" in capsys.readouterr().out


@pytest.mark.parametrize("colocated", ["true", "false"])
def test_what_is_written_keeps_engine_and_paths_and_replaces_the_rest(config, tmp_path, colocated):
    out = tmp_path / "plan.yaml"
    words = [f"rollout.servers.colocated={colocated}"]
    words += [] if colocated == "true" else ["rollout.weights.transport=broadcast", "rollout.async_steps=1"]
    main(
        ["plan", config, *words, "--nodes", "2", "--write", str(out), "train.max_tokens_per_micro_batch=8192"]
    )
    after = load_config([config, out])
    assert after.rollout.engine == "vllm" and after.rollout.servers.python == "/opt/vllm/bin/python"
    assert (after.rollout.n, after.train.prompts_per_step, after.train.mini_batches) == (8, 128, 2)
    assert "for models/Qwen2.5-7B" in out.read_text()
    if colocated == "true":
        assert after.rollout.servers.colocated and after.rollout.weights.transport == "colocated"


def test_a_search_for_an_engine_and_colocated_servers(capsys, tmp_path):
    options = ["--model", "Qwen/Qwen2.5-7B", "--gpus", "32", "--gpu", "h100", "--k", "8", "--prompts", "64"]
    out = tmp_path / "plan.yaml"
    words = [*options, "--response-length", "800", "--engine", "vllm", "--colocated"]
    assert main(["plan", *words, "--write", str(out), "--json"]) == 0
    layouts = [one["layout"] for one in json.loads(capsys.readouterr().out)["best"]]
    assert layouts and all("colocated" in layout for layout in layouts)
    assert "engine: vllm" in out.read_text()


def test_a_step_takes_as_long_as_the_search_says_of_the_same_layout(config, capsys, tmp_path):
    lengths = ["--gpu", "h800", "--response-length", "850,p95=2000,max=3840"]
    work = [
        "--model",
        "Qwen/Qwen2.5-7B",
        "--gpus",
        "16",
        "--k",
        "8",
        "--prompts",
        "128",
        "--mini-batches",
        "2",
    ]
    out = str(tmp_path / "plan.yaml")
    assert main(["plan", *work, *lengths, "--engine", "vllm", "--colocated", "--json", "--write", out]) == 0
    searched = json.loads(capsys.readouterr().out)["best"][0]["predicted_seconds"]
    assert main(["plan", config, out, "--nodes", "2", *lengths, "--json"]) == 0
    took = json.loads(capsys.readouterr().out)["seconds"]
    assert took == pytest.approx(searched, rel=0.01, abs=0.02)
    assert main(["plan", config, out, "--nodes", "2", *lengths]) == 0
    assert f"a step takes about {took['step']:.0f} s (predicted): rollout " in capsys.readouterr().out


def test_an_mlp_that_is_computed_again_takes_its_forward_pass_again(config, capsys):
    took = {}
    for recompute in ("none", "selective", "full"):
        words = [f"parallel.recompute={recompute}", "train.max_tokens_per_micro_batch=4096", "--json"]
        assert main(["plan", config, *words, "--nodes", "4"]) == 0
        took[recompute] = json.loads(capsys.readouterr().out)["seconds"]["training"]
    model = architecture.load("Qwen/Qwen2.5-7B")
    tokens = 128 * 8 * (256 + 0.4 * 4096)
    mlps = 2 * tokens * model.layers * model.mlp / (32 * workload.gpu("h100").flops(False))
    assert took["selective"] - took["none"] == pytest.approx(mlps, rel=0.01)
    assert took["none"] < took["selective"] < took["full"]


@pytest.mark.parametrize("engine", ["local", "sglang"])
def test_a_time_that_the_planner_cannot_know_is_not_shown(config, capsys, engine):
    """The embedded engine has no prediction, and running servers' GPUs are not known."""
    values = yaml.safe_load(CONFIG)
    values["rollout"] = {"engine": engine, "n": 8, "max_tokens": 1024}
    if engine == "sglang":
        values["rollout"]["servers"] = {"urls": ["http://127.0.0.1:9"]}
    Path(config).write_text(yaml.safe_dump(values))
    assert main(["plan", config, "train.max_tokens_per_micro_batch=2048", "--nodes", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] is None


def test_lengths_that_are_left_out_are_those_of_the_run():
    """The default of 5 times the mean may be above what a response can have."""
    lengths = parse_lengths("1500", 3072)
    assert (lengths.p95, lengths.maximum) == (3072, 3072)
    assert parse_lengths("1500").maximum == 7500
    assert parse_lengths(str(lengths)) == lengths


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--gpu", "h100"], "--model, --gpus, --prompts, --k, --response-length: missing; or give a config"),
        (["CONFIG", "--k", "8"], "--k: the configuration says it"),
        (["CONFIG", "--offload", "1"], "--offload: the configuration says it"),
        (["CONFIG", "--fp8", "--write", "x.yaml"], "--fp8: the configuration says it"),
        (["CONFIG", "--teacher-gpus", "2"], "--teacher-gpus: with a configuration only the search reads it"),
        (["CONFIG", "--nodes", "2", "--gpus", "8"], "--nodes and --gpus: give one of them"),
        (["CONFIG", "--nodes", "0"], "--nodes 0: must be from 1"),
        (["CONFIG", "--nodes", "-1"], "--nodes -1: must be from 1"),
        (["CONFIG", "--gpus", "0"], "--gpus 0: must be from 1"),
        (["CONFIG", "--response-length", "900,max=4097"], "responses end at rollout.max_tokens=4096"),
        (["CONFIG", "--response-length", "5000"], "responses end at rollout.max_tokens=4096"),
        (["CONFIG", "--response-length", "9,p95=1e4"], "responses end at rollout.max_tokens=4096"),
        (["CONFIG", "--response-length", "nan"], "expected"),
        (
            ["CONFIG", "data.max_prompt_tokens=500", "--prompt-tokens", "501"],
            "--prompt-tokens 501: prompts have at most data.max_prompt_tokens=500",
        ),
        (["CONFIG", "parallel.tp=3"], "tp=3"),
        (["CONFIG", "model.dtype=float32"], "model.dtype=float32: the planner counts bfloat16 alone"),
        (["CONFIG", "model.path=nothing"], "model.path=nothing: no config.json there"),
        (["CONFIG", "--gpu", "v100"], "--gpu v100: unknown"),
    ],
)
def test_refused(config, capsys, words, error):
    assert main(["plan", *(config if word == "CONFIG" else word for word in words)]) == 2
    assert error in capsys.readouterr().err

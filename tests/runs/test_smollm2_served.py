"""SmolLM2-135M in bfloat16, beside real servers: the rounding of a model that this project did not make."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.paths import ROOT
from helpers.servers.real_servers import ENGINES, engine_python
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from megatron_gvpo.core.json_files import read_metrics
from megatron_gvpo.observe.mismatch import THRESHOLDS
from megatron_gvpo.weights.probe import TOLERANCE

EXAMPLE = ROOT / "examples" / "smollm2"
pytestmark = [pytest.mark.proof, pytest.mark.timeout(3600)]  # it fetches 94 MB
run = partial(subprocess.run, capture_output=True, text=True, timeout=3000)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the example, its task, and the model."""
    directory = tmp_path_factory.mktemp("smollm2")
    (directory / "examples").symlink_to(ROOT / "examples")
    fetched = run([sys.executable, str(EXAMPLE / "model.py")])
    assert fetched.returncode == 0, fetched.stderr
    cached = run(
        [sys.executable, "-c", "from model import cached_model; print(cached_model().resolve())"], cwd=EXAMPLE
    )
    made = run(
        [sys.executable, str(EXAMPLE / "make_task.py"), "--out", str(directory / "runs" / "smollm2" / "task")]
    )
    assert made.returncode == 0, made.stderr
    (directory / "runs" / "smollm2" / "model").symlink_to(cached.stdout.strip())
    return directory


@pytest.mark.parametrize("engine", ENGINES)
def test_rounding_of_a_real_model_is_not_taken_for_other_weights(task: Path, engine: str) -> None:
    """The probes of the pushes pass, no step warns, and the certificate names rounding alone."""
    command = [sys.executable, "-m", "megatron_gvpo"]
    options = ["model.dtype=bfloat16", "algorithm.reference_logprobs=trainer", f"rollout.engine={engine}"]
    options += [f"rollout.servers.python={engine_python(engine)}", "rollout.servers.context_length=256"]
    options += ["train.steps=2", "optimizer.warmup_steps=0", "data.eval=null", "eval.every=0"]
    options += [f"output_dir=runs/{engine}", "checkpoint.export_hf=false"]
    trained = run([*command, "train", "examples/smollm2/gvpo.yaml", *options], cwd=task)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "not the one that is trained" not in trained.stdout + trained.stderr
    steps = [line for line in read_metrics(task / "runs" / engine / "metrics.jsonl") if "mismatch/kl" in line]
    assert len(steps) == 2 and all(1e-5 < line["mismatch/kl"] < THRESHOLDS["bfloat16"] for line in steps)
    certificate = run([*command, "mismatch", f"runs/{engine}"], cwd=task)
    assert certificate.returncode == 0, certificate.stdout + certificate.stderr
    assert "precision" in certificate.stdout


def test_wrong_weights_in_one_layer_are_further_off_than_rounding(task: Path) -> None:
    """transformers in bfloat16 is well within the probe's tolerance, a layer that is wrong outside it."""
    path = task / "runs" / "smollm2" / "model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    problem = (task / "runs" / "smollm2" / "task" / "train.jsonl").read_text().splitlines()[0]
    chat = [{"role": "system", "content": "You are a calculator. Answer with one number."}]
    chat += [{"role": "user", "content": json.loads(problem)["prompt"]}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)[:48]
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)
    )
    expected = logprobs(exact, tokens)

    def gap(model: LlamaForCausalLM) -> float:
        return float((logprobs(model, tokens) - expected).abs().mean())

    assert 0.01 < gap(rounded) < TOLERANCE["bfloat16"] / 3
    for layer in (3, 15, 28):
        without_norm, without_mlp = deepcopy(exact), deepcopy(exact)
        without_norm.model.layers[layer].input_layernorm.weight.data.fill_(1)
        without_mlp.model.layers[layer].mlp.down_proj.weight.data.zero_()
        assert gap(without_norm) > TOLERANCE["bfloat16"] and gap(without_mlp) > TOLERANCE["bfloat16"]


def logprobs(model: LlamaForCausalLM, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]

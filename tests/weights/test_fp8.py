"""FP8 weights equal those of the engines' own quantisers bit for bit, and real servers load them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import tiny_run
from helpers.distributed import launch
from helpers.paths import HELPERS
from helpers.pushes.fp8_worker import quantise_checkpoint
from helpers.servers.real_servers import ENGINES, PROMPTS, engine_python, engine_with, logprobs, running
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.complete_weights import Stored
from megatron_gvpo.weights.bucket import DoubleBuffer, buckets
from megatron_gvpo.weights.fp8 import Fp8Layout, fp8_layout, quantise

SHAPES = [(128, 128), (1, 1), (127, 129), (256, 384), (300, 16), (3, 700)]


def cases() -> dict[str, torch.Tensor]:
    """Weights of odd shapes and sizes: zeros, subnormal and huge numbers, outliers, every bf16 exponent."""
    torch.manual_seed(0)
    weights = {f"normal-{n}x{k}": torch.randn(n, k) * 0.02 for n, k in SHAPES}
    weights["zeros"] = torch.zeros(130, 130)
    weights["negative zeros"] = -torch.zeros(130, 130)
    weights["tiny"] = torch.randn(200, 200) * 1e-6
    weights["subnormal"] = torch.randn(200, 200) * 1e-39
    weights["huge"] = torch.rand(200, 200) * 3e38
    weights["outlier"] = torch.randn(200, 200) * 0.02
    weights["outlier"][5, 7] = 1e4
    weights["all exponents"] = torch.randn(256, 256) * 2.0 ** torch.linspace(-126, 126, 256)[:, None]
    weights["a power of two is largest"] = (torch.rand(128, 128) * 2 - 1) * 448 * 2.0**-9
    weights["a power of two is largest"][0, 0] = 448 * 2.0**-9
    in_bf16 = {f"{name} bf16": weight.bfloat16() for name, weight in weights.items()}
    return in_bf16 | {f"{name} fp32": weight for name, weight in weights.items()}


@pytest.mark.parametrize(("engine", "power_of_two"), [("vllm", False), ("sglang", True)])
def test_it_is_the_engines_own_quantiser_bit_for_bit(engine: str, power_of_two: bool, tmp_path: Path):
    """vLLM's quantiser has scales of any value, SGLang's has powers of two (scale_fmt ue8m0)."""
    weights, reference = cases(), HELPERS / "references" / "fp8_reference.py"
    save_file(weights, tmp_path / "in.safetensors")
    command = [engine_python(engine), reference, engine, tmp_path / "in.safetensors", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    by_engine = load_file(tmp_path / "out")
    for name, weight in weights.items():
        quantised, scale = quantise(weight, power_of_two=power_of_two)
        assert quantised.shape == weight.shape and quantised.dtype == torch.float8_e4m3fn
        assert torch.equal(quantised.view(torch.uint8), by_engine[name].view(torch.uint8)), name
        assert scale.dtype == torch.float32 and torch.equal(scale, by_engine[f"{name}_scale_inv"]), name


def test_a_bucket_keeps_what_is_quantised_and_every_offset_aligned():
    """In a stream of odd sizes FP8 stays FP8, scales stay fp32, and so does what the trainer has in fp32."""
    torch.manual_seed(0)
    linear, odd = torch.randn(130, 131), torch.randn(3, 5)
    layout = Fp8Layout(frozenset(["a.weight", "odd.weight"]), (128, 128), False)
    norm, bias = torch.ones(7).bfloat16(), torch.randn(2)
    stream = [("a.weight", linear), ("norm", norm), ("odd.weight", odd), ("b", bias)]
    sent = {}
    for bucket in buckets(layout.quantised(stream), DoubleBuffer(2**20, torch.device("cpu")), torch.bfloat16):
        assert bucket.flat.data_ptr() % 8 == 0
        sent |= {name: tensor.clone() for name, tensor in bucket.tensors()}
    names = ["a.weight", "a.weight_scale_inv", "norm", "odd.weight", "odd.weight_scale_inv", "b"]
    assert list(sent) == names
    for name, weight in (("a.weight", linear), ("odd.weight", odd)):
        quantised, scale = quantise(weight)
        assert torch.equal(sent[name].view(torch.uint8), quantised.view(torch.uint8))
        assert torch.equal(sent[f"{name}_scale_inv"], scale) and scale.dtype == torch.float32
    assert sent["norm"].dtype == torch.bfloat16 and torch.equal(sent["b"], bias)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
GOOD = {"a.weight": Stored("a", (130, 64), "F8_E4M3"), "a.weight_scale_inv": Stored("a", (2, 1), "F32")}


@pytest.mark.parametrize(
    ("how", "stored", "words"),
    [
        (FP8 | {"quant_method": "awq"}, GOOD, "'quant_method': 'awq'.*block-wise FP8 alone"),
        (FP8 | {"weight_block_size": None}, GOOD, "'weight_block_size': None"),
        (FP8 | {"activation_scheme": "static"}, GOOD, "'activation_scheme': 'static'"),
        (FP8, {"a.weight": GOOD["a.weight"]}, "a.weight_scale_inv is missing.*shape \\(2, 1\\)"),
        (FP8, GOOD | {"a.weight_scale_inv": Stored("a", (1, 1), "F32")}, r"has shape \(1, 1\)"),
        (FP8, {"a.weight": Stored("a", (130, 64), "BF16")}, "no tensor is in FP8"),
    ],
)
def test_another_quantisation_is_refused_in_words(how: dict, stored: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        fp8_layout("model", {"quantization_config": how}, stored)


def test_the_layout_is_what_the_served_checkpoint_holds():
    assert fp8_layout("model", {}, GOOD) is None
    layout = fp8_layout("model", {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}, GOOD)
    assert layout == Fp8Layout(frozenset(["a.weight"]), (128, 128), power_of_two=True)


@pytest.mark.proof  # its parts are above: the layout, the bucket, and the engine's own quantiser
@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_in_fp8_gets_what_its_checkpoint_would_hold_byte_for_byte(engine: str, tmp_path: Path):
    """A bf16 trainer and a real server, of which only the FP8 matrix products are stand-ins."""
    task, served = make_task_in_fp8(tmp_path)
    python = engine_with("fp8_on_cpu", engine, tmp_path)
    own = (python, f"rollout.servers.model_path={served}", "model.dtype=bfloat16")
    with running(engine, task, tmp_path / "out", *own) as supervisor:
        url = supervisor.processes[0].url
        launch("helpers.pushes.fp8_worker:run", [1], engine, url, str(task), str(served), str(tmp_path))
    answers = [json.loads((tmp_path / f"answers-{step}").read_text()) for step in (0, 1)]
    assert answers[0]["pushed"] != answers[1]["pushed"]
    for step, answer in enumerate(answers):
        assert answer["pushed"] == answer["from files"]
        expected = logprobs(tmp_path / f"export-{step}", PROMPTS[0][:1], PROMPTS[0][1:])
        gap, before = ((torch.tensor(answer[when]) - expected).abs().mean() for when in ("score", "before"))
        assert gap < 0.15 and before > 0.5  # measured: up to 0.08, and 0.74 or more


def make_task_in_fp8(directory: Path) -> tuple[Path, Path]:
    """The tiny task with a bf16 model whose layers have whole blocks, and an FP8 model of other weights."""
    task, served = directory / "task", directory / "served"
    tiny_run.make(task)
    sizes = {"hidden_size": 256, "num_attention_heads": 4}
    config = AutoConfig.from_pretrained(task / "model", **sizes)
    for seed in (1, 0):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(task / "model")
        if seed:
            quantise_checkpoint(task / "model", served)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(task / "model" / file, served)
    return task, served

"""Gradients of a model whose matrix products are in FP8, on an emulated GPU: those of another emulation.

The reference (fp8_model.py) rounds the operands of every product as the recipe's definition says, in fp64;
without FP8 it is the model of transformers. An operand near the middle between two numbers of FP8 may round
to either side, and changes all that follows it. With weights and activations in fp32 no operand of this model
does; with bf16, as in training, many do, and the bound is twice the error of the reference in bf16. The model
has one layer: what one operand changes grows from layer to layer, up to the error of FP8 itself.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import on_null_cuda
from helpers.cases.gradient_cases import ALL, TEMPERATURE, gvpo
from helpers.cases.gradient_rows import ROWS, make_rows, moved
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.references.bf16_errors import relative_errors, round_weights
from helpers.references.fp8_model import PackedModel
from helpers.workers.gradient_worker import Case, Layout, Outcome
from torch import Tensor

from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.settings.parallel import Padding
from megatron_gvpo.verify.shrink import scatter

pytestmark = pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs")

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STEP = gvpo(ALL)
RECIPE, BLOCK = "blockwise", 128  # a pack's tokens are padded to a multiple of a block
BOUND = 1e-5
LAYOUT = Layout(1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**reference.COMMON, **SIZES}, head_dim=128)
    model = transformers.AutoModelForCausalLM.from_config(config)
    scatter(model)
    model.save_pretrained(path / "model")
    round_weights(path)
    return path


def outcome_of(directory: Path, dtype: str) -> Outcome:
    rows = rows_of(directory)
    case = Case("step", STEP.algorithm, rows, STEP.budget, model="model", dtype=dtype, fp8=RECIPE)
    torch.save(([(LAYOUT, case)], {"model": case}), directory / "work.pt")
    launch("helpers.workers.gradient_worker:run", [1], str(directory), emulated=True)
    results = torch.load(directory / f"results-{LAYOUT}.pt", weights_only=False)
    outcome: Outcome = results[str(LAYOUT), "step"]
    return outcome


@cache
def rows_of(directory: Path) -> Any:
    rows = make_rows(ROWS["ragged"])
    return moved(rows, reference.log_probs(reference.load(directory / "model"), rows, TEMPERATURE))


@cache
def gradients_of(
    directory: Path, recipe: str | None, dtype: torch.dtype = torch.float64
) -> tuple[float, dict[str, Tensor]]:
    """The reference's loss and gradients of the step."""
    model = reference.load(directory / "model")
    weights = {name: p.detach().to(dtype).requires_grad_() for name, p in model.named_parameters()}
    rows = rows_of(directory)
    batch = PackedBatch.pack(rows, Padding(1, 1 if recipe is None else BLOCK))
    packed = PackedModel(model.config, weights, recipe)
    logits = packed.logits(batch.token_t, batch.lengths)[batch.response_r].double()
    logp_r = (logits / TEMPERATURE).log_softmax(-1).gather(1, batch.label_r[:, None])[:, 0]
    loss = STEP.loss(reference.sample_of(rows, list(logp_r.split(rows.length_n.tolist()))))
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return loss.item(), {name: g.double() for name, g in zip(weights, gradients, strict=True)}


def test_without_fp8_the_reference_is_transformers(directory: Path) -> None:
    model, rows = reference.load(directory / "model"), rows_of(directory)
    loss = STEP.loss(reference.sample_of(rows, reference.log_probs(model, rows, TEMPERATURE)))
    loss.backward()
    packed_loss, packed = gradients_of(directory, None)
    assert packed_loss == pytest.approx(loss.item(), rel=1e-6), "cosines are in fp32"
    exact = {name: p.grad for name, p in model.named_parameters()}
    assert max(relative_errors(packed, exact).values()) < 1e-6


def test_with_fp32_beside_fp8_the_gradients_are_those_of_the_emulation(directory: Path) -> None:
    outcome = outcome_of(directory, "float32")
    loss, exact = gradients_of(directory, RECIPE)
    assert outcome.metrics["loss"] == pytest.approx(loss, rel=BOUND)
    computed = relative_errors(outcome.gradients, exact)
    assert max(computed.values()) <= BOUND, max(computed, key=computed.__getitem__)
    _, without = gradients_of(directory, None)
    assert min(relative_errors(without, exact).values()) > 0.1, "FP8 changes every gradient"


@pytest.mark.proof
def test_in_bf16_the_error_is_that_of_the_emulation(directory: Path) -> None:
    _, exact = gradients_of(directory, RECIPE)
    _, rounded = gradients_of(directory, RECIPE, torch.bfloat16)
    computed = relative_errors(outcome_of(directory, "bfloat16").gradients, exact)
    bound = 2 * max(relative_errors(rounded, exact).values())
    assert max(computed.values()) <= bound, max(computed, key=computed.__getitem__)

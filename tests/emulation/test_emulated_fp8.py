"""Gradients of a model whose matrix products are in FP8, on an emulated GPU: those of another emulation.

The reference (fp8_model.py) rounds the operands of every product as the recipe's definition says, in fp64;
without FP8 it is the model of transformers. An operand near the middle between two numbers of FP8 may round
to either side, and what one operand changes grows from layer to layer, up to the error of FP8 itself: the
reference in fp32 differs from itself in fp64 by that. So the reference takes the side of the emulated GPU's
operands, where they are as near to its exact values as its own, up to the precision beside FP8.
`pytest -rP` prints the errors; docs/howto/emulated_gpu.md has them.
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
from helpers.references.fp8_model import Operands, PackedModel
from helpers.suite.selected import selected
from helpers.workers.emulated_fp8 import FAULTS, Fp8Result
from helpers.workers.gradient_worker import Case
from torch import Tensor

from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.settings.parallel import Padding
from megatron_gvpo.settings.sections import FP8Config
from megatron_gvpo.verify.shrink import scatter

pytestmark = pytest.mark.skipif(not on_null_cuda.HAS_CUDA_BUILD, reason="a build of torch for CPUs")

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STEP = gvpo(ALL)
DEVICES = {"tensorwise": "h100", "blockwise": "h100", "mxfp8": "b200"}
BOUND = 1e-5
# The distance from the middle within which the error of the precision beside FP8 may decide, as a share of a
# block's largest value.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}


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


@pytest.fixture(scope="module")
def computed(request: pytest.FixtureRequest, directory: Path) -> dict[tuple[str, str, str], Fp8Result]:
    """{(recipe, dtype, fault): Fp8Result}; "nothing" is without a fault."""
    wanted = selected(request, "recipe", "dtype", "fault")
    rows = rows_of(directory)
    results = {}
    for device in dict.fromkeys(DEVICES[recipe] for recipe, *_ in wanted):
        runs = dict.fromkeys((recipe, dtype) for recipe, dtype, _ in wanted if DEVICES[recipe] == device)
        work = []
        for recipe, dtype in runs:
            case = Case("step", STEP.algorithm, rows, STEP.budget, model="model", dtype=dtype, fp8=recipe)
            work.append((case, [fault for *of, fault in wanted if of == [recipe, dtype]]))
        torch.save(work, directory / "work.pt")
        launch("helpers.workers.emulated_fp8:run", [1], str(directory), emulated=device)
        results |= torch.load(directory / "results.pt", weights_only=False)
    return results


@cache
def rows_of(directory: Path) -> Any:
    rows = make_rows(ROWS["ragged"])
    return moved(rows, reference.log_probs(reference.load(directory / "model"), rows, TEMPERATURE))


def gradients_of(
    directory: Path, operands: Operands | None, dtype: torch.dtype = torch.float64
) -> tuple[float, dict[str, Tensor]]:
    """The reference's loss and gradients of the step."""
    model = reference.load(directory / "model")
    weights = {name: p.detach().to(dtype).requires_grad_() for name, p in model.named_parameters()}
    rows = rows_of(directory)
    tokens = 1 if operands is None else FP8Config(recipe=operands.recipe).tokens
    batch = PackedBatch.pack(rows, Padding(1, tokens))
    packed = PackedModel(model.config, weights, operands)
    logits = packed.logits(batch.token_t, batch.lengths)[batch.response_r].double()
    logp_r = (logits / TEMPERATURE).log_softmax(-1).gather(1, batch.label_r[:, None])[:, 0]
    loss = STEP.loss(reference.sample_of(rows, list(logp_r.split(rows.length_n.tolist()))))
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return loss.item(), {name: g.double() for name, g in zip(weights, gradients, strict=True)}


@cache
def own_gradients(directory: Path, recipe: str | None) -> dict[str, Tensor]:
    """The reference's, on its own sides."""
    return gradients_of(directory, None if recipe is None else Operands(recipe))[1]


def largest(errors: dict[str, float]) -> float:
    return torch.tensor(list(errors.values())).max().item()  # NaN, where one is NaN


def exact_of(run: Fp8Result, directory: Path, recipe: str, dtype: str) -> tuple[float, dict[str, Tensor]]:
    """The reference's loss and gradients, on the sides that the run's operands took."""
    operands = Operands(recipe, run.operands, TOLERANCES[dtype])
    loss, exact = gradients_of(directory, operands)
    assert len(operands.quantized) == len(run.operands), "each product has a counterpart"
    return loss, exact


def test_without_fp8_the_reference_is_transformers(directory: Path) -> None:
    model, rows = reference.load(directory / "model"), rows_of(directory)
    loss = STEP.loss(reference.sample_of(rows, reference.log_probs(model, rows, TEMPERATURE)))
    loss.backward()
    packed_loss, packed = gradients_of(directory, None)
    assert packed_loss == pytest.approx(loss.item(), rel=1e-6), "cosines are in fp32"
    exact = {name: p.grad for name, p in model.named_parameters()}
    assert max(relative_errors(packed, exact).values()) < 1e-6


@pytest.mark.parametrize("recipe", DEVICES)
def test_in_fp32_the_reference_is_itself_on_the_same_sides(directory: Path, recipe: str) -> None:
    operands = Operands(recipe)
    _, rounded = gradients_of(directory, operands, torch.float32)
    own = own_gradients(directory, recipe)
    _, exact = gradients_of(directory, Operands(recipe, operands.quantized, TOLERANCES["float32"]))
    error = largest(relative_errors(rounded, exact))
    print(f"{recipe}: {error:.2g}, and {largest(relative_errors(rounded, own)):.2g} on its own sides")
    assert error <= BOUND


def test_one_operand_changes_gradients_by_more_than_the_bound(directory: Path) -> None:
    operands = Operands("tensorwise")
    _, exact = gradients_of(directory, operands)
    (x, weight), *others = operands.quantized
    x = x.clone()
    x[100, 3] *= 1.1  # the next number of FP8
    other = Operands("tensorwise", [(x, weight), *others], tolerance=1.0)
    _, changed = gradients_of(directory, other)
    assert (other.quantized[0][0] != operands.quantized[0][0]).sum() == 1
    error = largest(relative_errors(changed, exact))
    print(f"one operand: {error:.2g}")
    assert error > 100 * BOUND


def _cases(*dtypes: str, faults: bool = False) -> list[Any]:
    """`make test` has what an H100 computes in fp32 without a fault."""
    params = []
    for recipe, device in DEVICES.items():
        for dtype in dtypes:
            is_quick = (device, dtype, faults) == ("h100", "float32", False)
            for fault in FAULTS[recipe] if faults else ["nothing"]:
                name, marks = f"{recipe}, {dtype}: {fault}", () if is_quick else pytest.mark.proof
                params.append(pytest.param(recipe, dtype, fault, id=name, marks=marks))
    return params


def cases(*dtypes: str, faults: bool = False) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("recipe", "dtype", "fault"), _cases(*dtypes, faults=faults))


@cases("float32")
def test_with_fp32_beside_fp8_the_gradients_are_those_of_the_emulation(
    computed: dict[tuple[str, str, str], Fp8Result], directory: Path, recipe: str, dtype: str, fault: str
) -> None:
    run = computed[recipe, dtype, fault]
    loss, exact = exact_of(run, directory, recipe, dtype)
    assert run.result.loss == pytest.approx(loss, rel=BOUND)
    errors = relative_errors(run.result.gradients, exact)
    unquantized = own_gradients(directory, None)
    effects = relative_errors(unquantized, exact)
    own = own_gradients(directory, recipe)
    own_error = largest(relative_errors(run.result.gradients, own))
    print(f"{recipe}: {largest(errors):.2g}, and {own_error:.2g} on its own sides")
    assert largest(errors) <= BOUND, max(errors, key=errors.__getitem__)
    assert min(effects.values()) > 0.1, "FP8 changes every gradient"


@cases("bfloat16")
def test_in_bf16_the_error_is_that_of_the_emulation(
    computed: dict[tuple[str, str, str], Fp8Result], directory: Path, recipe: str, dtype: str, fault: str
) -> None:
    run = computed[recipe, dtype, fault]
    _, exact = exact_of(run, directory, recipe, dtype)
    errors = relative_errors(run.result.gradients, exact)
    rounded = Operands(recipe)
    _, in_bf16 = gradients_of(directory, rounded, torch.bfloat16)
    _, of_rounded = gradients_of(directory, Operands(recipe, rounded.quantized, TOLERANCES[dtype]))
    bound = 2 * largest(relative_errors(in_bf16, of_rounded))
    print(f"{recipe}: {largest(errors):.2g}, bound {bound:.2g}")
    assert largest(errors) <= bound, max(errors, key=errors.__getitem__)


@cases("float32", faults=True)
def test_a_fault_is_seen(
    computed: dict[tuple[str, str, str], Fp8Result], directory: Path, recipe: str, dtype: str, fault: str
) -> None:
    run = computed[recipe, dtype, fault]
    assert run.result.error is None
    assert run.result.reached, "nothing ran the code with the fault"
    _, exact = exact_of(run, directory, recipe, dtype)
    error = largest(relative_errors(run.result.gradients, exact))
    print(f"{recipe}, {fault}: {error:.2g}, {run.result.reached} calls")
    assert not error <= 100 * BOUND  # a gradient of NaN is found, too

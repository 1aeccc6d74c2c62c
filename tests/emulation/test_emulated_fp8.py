"""Gradients of a model whose matrix products are in FP8, on an emulated GPU: those of another emulation.

The reference (fp8_model.py) rounds the operands of every product as the recipe's definition says, in fp64;
without FP8 it is the model of transformers. An operand near the middle between two numbers of FP8 may round
to either side, and what one operand changes grows from layer to layer, up to the error of FP8 itself: the
reference in fp32 differs from itself in fp64 by that. So the reference takes the side of the emulated GPU's
operands, where they are as near to its exact values as its own, up to the precision beside FP8.
`pytest -rP` prints the errors; docs/howto/emulated_gpu.md has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from helpers import on_null_cuda
from helpers.cases.gradient_cases import ALL, TEMPERATURE, WHOLE, gvpo
from helpers.cases.gradient_rows import ROWS, make_rows, moved
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.references.bf16_errors import relative_errors, round_weights
from helpers.references.fp8_model import Operands, PackedModel
from helpers.suite.selected import selected
from helpers.workers.emulated_faults import Result
from helpers.workers.emulated_fp8 import FAULTS, Record, Run
from helpers.workers.gradient_worker import UPDATE, Case, Layout
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


Weights = dict[str, Tensor] | None  # None: the model's


@dataclass(frozen=True)
class Pack:
    """A micro-batch, and the operands of its products on each tensor-parallel rank."""

    batch: PackedBatch
    operands: list[Operands]


class Computed(NamedTuple):
    result: Result
    records: list[Record]  # of all ranks


@pytest.fixture(scope="module")
def computed(request: pytest.FixtureRequest, directory: Path) -> dict[Run, Computed]:
    wanted: list[Run] = selected(request, "run")
    results: dict[Run, Computed] = {}
    for device in dict.fromkeys(DEVICES[run.recipe] for run in wanted):
        runs = [run for run in wanted if DEVICES[run.recipe] == device]
        work = {run: case_of(run, directory) for run in runs}
        torch.save(work, directory / "work.pt")
        layouts = list(dict.fromkeys(run.layout for run in runs))
        ranks = [layout.ranks for layout in layouts]
        launch("helpers.workers.emulated_fp8:run", ranks, str(directory), timeout=1800, emulated=device)
        for layout in layouts:
            of_ranks = [loaded(directory / f"records-{layout}-{r}.pt") for r in range(layout.ranks)]
            for run, result in loaded(directory / f"results-{layout}.pt").items():
                results[run] = Computed(result, [records[run] for records in of_ranks])
    return results


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def case_of(run: Run, directory: Path) -> Case:
    rows = rows_of(directory)
    return Case(
        "step",
        STEP.algorithm,
        rows,
        run.budget,
        model="model",
        dtype=run.dtype,
        fp8=run.recipe,
        fp8_weights=run.weights,
    )


def updates_of(run: Run, records: list[Record]) -> list[list[Pack]]:
    """The micro-batches of all data-parallel ranks, by update."""
    count = 1 + run.is_second
    updates: list[list[Pack]] = [[] for _ in range(count)]
    data_ranks = sorted({record.data_rank for record in records})
    for data_rank in data_ranks:
        of_rank = [record for record in records if record.data_rank == data_rank]
        tensor_ranks = sorted({record.tensor_rank for record in of_rank})
        for i, batch in enumerate(of_rank[0].packs):
            operands = []
            for rank in tensor_ranks:
                stages = [record for record in of_rank if record.tensor_rank == rank]
                computed = in_order(stages, i, len(data_ranks))
                operands.append(Operands(run.recipe, computed, TOLERANCES[run.dtype]))
            updates[i * count // len(of_rank[0].packs)].append(Pack(batch, operands))
    return updates


def in_order(stages: list[Record], number: int, data_ranks: int) -> list[tuple[Tensor, Tensor]]:
    """The operands of a micro-batch: of all stages forward, then backward.

    Megatron takes the mean over data-parallel ranks: their gradients are that many times those of the loss.
    """
    assert len(stages) == 1 or len(stages[0].packs) == 1, "schedules mix the products of micro-batches"
    forward, backward = [], []
    for stage in sorted(stages, key=lambda record: record.stage):
        count = len(stage.operands) // len(stage.packs)
        operands = stage.operands[number * count : (number + 1) * count]
        forward += operands[: count // 3]  # a product has two in the backward
        backward = [(left / data_ranks, right) for left, right in operands[count // 3 :]] + backward
    return forward + backward


@cache
def rows_of(directory: Path) -> Any:
    rows = make_rows(ROWS["ragged"])
    rows = moved(rows, reference.log_probs(reference.load(directory / "model"), rows, TEMPERATURE))
    return rows.with_columns(place_n=torch.arange(len(rows)))


def own_packs(directory: Path, operands: Operands | None) -> list[Pack]:
    """All rows in one micro-batch."""
    tokens = 1 if operands is None else FP8Config(recipe=operands.recipe).tokens
    batch = PackedBatch.pack(rows_of(directory), Padding(1, tokens))
    return [Pack(batch, [] if operands is None else [operands])]


def gradients_of(
    directory: Path,
    packs: list[Pack],
    dtype: torch.dtype = torch.float64,
    weights: Weights = None,
) -> tuple[float, dict[str, Tensor]]:
    """The reference's loss and gradients of the step; `weights`: others than the model's."""
    model = reference.load(directory / "model")
    weights = dict(model.named_parameters()) if weights is None else weights
    weights = {name: weight.detach().to(dtype).requires_grad_() for name, weight in weights.items()}
    rows = rows_of(directory)
    logp: dict[int, Tensor] = {}
    for pack in packs:
        packed, batch = PackedModel(model.config, weights, pack.operands), pack.batch
        logits = packed.logits(batch.token_t, batch.lengths)[batch.response_r].double()
        logp_r = (logits / TEMPERATURE).log_softmax(-1).gather(1, batch.label_r[:, None])[:, 0]
        parts = logp_r.split(batch.rows.length_n.tolist())
        logp |= zip(batch.rows.place_n.tolist(), parts, strict=True)
    loss = STEP.loss(reference.sample_of(rows, [logp[i] for i in range(len(rows))]))
    gradients = torch.autograd.grad(loss, list(weights.values()))
    return loss.item(), {name: g.double() for name, g in zip(weights, gradients, strict=True)}


def largest(errors: dict[str, float]) -> float:
    return torch.tensor(list(errors.values())).max().item()  # NaN, where one is NaN


def exact_of(run: Run, records: list[Record], directory: Path) -> tuple[float, dict[str, Tensor], Weights]:
    """The reference's loss and gradients, on the sides that the run's operands took, and the weights."""
    *before, packs = updates_of(run, records)
    weights = None
    if before:
        _, gradients = gradients_of(directory, before[0])
        weights = stepped(dict(reference.load(directory / "model").named_parameters()), gradients)
        weights = {name: as_kept(name, weight, run) for name, weight in weights.items()}
    loss, exact = gradients_of(directory, packs, weights=weights)
    for operands in (each for pack in packs for each in pack.operands):
        assert operands.computed is not None
        assert len(operands.quantized) == len(operands.computed), "each product has a counterpart"
    return loss, exact, weights


def as_kept(name: str, weight: Tensor, run: Run) -> Tensor:
    """A weight of the optimizer's, in fp32, as the model has it beside FP8."""
    is_in_fp8 = run.weights and name.endswith("_proj.weight")  # rounded once, from fp32
    return weight if is_in_fp8 or run.dtype == "float32" else weight.bfloat16().double()


def stepped(weights: dict[str, Any], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights after PyTorch's AdamW with `UPDATE`."""
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    weights = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.grad = gradients[name] * min(1.0, UPDATE["clip_grad"] / norm)
    decayed = [weight for weight in weights.values() if weight.dim() > 1]
    others = [weight for weight in weights.values() if weight.dim() == 1]
    options = {key: UPDATE[key] for key in ("lr", "eps", "betas", "weight_decay")}
    torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], **options).step()
    return weights


def test_without_fp8_the_reference_is_transformers(directory: Path) -> None:
    model, rows = reference.load(directory / "model"), rows_of(directory)
    loss = STEP.loss(reference.sample_of(rows, reference.log_probs(model, rows, TEMPERATURE)))
    loss.backward()
    packed_loss, packed = gradients_of(directory, own_packs(directory, None))
    assert packed_loss == pytest.approx(loss.item(), rel=1e-6), "cosines are in fp32"
    exact = {name: p.grad for name, p in model.named_parameters()}
    assert max(relative_errors(packed, exact).values()) < 1e-6


@pytest.mark.parametrize("recipe", DEVICES)
def test_in_fp32_the_reference_is_itself_on_the_same_sides(directory: Path, recipe: str) -> None:
    operands = Operands(recipe)
    _, rounded = gradients_of(directory, own_packs(directory, operands), torch.float32)
    _, own = gradients_of(directory, own_packs(directory, Operands(recipe)))
    same_sides = Operands(recipe, operands.quantized, TOLERANCES["float32"])
    _, exact = gradients_of(directory, own_packs(directory, same_sides))
    error = largest(relative_errors(rounded, exact))
    print(f"{recipe}: {error:.2g}, and {largest(relative_errors(rounded, own)):.2g} on its own sides")
    assert error <= BOUND


def test_one_operand_changes_gradients_by_more_than_the_bound(directory: Path) -> None:
    operands = Operands("tensorwise")
    _, exact = gradients_of(directory, own_packs(directory, operands))
    (x, weight), *others = operands.quantized
    x = x.clone()
    x[100, 3] *= 1.1  # the next number of FP8
    other = Operands("tensorwise", [(x, weight), *others], tolerance=1.0)
    _, changed = gradients_of(directory, own_packs(directory, other))
    assert (other.quantized[0][0] != operands.quantized[0][0]).sum() == 1
    error = largest(relative_errors(changed, exact))
    print(f"one operand: {error:.2g}")
    assert error > 100 * BOUND


_SP = {"tp": 2, "sequence_parallel": True}
LAYOUTS = [  # with the budget of a micro-batch
    *((Layout(1), WHOLE), (Layout(2), WHOLE), (Layout(2, overlap=True), WHOLE)),
    *(
        (Layout(2, tp=2), ALL),
        (Layout(2, **_SP), WHOLE),
        (Layout(2, pp=2), ALL),
        (Layout(4, **_SP, pp=2), ALL),
    ),
]


# Megatron keeps weights in FP8 beside bf16 alone, and not those of mxfp8 (settings/sections.py).
AFTER_AN_UPDATE = {
    "float32": [Layout(1), Layout(2, **_SP, overlap=True)],
    "bfloat16": [Layout(1), Layout(2), Layout(2, overlap=True), Layout(2, **_SP)],
}


QUICK = [
    *(Run("tensorwise", "float32"), Run("blockwise", "float32")),
    Run("tensorwise", "bfloat16", weights=True, is_second=True),
]


def runs(dtype: str, faults: bool = False, layouts: bool = False) -> pytest.MarkDecorator:
    """`make test` has QUICK, `make proof` all."""
    params = []
    for recipe in DEVICES:
        each = [Run(recipe, dtype)]
        has_weights = dtype == "bfloat16"
        if faults:
            each = [Run(recipe, dtype, fault) for fault in FAULTS[recipe]]
        elif not (has_weights and recipe == "mxfp8"):
            each += [
                Run(recipe, dtype, layout=layout, weights=has_weights, is_second=True)
                for layout in AFTER_AN_UPDATE[dtype]
            ]
        if layouts:
            each += [Run(recipe, dtype, layout=layout, budget=budget) for layout, budget in LAYOUTS]
        for run in each:
            is_quick = run in QUICK
            params.append(pytest.param(run, id=str(run), marks=() if is_quick else pytest.mark.proof))
    return pytest.mark.parametrize("run", params)


@runs("float32", layouts=True)
def test_with_fp32_beside_fp8_the_gradients_are_those_of_the_emulation(
    computed: dict[Run, Computed], directory: Path, run: Run
) -> None:
    result, records = computed[run]
    assert result.error is None
    loss, exact, weights = exact_of(run, records, directory)
    errors = relative_errors(result.gradients, exact)
    _, without = gradients_of(directory, own_packs(directory, None), weights=weights)
    _, own = gradients_of(directory, own_packs(directory, Operands(run.recipe)), weights=weights)
    effects = relative_errors(without, exact)
    own_error = largest(relative_errors(result.gradients, own))
    print(
        f"{run}: {largest(errors):.2g}, and {own_error:.2g} on its own sides; "
        f"without FP8 {min(effects.values()):.2g} at least"
    )
    assert result.loss == pytest.approx(loss, rel=BOUND)
    assert largest(errors) <= BOUND, max(errors, key=errors.__getitem__)
    # After the update the loss is 300 times as large, and its gradients differ less by FP8.
    assert min(effects.values()) > (0.05 if run.is_second else 0.1), "FP8 changes every gradient"


@runs("bfloat16")
def test_in_bf16_the_error_is_that_of_the_emulation(
    computed: dict[Run, Computed], directory: Path, run: Run
) -> None:
    result, records = computed[run]
    assert result.error is None
    _, exact, _ = exact_of(run, records, directory)
    errors = relative_errors(result.gradients, exact)
    rounded = Operands(run.recipe)
    _, in_bf16 = gradients_of(directory, own_packs(directory, rounded), torch.bfloat16)
    same_sides = Operands(run.recipe, rounded.quantized, TOLERANCES[run.dtype])
    _, of_rounded = gradients_of(directory, own_packs(directory, same_sides))
    bound = 2 * largest(relative_errors(in_bf16, of_rounded))
    print(f"{run}: {largest(errors):.2g}, bound {bound:.2g}")
    assert largest(errors) <= bound, max(errors, key=errors.__getitem__)


@runs("float32", faults=True)
def test_a_fault_is_seen(computed: dict[Run, Computed], directory: Path, run: Run) -> None:
    result, records = computed[run]
    assert result.error is None
    assert result.reached, "nothing ran the code with the fault"
    _, exact, _ = exact_of(run, records, directory)
    error = largest(relative_errors(result.gradients, exact))
    print(f"{run}: {error:.2g}, {result.reached} calls")
    assert not error <= 100 * BOUND  # a gradient of NaN is found, too

"""Gradients of a model whose matrix products are in FP8, on an emulated GPU: those of another emulation.

The reference (fp8_model.py) rounds the operands of every product as the recipe's definition says, in fp64;
without FP8 it is the model of transformers. An operand near the middle between two numbers of FP8 may round
to either side, and what one operand changes grows from layer to layer, up to the error of FP8 itself: the
reference in fp32 differs from itself in fp64 by that. So the reference takes the side of the emulated GPU's
operands, where they are as near to its exact values as its own, up to the precision beside FP8.
`pytest -rP` prints the errors; docs/howto/emulated_gpu.md has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from helpers.cases.gradient_cases import ALL, TEMPERATURE, WHOLE, gvpo
from helpers.cases.gradient_rows import ROWS, make_rows, moved
from helpers.distributed import launch
from helpers.references import gradient_reference as reference
from helpers.references.bf16_errors import relative_errors, round_weights
from helpers.references.fp8_model import NoCounterpartError, Operands, PackedModel
from helpers.references.fp8_quantized import Quantized
from helpers.suite.selected import selected
from helpers.workers.emulated_faults import Result
from helpers.workers.emulated_fp8 import FAULTS, ON_EXPORT, Record, Run
from helpers.workers.gradient_worker import UPDATE, Case, Layout
from torch import Tensor

from megatron_gvpo.megatron.batch import PackedBatch
from megatron_gvpo.settings.parallel import Padding
from megatron_gvpo.settings.sections import FP8Config
from megatron_gvpo.verify.shrink import scatter

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


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has `model`, `deep/model` of four layers, and `experts/model`."""
    path = tmp_path_factory.mktemp("fp8")
    sizes = {**reference.COMMON, **SIZES, "head_dim": 128}
    configs = {
        path: transformers.Qwen3Config(**sizes),
        path / "deep": transformers.Qwen3Config(**{**sizes, "num_hidden_layers": 4}),
        path / "experts": transformers.Qwen3MoeConfig(**sizes, **EXPERTS),
    }
    for folder, config in configs.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        scatter(model)
        model.save_pretrained(folder / "model")
        round_weights(folder)
    return path


def home_of(run: Run, directory: Path) -> Path:
    """The directory with the run's `model`."""
    return (directory / run.model).parent


Weights = dict[str, Tensor] | None  # None: the model's


@dataclass(frozen=True)
class Pack:
    """A micro-batch, and the operands of its products on each context- and tensor-parallel rank.

    With ep, the micro-batches that data-parallel ranks compute together, and the experts that they chose.
    """

    batches: list[PackedBatch]
    operands: list[list[Operands]]
    routes: list[Tensor] | None = None


class Computed(NamedTuple):
    result: Result
    records: list[list[Record]]  # of all ranks, by update
    exported: dict[str, Tensor] | None  # the weights after a first update


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
            exports = loaded(directory / f"exports-{layout}.pt")
            for run, result in loaded(directory / f"results-{layout}.pt").items():
                records = [list(each) for each in zip(*(of[run] for of in of_ranks), strict=True)]
                results[run] = Computed(result, records, exports.get(run))
    return results


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def case_of(run: Run, directory: Path) -> Case:
    rows = rows_of(home_of(run, directory))
    return Case(
        "step",
        STEP.algorithm,
        rows,
        run.budget,
        model=run.model,
        dtype=run.dtype,
        fp8=run.recipe,
        fp8_weights=run.weights,
    )


def packs_of(run: Run, records: list[Record]) -> list[Pack]:
    """The micro-batches of all data-parallel ranks in an update.

    Megatron takes the mean over data- and context-parallel ranks: gradients are that many times those of the
    loss.
    """
    ranks = len({(record.data_rank, record.context_rank) for record in records})
    if run.layout.ep > 1:
        return packs_of_experts(run, records, ranks)
    packs = []
    for data_rank in sorted({record.data_rank for record in records}):
        of_rank = [record for record in records if record.data_rank == data_rank]
        computed: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}  # all stages' together
        for record in of_rank:
            computed.setdefault((record.context_rank, record.tensor_rank), []).extend(record.operands)
        for batch in of_rank[0].packs:
            operands = [
                [
                    Operands(run.recipe, computed[context, tensor], TOLERANCES[run.dtype], ranks)
                    for tensor in range(run.layout.tp)
                ]
                for context in range(run.layout.cp)
            ]
            packs.append(Pack([batch], operands))
    return packs


def packs_of_experts(run: Run, records: list[Record], ranks: int) -> list[Pack]:
    """Micro-batches of all data-parallel ranks together: an expert reads tokens of all of them."""
    together = [pair for record in records for pair in record.operands]
    operands = Operands(run.recipe, together, TOLERANCES[run.dtype], ranks)
    of_ranks = [record.packs for record in records if record.tensor_rank == 0]
    # With sp, the routers of a tensor-parallel rank see a part of the tokens; in fp32 none is near another.
    routes = None if run.dtype == "float32" else [route for record in records for route in record.routes]
    return [
        Pack(list(batches), [[operands] * run.layout.tp] * len(batches), routes)
        for batches in zip(*of_ranks, strict=True)
    ]


@cache
def rows_of(directory: Path) -> Any:
    rows = make_rows(ROWS["ragged"])
    rows = moved(rows, reference.log_probs(reference.load(directory / "model"), rows, TEMPERATURE))
    return rows.with_columns(place_n=torch.arange(len(rows)))


def weights_of(directory: Path) -> dict[str, Tensor]:
    """The model's, by their names in files, in fp64."""
    return reference.as_in_file(dict(reference.load(directory / "model").named_parameters()))


def own_packs(directory: Path, operands: Operands | None) -> list[Pack]:
    """All rows in one micro-batch."""
    tokens = 1 if operands is None else FP8Config(recipe=operands.recipe).tokens
    batch = PackedBatch.pack(rows_of(directory), Padding(1, tokens))
    return [Pack([batch], [] if operands is None else [[operands]])]


def gradients_of(
    directory: Path,
    packs: list[Pack],
    dtype: torch.dtype = torch.float64,
    weights: Weights = None,
) -> tuple[float, dict[str, Tensor]]:
    """The reference's loss and gradients of the step; `weights`: others than the model's."""
    weights = weights_of(directory) if weights is None else weights
    weights = {name: weight.detach().to(dtype).requires_grad_() for name, weight in weights.items()}
    config, rows = reference.load(directory / "model").config, rows_of(directory)
    logp: dict[int, Tensor] = {}
    for pack in packs:
        tolerance = TOLERANCES["bfloat16"]  # of routes, which there are beside bf16 alone
        packed = PackedModel(config, weights, pack.operands, pack.routes, tolerance)
        token_t = torch.cat([batch.token_t for batch in pack.batches])
        lengths = [length for batch in pack.batches for length in batch.lengths]
        sizes = [len(batch.token_t) for batch in pack.batches]
        together = packed.logits(token_t, lengths, sizes if len(sizes) > 1 else ())
        for batch, logits in zip(pack.batches, together.split(sizes), strict=True):
            logits = logits[batch.response_r].double()
            logp_r = (logits / TEMPERATURE).log_softmax(-1).gather(1, batch.label_r[:, None])[:, 0]
            parts = logp_r.split(batch.rows.length_n.tolist())
            logp |= zip(batch.rows.place_n.tolist(), parts, strict=True)
    loss = STEP.loss(reference.sample_of(rows, [logp[i] for i in range(len(rows))]))
    gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    return loss.item(), {name: g.double() for name, g in zip(weights, gradients, strict=True)}


def norm_of(gradients: dict[str, Tensor]) -> float:
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()


def largest(errors: dict[str, float]) -> float:
    return torch.tensor(list(errors.values())).max().item()  # NaN, where one is NaN


def exact_of(
    run: Run, records: list[list[Record]], directory: Path
) -> tuple[float, dict[str, Tensor], Weights]:
    """The reference's loss and gradients, on the sides that the run's operands took, and the weights."""
    *before, last = records
    weights = None
    if before:
        weights = updated_weights(run, before[0], directory)
        weights = {name: as_kept(name, weight, run) for name, weight in weights.items()}
    packs = packs_of(run, last)
    loss, exact = gradients_of(home_of(run, directory), packs, weights=weights)
    for operands in (each for pack in packs for of_part in pack.operands for each in of_part):
        assert not operands.computed, "each product has a counterpart"
    return loss, exact, weights


def updated_weights(run: Run, records: list[Record], directory: Path) -> dict[str, Tensor]:
    """The optimizer's, after an update."""
    home = home_of(run, directory)
    _, gradients = gradients_of(home, packs_of(run, records))
    return stepped(weights_of(home), gradients)


def as_kept(name: str, weight: Tensor, run: Run) -> Tensor:
    """A weight of the optimizer's, in fp32, as the model has it beside FP8."""
    is_in_fp8 = run.weights and name.endswith("_proj.weight")  # rounded once, from fp32
    return weight if is_in_fp8 or run.dtype == "float32" else weight.bfloat16().double()


def stepped(weights: dict[str, Any], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights after PyTorch's AdamW with `UPDATE`."""
    norm = norm_of(gradients)
    weights = {name: weight.detach().double().requires_grad_() for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.grad = gradients[name] * min(1.0, UPDATE["clip_grad"] / norm)
    decayed = [weight for weight in weights.values() if weight.dim() > 1]
    others = [weight for weight in weights.values() if weight.dim() == 1]
    options = {key: UPDATE[key] for key in ("lr", "eps", "betas", "weight_decay")}
    torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], **options).step()
    return weights


@pytest.mark.parametrize("folder", ["", "experts"])
def test_without_fp8_the_reference_is_transformers(directory: Path, folder: str) -> None:
    directory = directory / folder
    model, rows = reference.load(directory / "model"), rows_of(directory)
    loss = STEP.loss(reference.sample_of(rows, reference.log_probs(model, rows, TEMPERATURE)))
    loss.backward()
    packed_loss, packed = gradients_of(directory, own_packs(directory, None))
    assert packed_loss == pytest.approx(loss.item(), rel=1e-6), "cosines are in fp32"
    exact = reference.as_in_file({name: p.grad for name, p in model.named_parameters()})
    assert max(relative_errors(packed, exact).values()) < 1e-6


@pytest.mark.parametrize("recipe", DEVICES)
def test_in_fp32_the_reference_is_itself_on_the_same_sides(directory: Path, recipe: str) -> None:
    operands = Operands(recipe)
    _, rounded = gradients_of(directory, own_packs(directory, operands), torch.float32)
    _, own = gradients_of(directory, own_packs(directory, Operands(recipe)))
    same_sides = Operands(recipe, list(operands.quantized), TOLERANCES["float32"])
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
        (Layout(2, pp=2), WHOLE),
        (Layout(2, pp=2, vpp=2), WHOLE),
        (Layout(4, **_SP, pp=2), ALL),
    ),
]
# Attention in fp32 has no context parallelism.
CONTEXT = [Layout(2, cp=2), Layout(4, cp=2, **_SP)]


# Megatron keeps weights in FP8 beside bf16 alone, and not those of mxfp8 (settings/sections.py).
AFTER_AN_UPDATE = {
    "float32": [Layout(1), Layout(2, **_SP, overlap=True)],
    "bfloat16": [Layout(1), Layout(2), Layout(2, overlap=True), Layout(2, **_SP)],
}
RESUMED = [Layout(1), Layout(2, **_SP)]
# A mixture of experts: a rank has half of the experts, for the tokens of both.
WITH_EXPERTS = [Layout(2, ep=2), Layout(2, **_SP, ep=2)]


QUICK = [
    *(Run("tensorwise", "float32"), Run("blockwise", "float32")),
    Run("tensorwise", "bfloat16", weights=True, is_second=True, is_resumed=True),
    Run("tensorwise", "float32", layout=WITH_EXPERTS[0]),
]


def after_an_update(recipe: str, dtype: str) -> list[Run]:
    weights = dtype == "bfloat16"
    if weights and recipe == "mxfp8":
        return []
    run = Run(recipe, dtype, weights=weights, is_second=True)
    resumed = [run._replace(layout=layout, is_resumed=True) for layout in [*RESUMED, WITH_EXPERTS[0]]]
    return [*(run._replace(layout=layout) for layout in AFTER_AN_UPDATE[dtype]), *resumed]


def every_run(dtype: str) -> pytest.MarkDecorator:
    runs: list[Run] = []
    for recipe in DEVICES:
        runs += [Run(recipe, dtype), *after_an_update(recipe, dtype)]
        if dtype == "float32":
            runs += [Run(recipe, dtype, layout=layout, budget=budget) for layout, budget in LAYOUTS]
            runs += [Run(recipe, dtype, layout=layout) for layout in WITH_EXPERTS]
            runs += [Run(recipe, dtype, layout=WITH_EXPERTS[0], budget=WHOLE)]
        else:
            runs += [Run(recipe, dtype, layout=layout) for layout in CONTEXT]
    return of_runs(runs)


def of_runs(runs: list[Run]) -> pytest.MarkDecorator:
    """`make test` has QUICK, `make proof` all."""
    params = [pytest.param(run, id=str(run), marks=() if run in QUICK else pytest.mark.proof) for run in runs]
    return pytest.mark.parametrize("run", params)


@every_run("float32")
def test_with_fp32_beside_fp8_the_gradients_are_those_of_the_emulation(
    computed: dict[Run, Computed], directory: Path, run: Run
) -> None:
    result, records, _ = computed[run]
    assert result.error is None
    loss, exact, weights = exact_of(run, records, directory)
    errors, norm = relative_errors(result.gradients, exact), norm_of(exact)
    home = home_of(run, directory)
    _, without = gradients_of(home, own_packs(home, None), weights=weights)
    _, own = gradients_of(home, own_packs(home, Operands(run.recipe)), weights=weights)
    effects = relative_errors(without, exact)
    own_error = largest(relative_errors(result.gradients, own))
    print(
        f"{run}: {largest(errors):.2g}, of the norm {abs(result.norm / norm - 1):.2g}, "
        f"and {own_error:.2g} on its own sides; "
        f"without FP8 {min(effects.values()):.2g} at least"
    )
    assert result.loss == pytest.approx(loss, rel=BOUND)
    assert largest(errors) <= BOUND, max(errors, key=errors.__getitem__)
    assert result.norm == pytest.approx(norm, rel=BOUND)
    # After the update the loss is 300 times as large, and its gradients differ less by FP8.
    assert min(effects.values()) > (0.05 if run.is_second else 0.1), "FP8 changes every gradient"


@every_run("bfloat16")
def test_in_bf16_the_error_is_that_of_the_emulation(
    computed: dict[Run, Computed], directory: Path, run: Run
) -> None:
    result, records, _ = computed[run]
    assert result.error is None
    _, exact, _ = exact_of(run, records, directory)
    errors, bound = relative_errors(result.gradients, exact), bf16_bound(run, directory)
    of_norm = abs(result.norm / norm_of(exact) - 1)
    print(f"{run}: {largest(errors):.2g}, of the norm {of_norm:.2g}, bound {bound:.2g}")
    assert largest(errors) <= bound, max(errors, key=errors.__getitem__)
    assert of_norm <= bound


def bf16_bound(run: Run, directory: Path) -> float:
    """Twice the error of the emulation in bf16 from itself in fp64."""
    directory = directory / "experts" if run.layout.ep > 1 else directory
    rounded = Operands(run.recipe)
    _, in_bf16 = gradients_of(directory, own_packs(directory, rounded), torch.bfloat16)
    same_sides = Operands(run.recipe, list(rounded.quantized), TOLERANCES[run.dtype])
    _, of_rounded = gradients_of(directory, own_packs(directory, same_sides))
    return 2 * largest(relative_errors(in_bf16, of_rounded))


EXPORTED = [run for dtype in TOLERANCES for recipe in DEVICES for run in after_an_update(recipe, dtype)]


@of_runs(EXPORTED)
def test_an_update_is_exported(computed: dict[Run, Computed], directory: Path, run: Run) -> None:
    """With an error of at most that of its rounding, and half of it for what differs in the update."""
    _, records, exported = computed[run]
    error = export_error(run, records, exported, directory)
    print(f"{run}: {error:.2g} of the rounding")
    assert error <= 1.5


def export_error(
    run: Run, records: list[list[Record]], exported: dict[str, Tensor] | None, directory: Path
) -> float:
    """The largest error of a weight after an update, as a part of that by rounding it."""
    weights = updated_weights(run, records[0], directory)
    assert exported is not None and exported.keys() == weights.keys()
    errors = relative_errors({name: tensor.double() for name, tensor in exported.items()}, weights)
    return largest({name: errors[name] / rounding_of(name, weight, run) for name, weight in weights.items()})


def rounding_of(name: str, weight: Tensor, run: Run) -> float:
    """The relative error of a weight by rounding it as the run does, or what an update's error may add."""
    if run.weights and name.endswith("_proj.weight"):
        rounded = Quantized(run.recipe, is_weight=True).along_rows(weight)
    else:
        rounded = as_kept(name, weight, run)
    return max(BOUND, relative_errors({name: rounded}, {name: weight})[name])


FAULTY = [
    *(Run(recipe, "float32", fault) for recipe in DEVICES for fault in FAULTS[recipe]),
    Run("tensorwise", "float32", "columns of another token", Layout(2, pp=2, vpp=2), WHOLE),
    Run("tensorwise", "bfloat16", "columns of another token", Layout(2, cp=2)),
    Run("tensorwise", "bfloat16", "weights as they were read", weights=True, is_second=True, is_resumed=True),
    *(
        Run("tensorwise", "float32", "one scale for all experts", WITH_EXPERTS[0]),
        Run("tensorwise", "float32", "a norm of one rank", WITH_EXPERTS[0]),
        Run("tensorwise", "float32", "names of other experts", WITH_EXPERTS[0], is_second=True),
        Run(
            *("tensorwise", "float32", "experts of the other rank", WITH_EXPERTS[0]),
            is_second=True,
            is_resumed=True,
        ),
    ),
]


@of_runs(FAULTY)
def test_a_fault_is_seen(computed: dict[Run, Computed], directory: Path, run: Run) -> None:
    result, records, exported = computed[run]
    assert result.error is None
    assert result.reached, "nothing ran the code with the fault"
    try:
        _, exact, _ = exact_of(run, records, directory)
        error, norm = largest(relative_errors(result.gradients, exact)), norm_of(exact)
        of_norm = abs(result.norm - norm) / norm
    except NoCounterpartError:
        error = of_norm = math.inf
    print(f"{run}: {error:.2g}, of the norm {of_norm:.2g}, {result.reached} calls")
    if exported is not None:
        of_export = export_error(run, records, exported, directory)
        print(f"{run}: exported, {of_export:.2g} of the rounding")
        assert not of_export <= 1.5
    if run.fault not in ON_EXPORT:
        bound = 100 * BOUND if run.dtype == "float32" else bf16_bound(run, directory)
        assert not max(error, of_norm) <= bound  # a gradient of NaN is found, too

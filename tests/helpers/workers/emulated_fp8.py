"""Rank function of test_emulated_fp8.py: gradients in FP8, what the products read, and deliberate faults."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.cases.gradient_cases import ALL
from helpers.distributed import forget_layout, run_number
from helpers.workers.emulated_faults import NO_FAULT, Fault, Faults, Result, _calls, changed, updated
from helpers.workers.gradient_worker import Case, Layout, config_of
from megatron_gvpo.megatron.batch import PackedBatch

Operands = list[tuple[Tensor, Tensor]]


class Run(NamedTuple):
    """An update in FP8 in a layout, in micro-batches of `budget` tokens, and perhaps with a fault.

    `weights`: the weights are kept in FP8. `is_second`: an update on the same rows has changed the weights
    before; `is_resumed`: the run was also resumed from a checkpoint after that.
    """

    recipe: str
    dtype: str
    fault: str = "nothing"
    layout: Layout = Layout(1)
    budget: int = ALL
    weights: bool = False
    is_second: bool = False
    is_resumed: bool = False

    def __str__(self) -> str:
        parts = [self.recipe, self.dtype, str(self.layout)]
        parts += ["micro-batches"] * (self.budget != ALL) + ["weights"] * self.weights
        parts += ["after an update"] * self.is_second + ["resumed"] * self.is_resumed
        return f"{', '.join(parts)}: {self.fault}"

    @property
    def model(self) -> str:
        """The directory of the run's model, with a layer for each stage; with ep, a mixture of experts."""
        if self.layout.ep > 1:
            return "experts/model"
        return "deep/model" if self.layout.vpp > 1 else "model"


@dataclass(frozen=True)
class Record:
    """A rank's micro-batches in an update, its FP8 products' operands, and what its routers chose."""

    tensor_rank: int
    context_rank: int
    data_rank: int
    packs: list[PackedBatch]
    operands: Operands
    routes: list[Tensor]  # of each router and micro-batch: True for a token's experts


@contextlib.contextmanager
def packed() -> Iterator[list[PackedBatch]]:
    """Context that yields the micro-batches that are packed in it."""
    packs: list[PackedBatch] = []
    pack = PackedBatch.pack

    def call(*args: Any, **options: Any) -> PackedBatch:
        packs.append(pack(*args, **options))
        return packs[-1]

    with mock.patch.object(PackedBatch, "pack", call):
        yield packs


@contextlib.contextmanager
def recorded() -> Iterator[Operands]:
    """Context that yields the operands of products in it, dequantized: [rows, columns] in fp32."""
    from megatron_gvpo.emulation.transformer_engine import gemm
    from megatron_gvpo.emulation.transformer_engine.quantization import operand
    from megatron_gvpo.emulation.transformer_engine.references import is_plain

    operands: Operands = []
    product = gemm.product

    def call(a: Any, trans_a: bool, b: Any, trans_b: bool) -> Tensor:
        pair = () if is_plain(a) else (operand(b, not trans_b).clone(), operand(a, trans_a).clone())
        if pair and all(of_pair.numel() for of_pair in pair):  # an expert may have no tokens
            operands.append(pair)
        return product(a, trans_a, b, trans_b)

    with mock.patch.object(gemm, "product", call):
        yield operands


@contextlib.contextmanager
def routed() -> Iterator[list[Tensor]]:
    """Context that yields the choices of all routers in it."""
    from megatron.core.transformer.moe.router import TopKRouter

    routes: list[Tensor] = []
    routing = TopKRouter.routing

    def call(self: Any, *args: Any, **options: Any) -> Any:
        weights, is_chosen = routing(self, *args, **options)
        routes.append(is_chosen.bool().cpu())
        return weights, is_chosen

    with mock.patch.object(TopKRouter, "routing", call):
        yield routes


def _other_quantizer(change: Callable[[Any], Any]) -> contextlib.AbstractContextManager[None]:
    """Context in which tensors are quantized by a changed copy of their quantizer."""

    def copied(args: list[Any], options: dict[str, Any]) -> None:
        quantizer = args[1].copy()
        if change(quantizer):
            args[1] = quantizer

    return changed("quantize", copied)


def _other_kind_of_scales(quantizer: Any) -> bool:
    quantizer.force_pow_2_scales = not quantizer.force_pow_2_scales
    return True


def _gradients_in_e4m3(quantizer: Any) -> bool:
    import transformer_engine_torch as extension

    is_of_gradient = quantizer.dtype == extension.DType.kFloat8E5M2
    quantizer.dtype = extension.DType.kFloat8E4M3
    return is_of_gradient


def _in_e5m2(quantizer: Any) -> bool:
    import transformer_engine_torch as extension

    quantizer.dtype = extension.DType.kFloat8E5M2
    return True


@contextlib.contextmanager
def _around_writes(change: Callable[..., None]) -> Iterator[None]:
    """Context in which `change` gets the function that quantizes, the quantized tensor, and the rest."""
    from megatron_gvpo.emulation.transformer_engine import quantization

    with contextlib.ExitStack() as stack:
        for name in ("_write_tensorwise", "_write_blockwise", "_write_mxfp8"):
            call = functools.partial(change, getattr(quantization, name))
            stack.enter_context(mock.patch.object(quantization, name, call))
        yield


def _other_data(
    change: Callable[[Any], None], only: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Context in which tensors, or the one with number `only`, are changed after they were quantized."""
    numbers = itertools.count(1)

    def call(write: Callable[..., None], out: Any, *args: Any) -> None:
        write(out, *args)
        if only in (None, next(numbers)):
            _calls.append("write")
            change(out)

    return _around_writes(call)


def _double_scales(out: Any) -> None:
    from megatron_gvpo.rehearsal.nullcuda.aliases import alias

    for name in ("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv"):
        if (scale := getattr(out, name, None)) is not None:
            values = alias(scale)
            values.add_(1) if values.dtype == torch.uint8 else values.mul_(2)


def _turn_columns(out: Any) -> None:
    from megatron_gvpo.rehearsal.nullcuda.aliases import alias

    data = getattr(out, "_transpose", getattr(out, "_columnwise_data", None))
    if data is not None:
        values = alias(data)
        values.copy_(values.roll(1, 0))


@contextlib.contextmanager
def _stale_amax() -> Iterator[None]:
    """The scale of a tensor is that of the previous tensor of the same shape: of the layer before."""
    from megatron_gvpo.emulation.transformer_engine import fp8

    last: dict[Any, Tensor] = {}
    shape: tuple[Any, ...] = ()

    def call(write: Callable[..., None], out: Any, values: Tensor, *args: Any) -> None:
        nonlocal shape
        shape = (str(out._fp8_dtype), *values.shape)
        write(out, values, *args)

    def stale(function: Callable[..., Tensor], amax: Tensor, *args: Any) -> Tensor:
        key = (*shape, *amax.shape)
        before, last[key] = last.get(key, amax), amax.clone()
        _calls.append("amax")
        return function(before, *args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_around_writes(call))
        for name in ("scale_of", "e8m0_of"):
            of_stale = functools.partial(stale, getattr(fp8, name))
            stack.enter_context(mock.patch.object(fp8, name, of_stale))
        yield


_EVERYWHERE: Faults = {
    "a scale off by 2": lambda: _other_data(_double_scales, only=3),
    "columns of another token": lambda: _other_data(_turn_columns),
    "a stale amax": _stale_amax,
}
FAULTS: dict[str, Faults] = {
    "tensorwise": {
        **_EVERYWHERE,
        "gradients in e4m3": lambda: _other_quantizer(_gradients_in_e4m3),
        "scales that are powers of two": lambda: _other_quantizer(_other_kind_of_scales),
    },
    "blockwise": {
        **_EVERYWHERE,
        "operands in e5m2": lambda: _other_quantizer(_in_e5m2),
        "scales that are not powers of two": lambda: _other_quantizer(_other_kind_of_scales),
    },
    "mxfp8": {**_EVERYWHERE, "operands in e5m2": lambda: _other_quantizer(_in_e5m2)},
}


@contextlib.contextmanager
def _weights_as_they_were_read() -> Iterator[None]:
    """After a load, weights in FP8 are not quantized again from the masters."""
    from megatron_gvpo.megatron.optimizer import Optimizer

    with mock.patch.object(Optimizer, "quantize_weights", lambda _: _calls.append("quantize_weights")):
        yield


@contextlib.contextmanager
def _experts_of_the_other_rank() -> Iterator[None]:
    """A rank loads the experts that another one has saved."""
    from megatron.core.extensions import transformer_engine

    def other(group: dist.ProcessGroup) -> int:
        _calls.append("get_pg_rank")
        return group.size() - 1 - group.rank()

    with mock.patch.object(transformer_engine, "get_pg_rank", other):
        yield


@contextlib.contextmanager
def _names_of_other_experts() -> Iterator[None]:
    """An export gives the experts of a rank the numbers of another one's."""
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    gather = MegatronParamMapping.gather_from_ep_ranks

    def call(*args: Any, **options: Any) -> dict[str, Tensor]:
        gathered = gather(*args, **options)
        _calls.append("gather_from_ep_ranks")
        return dict(zip(gathered, reversed(list(gathered.values())), strict=True))

    with mock.patch.object(MegatronParamMapping, "gather_from_ep_ranks", call):
        yield


@contextlib.contextmanager
def _norm_of_one_rank() -> Iterator[None]:
    """The norm that clips has the gradients of the first rank only."""
    from megatron.core.optimizer import optimizer

    norm = optimizer.get_grad_norm_fp32

    def of_first(gradients: Any, *args: Any, **options: Any) -> Any:
        _calls.append("get_grad_norm_fp32")
        return norm([] if dist.get_rank() else gradients, *args, **options)

    with mock.patch.object(optimizer, "get_grad_norm_fp32", of_first):
        yield


@contextlib.contextmanager
def _one_scale_for_all_experts() -> Iterator[None]:
    """The tokens of all experts of a rank are quantized together."""
    import transformer_engine_torch as extension

    from megatron_gvpo.emulation.transformer_engine import fp8
    from megatron_gvpo.rehearsal.nullcuda.aliases import alias

    largest: list[Tensor] = []  # filled while the experts' tokens are quantized
    split, scale_of = extension.split_quantize, fp8.scale_of

    def together(amax: Tensor, *args: Any) -> Tensor:
        if not largest:
            return scale_of(amax, *args)
        _calls.append("scale_of")
        return scale_of(torch.full_like(amax, largest[0].item()), *args)

    def call(tensor: Tensor, *args: Any, **options: Any) -> Any:
        largest.append(alias(tensor).float().abs().amax())
        result = split(tensor, *args, **options)
        largest.clear()
        return result

    with mock.patch.object(extension, "split_quantize", call), mock.patch.object(fp8, "scale_of", together):
        yield


OF_EXPERTS: Faults = {
    "one scale for all experts": _one_scale_for_all_experts,
    "a norm of one rank": _norm_of_one_rank,
}
ON_RESUME: Faults = {
    "weights as they were read": _weights_as_they_were_read,
    "experts of the other rank": _experts_of_the_other_rank,
}
ON_EXPORT: Faults = {"names of other experts": _names_of_other_experts}


def run(directory: str) -> None:
    """Write results-LAYOUT.pt, {Run: Result}, exports-LAYOUT.pt, {Run: the weights after its first update},
    and a rank's records-LAYOUT-RANK.pt, {Run: its updates' Records}. work.pt: {Run: Case}.
    """
    from megatron_gvpo.megatron.policy import Policy

    folder = Path(directory)
    work: dict[Run, Case] = torch.load(folder / "work.pt", weights_only=False)
    layout = list(dict.fromkeys(run.layout for run in work))[run_number()]
    results: dict[Run, Result] = {}
    records: dict[Run, list[Record]] = {}
    exports: dict[Run, dict[str, Tensor]] = {}
    runs = [run for run in work if run.layout == layout]
    for _, of_model in itertools.groupby(
        runs, key=lambda run: run if run.is_second else run._replace(fault="")
    ):
        policy = None
        for run in of_model:
            print(run, flush=True)
            config = config_of(work[run], layout, folder)
            policy = policy or Policy.of(config)
            records[run] = []
            faults = {"nothing": NO_FAULT, **FAULTS[run.recipe], **OF_EXPERTS, **ON_RESUME, **ON_EXPORT}
            fault = faults[run.fault]
            if run.is_second:
                with _record(records[run]):
                    policy.update(work[run].rows, at_step_start=work[run].at_step_start)
            reached = 0
            if run.is_resumed:
                policy, reached = _resumed(policy, config, folder, fault)
                fault = NO_FAULT
            if run.is_second:
                exports[run], reached_there = _exported(policy, ON_EXPORT.get(run.fault, NO_FAULT))
                reached += reached_there
                fault = NO_FAULT if run.fault in ON_EXPORT else fault
            with _record(records[run]):
                result = updated(fault, policy, work[run], config)
            results[run] = replace(result, reached=result.reached + reached)
        forget_layout()
    torch.save(records, folder / f"records-{layout}-{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        torch.save(results, folder / f"results-{layout}.pt")
        torch.save(exports, folder / f"exports-{layout}.pt")


def _exported(policy: Any, fault: Fault) -> tuple[dict[str, Tensor], int]:
    """Return the weights, read with a fault, and the calls of the code with the fault."""
    _calls.clear()
    with fault():
        exported = {name: tensor.cpu().clone() for name, tensor in policy.weights()}
    return exported, len(_calls)


@contextlib.contextmanager
def _record(records: list[Record]) -> Iterator[None]:
    """Context that appends the record of the update in it."""
    from megatron.core import parallel_state

    with recorded() as operands, packed() as packs, routed() as routes:
        yield
    ranks = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    records.append(Record(*ranks, packs, operands, routes))


def _resumed(policy: Any, config: Any, folder: Path, fault: Fault) -> tuple[Any, int]:
    """Return another policy, loaded with a fault from a checkpoint of this one.

    The calls of the code with the fault are returned with it.
    """
    from megatron_gvpo.megatron.checkpoint.directory import complete_checkpoints
    from megatron_gvpo.megatron.checkpoint.load import load_policy
    from megatron_gvpo.megatron.checkpoint.save import save_policy

    checkpoints = folder / "checkpoints"
    save_policy(checkpoints, 1, policy, {}, keep=1)
    forget_layout()
    resumed = policy.of(config)
    _calls.clear()
    with fault():
        load_policy(complete_checkpoints(checkpoints)[-1], resumed)
    return resumed, len(_calls)

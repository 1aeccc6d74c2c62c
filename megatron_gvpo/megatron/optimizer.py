"""Megatron's distributed AdamW, or Muon and AdamW, with a schedule; a non-finite gradient skips the update.

With `optimizer.offload_fraction`, the master weights and moments of that share of every rank's elements are
in host memory. Megatron's HybridDeviceOptimizer then copies gradients to the host, updates on the CPU and
copies weights back, parameter by parameter, so that copies and updates overlap.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_gvpo.core.collectives import all_ranks_agree
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.megatron import muon
from megatron_gvpo.megatron.model.model import Model
from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.settings.sections import ModelConfig, OptimizerConfig


@dataclass(frozen=True)
class Update:
    """The result of one optimizer update; `grad_norm` is the norm before clipping."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True)
class AdamStep:
    """The settings of one update, for a caller who has a schedule of its own."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float  # 0 does not clip


def _schedule(optimizer: Any, options: OptimizerConfig, updates: int) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.warmup_steps,
        # One more than the updates, so that the last one still has a learning rate. A run that ends in its
        # warm-up has no decay, and megatron-core wants one that ends later.
        lr_decay_steps=max(updates, options.warmup_steps) + 1,
        lr_decay_style=options.decay,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=updates,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def learning_rate(options: OptimizerConfig, updates: int, number: int) -> float:
    """Return the learning rate of update `number`, from 1, in a run of `updates` updates."""
    group: dict[str, Any] = {}
    _schedule(SimpleNamespace(param_groups=[group]), options, updates).step(number)
    return float(group["lr"])


class Optimizer:
    """Use it as: `zero_grad`, accumulate gradients in the model's buffers, `apply`."""

    def __init__(self, model: Model, options: OptimizerConfig, precision: ModelConfig, updates: int) -> None:
        """`updates`: number of updates in the whole run, over which the learning rate decays."""
        self._chunks = model.chunks
        self.megatron: Any = _megatron_optimizer(model, options, precision)
        self._check_offload(options, precision.dtype == "bfloat16")
        self._fuse_on_cpu()
        self._allocate_states()
        self.scheduler = _schedule(self.megatron, options, updates)

    def _inner(self) -> Iterator[tuple[torch.optim.Optimizer, bool]]:
        """Yield (inner optimizer, True if its states are in host memory)."""
        for optimizer in (o.optimizer for o in self.megatron.chained_optimizers):
            if isinstance(optimizer, HybridDeviceOptimizer):
                yield from ((part, part is not optimizer.gpu_optimizer) for part in optimizer.sub_optimizers)
            elif isinstance(optimizer, muon.MuonWithAdam):
                yield from ((part, False) for part in optimizer.parts)
            elif optimizer is not None:  # a rank that trains no weight has no optimizer
                yield optimizer, False

    def _hybrids(self) -> list[Any]:
        inner = [o.optimizer for o in self.megatron.chained_optimizers]
        return [optimizer for optimizer in inner if isinstance(optimizer, HybridDeviceOptimizer)]

    def _check_offload(self, options: OptimizerConfig, bf16: bool) -> None:
        """Refuse fp32 weights on the device beside bf16 ones: HybridDeviceOptimizer 0.19.2 skips them."""
        for hybrid in self._hybrids() if bf16 else ():
            stay = [p for group in hybrid.gpu_param_groups for p in group["params"]]
            if any(p not in hybrid.fp32_param_to_orig_param for p in stay):
                raise ConfigError(
                    f"optimizer.offload_fraction={options.offload_fraction}: this model has float32 weights "
                    "beside bfloat16 ones, and Megatron updates such a mix on the host only: use 1.0 or 0"
                )

    def _fuse_on_cpu(self) -> None:
        """Make PyTorch's AdamW on a CPU update a tensor in one pass: a quarter of the usual time."""
        for inner, _ in self._inner():
            for group in inner.param_groups if _counts_by_parameter(inner) else ():
                group["fused"] = all(parameter.device.type == "cpu" for parameter in group["params"])

    def tensors(self) -> Iterator[Tensor]:
        """Yield the master weights and moments on the device; in fp32 the masters are the model's weights."""
        for inner, on_host in self._inner():
            if not on_host:
                yield from _states_of(inner)

    def host_tensors(self) -> Iterator[Tensor]:
        """Yield the master weights and moments in host memory."""
        for inner, on_host in self._inner():
            if on_host:
                yield from _states_of(inner)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for masters, moments, and the copies of gradients that an update makes."""
        parameters = [p for i, host in self._inner() if host for g in i.param_groups for p in g["params"]]
        return sum(t.nbytes for t in self.host_tensors()) + sum(p.nbytes for p in parameters)

    def _allocate_states(self) -> None:
        """Create the moments now, not at the first step: checkpoints and the measured memory need them.

        Adam's are as Transformer Engine's FusedAdam (`initialize_state`, 2.20.2) and PyTorch's make them.
        """
        for inner, _ in self._inner():
            for parameter in (p for group in inner.param_groups for p in group["params"]):
                names = ("momentum_buffer",) if isinstance(inner, muon.Muon) else ("exp_avg", "exp_avg_sq")
                moments = {name: torch.zeros_like(parameter) for name in names}
                step = {"step": torch.tensor(0.0)} if _counts_by_parameter(inner) else {}
                inner.state[parameter] = step | moments
        for hybrid in self._hybrids():
            hybrid._sync_sub_optimizers_state_to_hdo()

    @property
    def steps(self) -> int:
        """Number of updates that Adam has taken; its bias corrections depend on it."""
        counts = [0.0]
        for inner, _ in self._inner():
            counts += [float(group.get("step", 0)) for group in inner.param_groups]
            counts += [float(state.get("step", 0)) for state in inner.state.values()]
        return int(max(counts))

    @steps.setter
    def steps(self, count: int) -> None:
        for inner, _ in self._inner():
            if _counts_by_parameter(inner):
                for state in inner.state.values():
                    state["step"] = torch.tensor(float(count))
            else:
                for group in inner.param_groups:
                    group["step"] = count

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def apply(self) -> Update:
        """Update the weights from the accumulated, reduced gradients and advance the schedule.

        The schedule advances first, so that the first update of a warm-up does not have rate 0. It advances
        on a skipped update too, so that a run's learning rates are known beforehand.
        """
        self.scheduler.step(1)
        return self._update()

    def apply_step(self, step: AdamStep) -> Update:
        """Update the weights as `apply` does, with the settings of `step` in place of the schedule's."""
        for group in self.megatron.param_groups:
            group |= {"lr": step.lr, "betas": step.betas, "eps": step.eps}
            group["weight_decay"] = step.weight_decay * group.get("wd_mult", 1.0)  # 0 for norms and biases
        for optimizer in self.megatron.chained_optimizers:
            optimizer.config.clip_grad = step.clip_grad
        return self._update()

    def quantize_weights(self) -> None:
        """Set weights that are kept in FP8 from the masters, as an update does; others stay. A collective.

        A checkpoint stores such weights in parts, which would be quantized with separate scales: gate and up,
        for example, share one scale in the model.
        """
        if not any(is_float8tensor(weight) for chunk in self._chunks for weight in chunk.parameters()):
            return
        for optimizer in self.megatron.chained_optimizers:
            optimizer._copy_main_params_to_model_params()
        for chunk in self._chunks:
            chunk.start_param_sync(force_sync=True)

    def _update(self) -> Update:
        lr = float(self.megatron.param_groups[0]["lr"])
        with megatron_device():
            overflow = self.megatron.prepare_grads()
            total_norm = self.megatron.get_grad_norm()  # a tensor on a GPU
            norm = float(total_norm)
            skipped = bool(overflow) or not math.isfinite(norm)
            if not skipped:
                self._clip(total_norm)
                with _more_threads() if self._hybrids() else contextlib.nullcontext():
                    self.megatron.step_with_ready_grads()
        return Update(norm, lr, skipped)

    def _clip(self, norm: Any) -> None:
        """Clip the gradients as Megatron's `step` does, which would compute their norm a second time."""
        for optimizer in self.megatron.chained_optimizers:
            options, parameters = optimizer.config, optimizer.get_parameters()
            if parameters and options.clip_grad > 0:
                is_decoupled = options.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, options.clip_grad, norm, is_decoupled)


def _megatron_optimizer(model: Model, options: OptimizerConfig, precision: ModelConfig) -> Any:
    """Return Megatron's optimizer. Raises ConfigError on all ranks if the host has too little memory."""
    bf16, offload = precision.dtype == "bfloat16", options.offload_fraction > 0
    if offload:
        _check_host_memory(model, options.offload_fraction)
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.betas[0],
        adam_beta2=options.betas[1],
        adam_eps=options.eps,
        clip_grad=options.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
        overlap_param_gather=model.overlaps_param_gather,
        fp8_recipe=None if precision.fp8 is None else precision.fp8.recipe,
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=options.offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=True,
        # Else Megatron keeps a second set of masters on the device. Not in fp32: there are no masters, and
        # weights that stay on the device would silently get no gradients.
        use_precision_aware_optimizer=offload and bf16,
    )
    with megatron_device(), _host_and_device() if offload else contextlib.nullcontext():
        if options.muon is None:
            return get_megatron_optimizer(settings, model.chunks, use_gloo_process_groups=False)
    # In fp32 the masters are views of weights, which are leaves only without gradients.
    with megatron_device(), torch.no_grad():
        matrices = ParamKey(predicate=ParamPredicate(name="matrix", fn=muon.is_matrix))
        overrides = get_standard_config_overrides(settings) | {matrices: dict(muon.OVERRIDE)}
        optimizer = get_megatron_optimizer(settings, model.chunks, overrides, use_gloo_process_groups=False)
        muon.add_muon(optimizer, options.muon, bf16)
        return optimizer


def _counts_by_parameter(inner: torch.optim.Optimizer) -> bool:
    """Return True for PyTorch's Adam, which counts steps by parameter; fused Adams count them by group."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW)


def _states_of(inner: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield masters and moments."""
    for group in inner.param_groups:
        yield from group["params"]
    for state in inner.state.values():  # HybridDeviceOptimizer lists the master here again
        yield from (t for name, t in state.items() if isinstance(t, Tensor) and name != "master_param")


def _check_host_memory(model: Model, fraction: float) -> None:
    """Raise ConfigError on all ranks if the optimizer does not fit the node's free memory. A collective.

    Otherwise the kernel would kill the process without a message. All ranks read the free memory before any
    of them takes some. An element that is updated on the host needs a master, two moments and a gradient, 16
    bytes. Before that, Megatron copies all of the rank's weights, in their own dtype and in fp32.
    """
    buffers = list(model.buffers())
    updated = sum(b.grad_data.numel() / b.data_parallel_group.size() for b in buffers)
    copied = sum(b.grad_data.numel() for b in buffers)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = fraction * max(16 * updated, 8 * copied) * ranks
    free = psutil.virtual_memory().available
    with all_ranks_agree(ConfigError):
        if needed > free:
            raise ConfigError(
                f"optimizer.offload_fraction={fraction} needs {needed / 2**30:.3g} GiB of the memory of node "
                f"{platform.node()} for its {ranks} rank(s), and {free / 2**30:.3g} GiB are free: use a "
                "smaller fraction or more nodes"
            )


@contextlib.contextmanager
def _more_threads() -> Iterator[None]:
    """Give PyTorch this rank's share of the node's cores; torchrun gives a rank one thread."""
    before = torch.get_num_threads()
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(before, share))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _host_and_device() -> Iterator[None]:
    """Context to build an optimizer that works on both host and device."""
    with contextlib.ExitStack() as modes:
        if not torch.cuda.is_available():
            from megatron_gvpo.megatron.cpu.spec import HostCopies

            modes.enter_context(HostCopies())
        # In fp32 Megatron passes views of the weights, and PyTorch's optimizers accept only leaf tensors.
        modes.enter_context(torch.no_grad())
        yield

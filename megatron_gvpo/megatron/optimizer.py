"""Megatron's distributed Adam with its learning-rate schedule; a non-finite gradient skips the update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_gvpo.config import ModelConfig, OptimizerConfig
from megatron_gvpo.megatron.model import Model
from megatron_gvpo.megatron.parallel import megatron_device


@dataclass(frozen=True)
class Update:
    """What one optimizer update did. `grad_norm` is the norm before clipping."""

    grad_norm: float
    lr: float
    skipped: bool


class Optimizer:
    """Zero, then accumulate gradients into the model's buffers, then apply."""

    def __init__(self, model: Model, options: OptimizerConfig, precision: ModelConfig, updates: int) -> None:
        """`updates`: of the whole run; the decay ends there."""
        self._chunks = model.chunks
        dtype = torch.bfloat16 if precision.dtype == "bfloat16" else torch.float32
        with megatron_device():
            self.megatron: Any = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=options.lr,
                    min_lr=options.min_lr,
                    weight_decay=options.weight_decay,
                    adam_beta1=options.betas[0],
                    adam_beta2=options.betas[1],
                    adam_eps=options.eps,
                    clip_grad=options.clip_grad,
                    bf16=precision.dtype == "bfloat16",
                    params_dtype=dtype,
                    use_distributed_optimizer=True,
                    overlap_param_gather=model.gathers_late,
                    fp8_recipe=None if precision.fp8 is None else precision.fp8.recipe,
                ),
                model.chunks,
            )
        self._allocate_states()
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=options.min_lr,
            lr_warmup_steps=options.warmup_steps,
            lr_decay_steps=updates + 1,  # so that the last update still has a learning rate
            lr_decay_style=options.decay,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=updates,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    def _adams(self) -> list[torch.optim.Optimizer]:
        """The PyTorch optimizers inside, where neither Transformer Engine nor Apex brought their own."""
        inner = [o.optimizer for o in self.megatron.chained_optimizers]
        return [o for o in inner if isinstance(o, torch.optim.Adam | torch.optim.AdamW)]

    def tensors(self) -> Iterator[torch.Tensor]:
        """What it updates and remembers; in fp32 the former are the model's own weights."""
        for inner in (o.optimizer for o in self.megatron.chained_optimizers):
            for group in inner.param_groups:
                yield from group["params"]
            for state in inner.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _allocate_states(self) -> None:
        """Give PyTorch's Adam its states at once, not at the first step: a checkpoint needs them."""
        for adam in self._adams():
            for parameter in (p for group in adam.param_groups for p in group["params"]):
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    @property
    def steps(self) -> int:
        """Updates that Adam has taken: its bias corrections depend on it."""
        counts = [0.0]
        for inner in (o.optimizer for o in self.megatron.chained_optimizers):
            counts += [float(group.get("step", 0)) for group in inner.param_groups]
            counts += [float(state.get("step", 0)) for state in inner.state.values()]
        return int(max(counts))

    @steps.setter
    def steps(self, count: int) -> None:
        adams = self._adams()
        for inner in (o.optimizer for o in self.megatron.chained_optimizers):
            if inner in adams:  # which counts for every parameter, in a tensor that it advances
                for state in inner.state.values():
                    state["step"] = torch.tensor(float(count))
            else:
                for group in inner.param_groups:
                    group["step"] = count

    def allocate(self) -> None:
        """Give moments their memory where the first update would: a checkpoint is loaded into it."""
        for optimizer in self.megatron.chained_optimizers:
            if optimizer.optimizer not in self._adams() and not optimizer.optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())

    def zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def apply(self) -> Update:
        """Update the weights from the accumulated, reduced gradients and advance the schedule.

        The schedule advances first, so that the first update of a warm-up is not one at rate 0, and on
        a skipped update too, so that a run's learning rates are known beforehand.
        """
        self.scheduler.step(1)
        lr = float(self.megatron.param_groups[0]["lr"])
        with megatron_device():
            overflow = self.megatron.prepare_grads()
            norm = float(self.megatron.get_grad_norm())
            skipped = bool(overflow) or not math.isfinite(norm)
            if not skipped:
                self.megatron.step()
        return Update(norm, lr, skipped)

"""The operations of the API on the ranks: each is a dict that rank 0 sends to all, and returns a dict.

The values of a dict are those of msgpack: numbers, strings, bytes, lists. Every rank carries out every
operation, in the same order. A Refusal is raised on all ranks alike, and changes no model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megatron_gvpo.core.collectives import all_ranks_agree
from megatron_gvpo.core.errors import CheckpointError
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.megatron import parallel
from megatron_gvpo.megatron.model.build import build
from megatron_gvpo.megatron.optimizer import AdamStep, Optimizer
from megatron_gvpo.settings.sections import OptimizerConfig, SamplingConfig
from megatron_gvpo.settings.tinker import TinkerConfig
from megatron_gvpo.tinker import checkpoints
from megatron_gvpo.tinker.checkpoints import CheckpointPath
from megatron_gvpo.tinker.gradients import differentiate, evaluate
from megatron_gvpo.tinker.losses import RequestedLoss
from megatron_gvpo.tinker.sampler import EmbeddedSampler, SampleOrder, SnapshotSampler
from megatron_gvpo.tinker.served_sampler import ServedSampler
from megatron_gvpo.tinker.state import ModelState, Slot
from megatron_gvpo.tinker.wire import Refusal, read_forward_backward

Operation = dict[str, Any]
Outcome = dict[str, Any]
BASE = "base"  # the snapshot of the model as it was loaded
MOST_READ = 4  # snapshots of checkpoints that stay in memory; others are read again


class Operations:
    """The Megatron model of this rank, with the states of all clients' models."""

    def __init__(self, config: TinkerConfig) -> None:
        parallel.initialize(config.parallel, config.seed, config.deterministic)
        model = build(config.model, config.parallel, config.deterministic, seed=config.seed)
        # Every step names its settings; the optimizer is built with any possible ones.
        optimizer = Optimizer(model, OptimizerConfig(lr=1e-4), config.model, updates=1)
        self._config = config
        self._root = Path(config.output_dir) / "checkpoints"
        self._slot = Slot(model, optimizer)
        sampler = ServedSampler if config.run.rollout.uses_servers else EmbeddedSampler
        self.sampler: SnapshotSampler = sampler(
            config, self._slot, load_tokenizer(config.model.path, config.model.trust_remote_code)
        )
        self._new = self._slot.read()  # the state of a new model
        self._snapshots: dict[str, list[Tensor]] = {BASE: self._slot.read_weights()}
        self._read: list[str] = []  # the snapshots that were read from checkpoints, the oldest first
        # The states of all models; that of the model in the slot is older than the slot.
        self._models: dict[str, ModelState] = {}
        self._present: str | None = None  # the model in the slot
        self._budget = config.max_tokens_per_micro_batch * config.parallel.cp
        self._actions: dict[str, Callable[[Operation], Outcome]] = {
            "create": self._create,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save": self._save,
            "load": self._load,
            "snapshot": self._snapshot,
            "sample": self._sample,
            "forget": self._forget,
            "idle": lambda _: {},
        }

    def run(self, operation: Operation) -> Outcome:
        """Carry out one operation. A collective. Raises Refusal on all ranks."""
        try:
            return self._actions[operation["kind"]](operation)
        except CheckpointError as error:
            raise Refusal(str(error)) from None

    def _enter(self, model_id: str | None) -> None:
        """Save the model in the slot, and load a client's model there; None: no client's model."""
        if model_id == self._present and model_id is not None:
            return
        if model_id is not None and model_id not in self._models:
            raise Refusal(f"there is no model {model_id}: it could not be made, or it was unloaded", 404)
        if self._present is not None:
            self._models[self._present] = self._slot.read()
        self._present = None
        if model_id is not None:
            self._slot.write(self._models[model_id])
            self._present = model_id

    def _create(self, operation: Operation) -> Outcome:
        self._models[operation["model"]] = self._new.copy()
        return {}

    def _forward_backward(self, operation: Operation) -> Outcome:
        request = read_forward_backward(operation["body"])
        loss = RequestedLoss.of(request.loss, request.config, request.data)
        self._enter(operation["model"])
        slot, budget = self._slot, self._budget
        if request.forward_only:
            scored = evaluate(slot.model, loss, budget)
        else:
            slot.optimizer.zero_grad()
            scored = differentiate(slot.model, loss, budget, self._config.head_stash_bytes)
            for total, buffer in zip(slot.gradients, slot.model.gradient_buffers(), strict=True):
                total += buffer
        lengths = [len(datum.tokens) for datum in request.data]
        return {
            "logprobs": [part.numpy().astype(np.float32).tobytes() for part in scored.logp_r.split(lengths)],
            "metrics": {"loss:sum": scored.loss},
        }

    def _optim_step(self, operation: Operation) -> Outcome:
        self._enter(operation["model"])
        slot = self._slot
        slot.model.finish_background_work()
        slot.model.gather_after_update()  # the client may have scored or saved since its backward pass
        slot.optimizer.zero_grad()
        for total, buffer in zip(slot.gradients, slot.model.gradient_buffers(), strict=True):
            buffer.copy_(total)
            total.zero_()
        step = operation["step"]
        update = slot.optimizer.apply_step(
            AdamStep(step["lr"], tuple(step["betas"]), step["eps"], step["weight_decay"], step["clip_grad"])
        )
        if update.skipped:
            raise Refusal(
                f"the gradient is not finite (norm {update.grad_norm}): the step was not taken, and the "
                "gradient is dropped"
            )
        return {"metrics": {"grad_norm": update.grad_norm, "learning_rate": update.lr}}

    def _save(self, operation: Operation) -> Outcome:
        path = CheckpointPath(*operation["path"])
        self._enter(operation["model"])
        checkpoints.save(self._slot, self._config.model, self._root, path, operation["info"])
        return {}

    def _load(self, operation: Operation) -> Outcome:
        """Load a checkpoint into a model, which may be new; a Refusal leaves the model unchanged."""
        path, model_id = CheckpointPath(*operation["path"]), operation["model"]
        self._enter(None)
        self._slot.write(self._new)
        checkpoints.load(self._slot, self._root, path, operation["optimizer"])
        self._models[model_id] = self._slot.read()
        return {}

    def _snapshot(self, operation: Operation) -> Outcome:
        """Keep a copy of a model's present weights, to sample from them."""
        self._enter(operation["model"])
        self._snapshots[operation["snapshot"]] = self._slot.read_weights()
        return {}

    def _load_weights(self, snapshot: str, path: list[Any] | None) -> None:
        """Put the weights of a snapshot into the slot; `path`: the checkpoint to read them from, if any.

        Raises Refusal.
        """
        self._enter(None)
        if (weights := self._snapshots.get(snapshot)) is not None:
            self._slot.write_weights(weights)
            return
        if path is None:
            raise Refusal("the sampler's weights are gone: its model was unloaded or not made", 404)
        checkpoint = CheckpointPath(*path)
        with all_ranks_agree(Refusal):
            if dist.get_rank() == 0:
                checkpoints.check_snapshot(self._root, checkpoint, snapshot)
        self._slot.write(self._new)
        checkpoints.load(self._slot, self._root, checkpoint, with_optimizer=False)
        self._snapshots[snapshot] = self._slot.read_weights()
        self._read.append(snapshot)
        if len(self._read) > MOST_READ:
            self._drop(self._read.pop(0))

    def _drop(self, snapshot: str) -> None:
        self._snapshots.pop(snapshot, None)
        self.sampler.forget(snapshot)

    def _sample(self, operation: Operation) -> Outcome:
        orders = [SampleOrder(**order) for order in operation["orders"]]
        snapshot = operation["snapshot"]
        self._load_weights(snapshot, operation.get("path"))
        sampling = SamplingConfig.model_validate(operation["sampling"])
        sequences = self.sampler.sample(snapshot, orders, sampling)
        wanting = [i for i, order in enumerate(orders) if order.prompt_logprobs]
        scored = self.sampler.prompt_logprobs([orders[i].prompt for i in wanting]) if wanting else []
        logprobs = dict(zip(wanting, scored, strict=True))
        return {
            "answers": [
                {"sequences": rows, "prompt_logprobs": logprobs.get(i)} for i, rows in enumerate(sequences)
            ]
        }

    def _forget(self, operation: Operation) -> Outcome:
        for model_id in operation["models"]:
            self._models.pop(model_id, None)
            if self._present == model_id:
                self._present = None
        for name in operation["snapshots"]:
            self._drop(name)
        return {}

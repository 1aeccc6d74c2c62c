"""A run's parts, built from its configuration: what the trainer's loop is a short story about."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_gvpo.algorithms.batch_policy import BatchPolicy
from megatron_gvpo.config import Config, read_model_config
from megatron_gvpo.data.order import PromptOrder
from megatron_gvpo.data.prompts import DataError, load_prompts
from megatron_gvpo.data.tokenizer import end_token_id, load_tokenizer
from megatron_gvpo.evaluation import summarise
from megatron_gvpo.megatron import checkpoint, parallel
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.observe import PhaseTimer, ProfileWindow, profile_window
from megatron_gvpo.rewards.pool import RewardPool
from megatron_gvpo.rollout.local import LocalEngine
from megatron_gvpo.sampling import DatasetSampler, EngineSampler, Sampler
from megatron_gvpo.types import Prompt
from megatron_gvpo.weights.in_process import InProcess


class Parts:
    """Policy, engine, data, samplers. A context manager: the engine and the workers end with it.

    Data is read before the model is built, so that bad data costs seconds.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.timer = PhaseTimer(synchronize=torch.cuda.is_available())
        tokenizer = load_tokenizer(config.model.path)
        end = end_token_id(tokenizer)
        vocabulary = read_model_config(config.model.path).get("vocab_size", end + 1)
        if end >= vocabulary:
            raise DataError(
                f"model.path={config.model.path}: the tokenizer's end token {tokenizer.eos_token!r} has id "
                f"{end}, and the model knows only {vocabulary} tokens; name its own as eos_token in "
                "tokenizer_config.json"
            )
        self.prompts: list[Prompt] = load_prompts(config.data.train, config.data, tokenizer, end_token_id=end)
        self.eval_prompts: list[Prompt] = []
        if config.data.eval is not None:
            self.eval_prompts = load_prompts(config.data.eval, config.data, tokenizer, end_token_id=end)
        self.order = PromptOrder(len(self.prompts), config.train.seed, config.data.shuffle)
        self.batch_policy: BatchPolicy = config.algorithm.batch_policy.build(config.train.prompts_per_step)
        self.policy = Policy(config)
        self.profiler: ProfileWindow = profile_window(
            config.logging.profile_steps, Path(config.output_dir), dist.get_rank()
        )
        self._engine: LocalEngine | None = None
        self._rewards: RewardPool | None = None
        self.sampler: Sampler = DatasetSampler()
        self.evaluator: Sampler | None = None
        if config.algorithm.sampler == "engine" or self.eval_prompts:
            self._build_rollout(tokenizer, end)

    def _build_rollout(self, tokenizer: Any, end: int) -> None:
        config = self.config
        self._engine = LocalEngine(
            config.model.path,
            tokenizer,
            device=parallel.device(),
            dtype=getattr(torch, config.model.dtype),
            batch_size=config.rollout.batch_size,
            end_token_id=end,
        )
        self._transport = InProcess(self._engine)
        self._rewards = RewardPool(config.rewards)
        common = (self._engine, self._rewards, self.timer)
        if config.algorithm.sampler == "engine":
            self.sampler = EngineSampler(*common, config.rollout.n, config.rollout)
        if self.eval_prompts:
            self.evaluator = EngineSampler(*common, config.eval.n, config.eval.sampling)

    def sync(self, version: int) -> None:
        """Give the engine the policy's weights, unless it has them. A collective."""
        if self._engine is not None and self._engine.weight_version != version:
            with self.timer.phase("sync"):
                self._transport.push(self.policy.weights(), version)

    def evaluate(self, version: int) -> dict[str, float]:
        """Metrics of the present policy on the held-out prompts; empty without any. A collective."""
        if self.evaluator is None:
            return {}
        self.sync(version)
        groups = self.evaluator.sample(self.eval_prompts, self.config.eval.seed)
        self.timer.take()
        return summarise(groups, self.config.eval.k)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the policy, as JSON values."""
        return {"order": self.order.state_dict(), "batch_policy": self.batch_policy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.load_state_dict(state["order"])
        self.batch_policy.load_state_dict(state["batch_policy"])

    def resume(self) -> int | None:
        """Restore the newest complete checkpoint; returns its step, None where there is none."""
        found = checkpoint.complete(self.checkpoints)
        if not found:
            return None
        state = checkpoint.load(found[-1], self.policy)
        self.load_state_dict(state)
        return int(state["step"])

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint of the policy and `state`. A collective."""
        with self.timer.phase("checkpoint"):
            return checkpoint.save(self.checkpoints, step, self.policy, state, self.config.checkpoint.keep)

    def export_hf(self, directory: Path) -> None:
        """Write a Hugging Face checkpoint: weights, configuration, tokenizer. A collective."""
        aside = directory.with_name(directory.name + ".partial")
        with self.timer.phase("checkpoint"):
            self.policy.model.save_hf(aside)
            if dist.get_rank() == 0:
                load_tokenizer(self.config.model.path).save_pretrained(aside)
                shutil.rmtree(directory, ignore_errors=True)
                aside.rename(directory)
            dist.barrier()

    @property
    def checkpoints(self) -> Path:
        return Path(self.config.output_dir) / "checkpoints"

    def __enter__(self) -> Self:
        if self._rewards is not None:
            self._rewards.__enter__()
        self.profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.profiler.__exit__(kind, error, trace)
        if self._rewards is not None:
            self._rewards.__exit__(kind, error, trace)
        if self._engine is not None:
            self._engine.close()

"""Rank function of test_gradient_invariance.py: every case under each layout, on the real Policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.distributed import run_number
from helpers.small_constants import late_gathers, small_constants
from megatron_gvpo.observe.mismatch import MismatchWatch
from megatron_gvpo.settings.config import Config, build_config
from megatron_gvpo.settings.sections import FP8Config
from megatron_gvpo.types import TrainBatch
from megatron_gvpo.verify.layout import ParallelLayout
from megatron_gvpo.verify.measures import UPDATE

Layout = ParallelLayout  # the name that tests use


@dataclass(frozen=True)
class Case:
    """One optimizer update on these rows, by this algorithm, in micro-batches of `budget` tokens.

    `rows` come without advantages: the algorithm's estimator computes them, as in the trainer. With `first`
    the reference is the engine's log-probs, corrected by the gap that these rows, a step's first mini-batch,
    have.
    """

    name: str
    algorithm: dict[str, Any]
    rows: TrainBatch
    budget: int
    at_step_start: bool = False
    model: str = "untied"
    first: TrainBatch | None = None
    teacher: str | None = None  # the name of a model whose log-probs are results, too
    text: TrainBatch | None = None  # the rows in the tokens of a teacher with another tokenizer
    dtype: str = "float32"
    fp8: str | None = None  # the recipe of matrix products in FP8
    fp8_weights: bool = False
    replays: bool = True  # routers follow the rows' experts where rows name them


@dataclass(frozen=True)
class Outcome:
    """Results of one case; gradients have Hugging Face names."""

    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    grad_norm: float  # the norm by which Megatron's optimizer clips
    stash_share: float  # the share of tokens whose exponentials the head has kept


@dataclass(frozen=True)
class Probe:
    """Results of one model: its export before any update, and scores and weights around one update with
    `UPDATE`.
    """

    exported: dict[str, Tensor]
    logp_r: Tensor
    updated_logp_r: Tensor
    updated: dict[str, Tensor]
    grad_norm: float
    buckets: int  # the number of buckets that this rank communicates one by one


TEMPERATURE = 0.8


def config_of(case: Case, layout: Layout, directory: Path) -> Config:
    replays = case.replays and case.model in ("qwen3_moe", "deepseek_v3")
    named = [{"name": name, "function": "not:called"} for name in case.rows.component_n]
    components = named or [{"name": "math"}]  # a method that learns from rewards needs one
    config = build_config(
        {
            "output_dir": "unused",
            "model": {"path": str(directory / case.model), "dtype": case.dtype},
            "data": {"train": {"path": "unused", "demonstration_key": "unused"}},
            "algorithm": case.algorithm,
            "rollout": {"temperature": TEMPERATURE, "engine": "sglang", "router_replay": replays},
            "rewards": {"components": components},
            "train": {"steps": 1, "prompts_per_step": 1, "max_tokens_per_micro_batch": case.budget},
            "optimizer": {**UPDATE, "offload_fraction": layout.offload},
            "parallel": layout.settings,
            "teacher": None if case.teacher is None else {"path": str(directory / case.teacher)},
        }
    )
    if case.fp8 is None:
        return config
    # A user's configuration allows FP8 only with bf16, which would hide small errors of FP8.
    model = config.model.model_copy(update={"fp8": FP8Config(recipe=case.fp8, weights=case.fp8_weights)})
    return config.model_copy(update={"model": model})


@contextlib.contextmanager
def sizes_of(layout: Layout) -> Iterator[None]:
    """Context in which a layout runs."""
    with contextlib.ExitStack() as stack:
        if layout.small:
            stack.enter_context(small_constants())
            stack.enter_context(late_gathers())
        yield


def run(directory: str) -> None:
    """Run every case and probe of one layout; rank 0 writes results-{layout}.pt."""
    from megatron.core import parallel_state

    from megatron_gvpo.megatron.policy import Policy

    folder = Path(directory)
    runs, probes = torch.load(folder / "work.pt", weights_only=False)
    layout = list(dict.fromkeys(layout for layout, _ in runs))[run_number()]
    cases = [case for of, case in runs if of == layout]
    results: dict[tuple[str, str], Outcome | Probe | Tensor] = {}
    with sizes_of(layout):
        for model in dict.fromkeys(case.model for case in cases):
            probe = probes[model]
            policy = Policy.of(config_of(probe, layout, folder))
            exported = _copy(policy.weights())
            for case in (case for case in cases if case.model == model):
                print(f"{layout}: {case.name}", flush=True)
                results[str(layout), case.name] = gradients_of(policy, case, config_of(case, layout, folder))
            if policy.teacher is not None:
                results[str(layout), "teacher"] = policy.score_teacher(probe.rows)
                if probe.text is not None:
                    results[str(layout), "text"] = policy.score_teacher(probe.text)
            results[str(layout), model] = _probe(policy, probe, config_of(probe, layout, folder), exported)
            parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        torch.save(results, folder / f"results-{layout}.pt")


def _configure(policy: Any, config: Config) -> None:
    """Set what Policy.__init__ takes from `config`, without building the model, which would take most of the
    time.
    """
    policy._loss = config.algorithm.loss
    policy._budget = config.train.max_tokens_per_micro_batch * config.parallel.cp
    policy._temperature = config.rollout.temperature if config.algorithm.samples_from_policy else 1.0


def gradients_of(policy: Any, case: Case, config: Config) -> Outcome:
    """Loss, gradients and their norm of one case; the weights do not change."""
    from megatron_gvpo.megatron.parallel import megatron_device

    _configure(policy, config)
    rows = case.rows
    if config.algorithm.estimator is not None:
        rows, _ = config.algorithm.estimator.fill(rows)
    gradients: dict[str, Tensor] = {}
    norms: list[float] = []

    def instead_of_an_update() -> None:
        with megatron_device():
            policy.optimizer.megatron.prepare_grads()
            norms.append(float(policy.optimizer.megatron.get_grad_norm()))
        gradients.update(_export_gradients(policy))

    apply, policy.optimizer.apply = policy.optimizer.apply, instead_of_an_update
    if case.first is not None:
        watch = MismatchWatch(threshold=1.0)
        watch.compare(case.first, _own_logp(policy, case.first), version=0)
        rows = rows.with_columns(ref_logp_r=watch.corrected(rows))
        gradients.clear()
    result = policy.update(rows, at_step_start=case.at_step_start)
    policy.optimizer.apply = apply
    return Outcome(result.metrics, gradients, norms[-1], result.head["head/stash"])


def _own_logp(policy: Any, rows: TrainBatch) -> Tensor:
    """Log-probs from an update's own forward, which equal those of a scoring pass."""
    found_r: Tensor = policy.update(rows, at_step_start=True, keep_logp=True).logp_r
    torch.testing.assert_close(found_r, policy.score(rows), rtol=0, atol=1e-5)
    return found_r


def _probe(policy: Any, case: Case, config: Config, exported: dict[str, Tensor]) -> Probe:
    _configure(policy, config)
    logp_r = policy.score(case.rows)
    update = policy.update(case.rows, at_step_start=case.at_step_start).update
    updated_logp_r = policy.score(case.rows)  # before an export, which would wait for the weights
    buckets = sum(
        len(group)
        for c in policy.model.chunks
        for group in (c.bucket_groups, c.expert_parallel_bucket_groups)
    )
    return Probe(exported, logp_r, updated_logp_r, _copy(policy.weights()), update.grad_norm, buckets)


def _export_gradients(policy: Any) -> dict[str, Tensor]:
    from megatron_gvpo.megatron.gradient_export import export_gradients
    from megatron_gvpo.megatron.model.build import plain_weights

    with plain_weights(policy.model.chunks):  # a weight in FP8 would round the gradient
        gradients = export_gradients(policy.model)
    for name in [name for name in gradients if name.endswith("e_score_correction_bias")]:
        del gradients[name]  # it is exported, but it is not a parameter
    return gradients


def _copy(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named}

"""Measures a model or a checkpoint on named evaluations, without training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_gvpo.checks.preflight import preflight_on_ranks
from megatron_gvpo.data.task import load_task
from megatron_gvpo.evals.answers import Answers
from megatron_gvpo.evals.catalog import ChosenEvaluations
from megatron_gvpo.evals.documents import Prepared
from megatron_gvpo.evals.documents import prepare as prepare_evaluations
from megatron_gvpo.evals.run import EvaluatedPolicy, Outcomes, run_all
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.tokenizer import set_date
from megatron_gvpo.megatron.scorer import Scorer, temperature_of
from megatron_gvpo.runs.record import first_start
from megatron_gvpo.sampling.engine import engine_class
from megatron_gvpo.settings.lengths import room_for_prompt
from megatron_gvpo.training.conversion import load_checkpoint
from megatron_gvpo.training.environment import prepare

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config
    from megatron_gvpo.settings.sections import EvalConfig, ModelConfig, RolloutConfig


def evaluate_named(
    config: Config,
    choice: ChosenEvaluations,
    resume: bool,
    step: int | None = None,
    *,
    prepared: Prepared | None = None,
    tell: Callable[[str], None] = print,
) -> Outcomes:
    """Measure `model.path`, or a checkpoint of the run, on named evaluations. A collective.

    The run's engine samples `eval.n` answers to each problem with `eval.sampling` and `eval.seed`. `resume`:
    the checkpoint of `step`, or else the newest. `prepared`: the data, where they are read already; rank 0
    alone reads them, and it alone has the outcomes. Raises ConfigError and DataError before anything is
    loaded; CheckpointError, RolloutError.
    """
    preflight_on_ranks(config, "named eval")
    prepare(config.parallel, config.rollout)
    set_date(first_start(config.output_dir) if resume else None)
    cards = ModelCards(config)
    task = load_task(config, cards.policy)
    policy = Scorer(
        config.model,
        config.parallel,
        config.train,
        temperature=temperature_of(config.algorithm, config.rollout),
        replays_routing=config.rollout.router_replay,
    )
    loaded = load_checkpoint(config.output_dir, policy.model, step) if resume else 0
    # A problem is a prompt with one response: no environment, no tools.
    rollout = config.rollout.model_copy(update={"conversation": None})
    longest = room_for_prompt(config, cards.policy)
    engine = engine_class(rollout.engine)(
        config.model, rollout, config.output_dir, cards, replace(task, tools=()), policy
    )
    with engine:
        engine.sync(loaded)
        answers = Answers(engine, config.eval, task.tokenizer)
        if dist.get_rank() != 0:
            answers.serve()
            return Outcomes()
        try:
            documents = prepare_evaluations(choice) if prepared is None else prepared
            label, about = _weights(config.model, config.rollout, config.eval, loaded if resume else None)
            answering = EvaluatedPolicy(answers, task, longest, config.data.system_prompt, label, about)
            return run_all(choice, documents, answering, config.output_dir, tell)
        finally:
            answers.close()


def _weights(
    model: ModelConfig, rollout: RolloutConfig, settings: EvalConfig, step: int | None
) -> tuple[str, dict[str, Any]]:
    """The name of the weights in the names of files, and what the results say about them."""
    label = "model" if step is None else f"step_{step:08d}"
    about = {
        "model": model.path,
        "step": step,
        "engine": rollout.engine,
        "sampling": settings.sampling.model_dump(mode="json"),
        "seed": settings.seed,
    }
    return label, about

"""Measures a model or a checkpoint without training: on held-out prompts, or on named evaluations."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_gvpo.checks.preflight import preflight_on_ranks
from megatron_gvpo.data.task import Task, load_task
from megatron_gvpo.evals.answers import Answers
from megatron_gvpo.evals.catalog import ChosenEvaluations
from megatron_gvpo.evals.definitions import prepare as prepare_evaluations
from megatron_gvpo.evals.documents import Prepared
from megatron_gvpo.evals.run import EvaluatedPolicy, Outcomes, run_all
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.tokenizer import set_date
from megatron_gvpo.megatron.scorer import Scorer, temperature_of
from megatron_gvpo.observe import PhaseTimer
from megatron_gvpo.runs.record import first_start
from megatron_gvpo.runs.written import step_name
from megatron_gvpo.sampling.engine import engine_class
from megatron_gvpo.sampling.rollouts import Rollouts
from megatron_gvpo.settings.lengths import room_for_prompt
from megatron_gvpo.training.conversion import load_checkpoint
from megatron_gvpo.training.environment import prepare
from megatron_gvpo.workers.tools import configured_schemas

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config
    from megatron_gvpo.settings.sections import EvalConfig, ModelConfig, RolloutConfig


def evaluate(config: Config, resume: bool, step: int | None = None) -> dict[str, float]:
    """Metrics of `model.path`, or of a checkpoint of the run, on the held-out prompts. A collective.

    `resume`: measure the checkpoint of `step`, or else the newest. No gradients and no optimizer are built,
    which take most of the memory of training. Raises ConfigError for settings that `preflight` refuses,
    before anything is loaded; DataError, CheckpointError, RolloutError.
    """
    preflight_on_ranks(config, "eval")
    tools = configured_schemas(config.rollout.conversation)
    cards, task, policy, version = _load(config, tools, resume, step)
    with Rollouts(config, cards, task, policy, PhaseTimer()) as rollouts:
        return rollouts.evaluate(version)[1]


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
    # A problem is a prompt with one response, without an environment or tools.
    cards, task, policy, version = _load(config, (), resume, step)
    rollout = config.rollout.model_copy(update={"conversation": None})
    engine = engine_class(rollout.engine)(config.model, rollout, config.output_dir, cards, task, policy)
    with engine:
        engine.sync(version)
        answers = Answers(engine, config.eval, task.tokenizer, task.chat)
        if dist.get_rank() != 0:
            answers.serve()
            return Outcomes()
        try:
            documents = prepare_evaluations(choice) if prepared is None else prepared
            label, about = _weights(config.model, config.rollout, config.eval, version if resume else None)
            if choice.limit is not None:
                label += f"-first{choice.limit}"
            longest = room_for_prompt(config, cards.policy)
            answering = EvaluatedPolicy(answers, task, longest, config.data.system_prompt, label, about)
            return run_all(choice, documents, answering, config.output_dir, tell)
        finally:
            answers.close()


def _load(
    config: Config, tools: tuple[dict[str, Any], ...], resume: bool, step: int | None
) -> tuple[ModelCards, Task, Scorer, int]:
    """The inputs of a run, the model without gradients and optimizer, and the step of its weights, or 0.

    With `resume`, prompts have the date on which the run in the output directory began.
    """
    prepare(config.parallel, config.rollout)
    set_date(first_start(config.output_dir) if resume else None)
    cards = ModelCards(config)
    task = load_task(config, cards.policy, tools)
    policy = Scorer(
        config.model,
        config.parallel,
        config.train,
        temperature=temperature_of(config.algorithm, config.rollout),
        replays_routing=config.rollout.router_replay,
    )
    return cards, task, policy, load_checkpoint(config.output_dir, policy.model, step) if resume else 0


def _weights(
    model: ModelConfig, rollout: RolloutConfig, settings: EvalConfig, step: int | None
) -> tuple[str, dict[str, Any]]:
    """The name of the weights in file names, and their description in the results.

    Other models are evaluated in the same output directory, to compare them: each path has a name of its own.
    """
    paths = [model.path, *([model.adapter.path] if model.adapter and model.adapter.path else [])]
    paths = list(map(os.path.abspath, paths))
    digest = hashlib.sha256("\n".join(paths).encode()).hexdigest()[:8]
    label = f"{os.path.basename(paths[-1])}-{digest}" if step is None else step_name(step)
    about = {
        "model": model.path,
        "step": step,
        "engine": rollout.engine,
        "sampling": settings.sampling.model_dump(mode="json"),
        "seed": settings.seed,
    }
    return label, about

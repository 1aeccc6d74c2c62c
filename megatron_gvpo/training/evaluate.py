"""Evaluates a model or a checkpoint without training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_gvpo.checks.preflight import preflight_on_ranks
from megatron_gvpo.data.task import load_task
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.huggingface.tokenizer import set_date
from megatron_gvpo.megatron.scorer import Scorer, temperature_of
from megatron_gvpo.observe import PhaseTimer
from megatron_gvpo.runs.record import first_start
from megatron_gvpo.sampling.rollouts import Rollouts
from megatron_gvpo.training.conversion import load_checkpoint
from megatron_gvpo.training.environment import prepare
from megatron_gvpo.workers.tools import configured_schemas

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config


def evaluate(config: Config, resume: bool, step: int | None = None) -> dict[str, float]:
    """Metrics of `model.path`, or of a checkpoint of the run, on the held-out prompts. A collective.

    `resume`: of the checkpoint of `step`, or else the newest. It builds no gradients and no optimizer, which
    take most of the memory of training. Raises ConfigError for what `preflight` refuses, before anything is
    loaded; DataError, CheckpointError, RolloutError.
    """
    preflight_on_ranks(config, "eval")
    prepare(config.parallel, config.rollout)
    set_date(first_start(config.output_dir) if resume else None)  # prompts are those of the run
    cards = ModelCards(config)
    task = load_task(config, cards.policy, configured_schemas(config.rollout.conversation))
    policy = Scorer(
        config.model,
        config.parallel,
        config.train,
        temperature=temperature_of(config.algorithm, config.rollout),
        replays_routing=config.rollout.router_replay,
    )
    loaded = load_checkpoint(config.output_dir, policy.model, step) if resume else 0
    with Rollouts(config, cards, task, policy, PhaseTimer()) as rollouts:
        return rollouts.evaluate(loaded)[1]

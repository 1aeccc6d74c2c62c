"""Parts of a run, each built from the sections of a configuration that it reads."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from megatron_gvpo.data.task import Task
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.megatron.scorer import Scorer, temperature_of
from megatron_gvpo.rewards.served import ServedRewards
from megatron_gvpo.rewards.teacher import SECTION, ServedTeacher
from megatron_gvpo.sampling.server_checks import check_server
from megatron_gvpo.servers.launch import serve
from megatron_gvpo.servers.server import Server
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.lengths import longest_prompt
from megatron_gvpo.settings.servers import run_directory
from megatron_gvpo.training.environment import prepare


def prepared(config: Config) -> None:
    """Prepare this process for the configuration's run."""
    prepare(config.parallel, config.rollout)


def scorer_of(config: Config) -> Scorer:
    temperature = temperature_of(config.algorithm, config.rollout)
    return Scorer(config.model, config.parallel, config.train, temperature=temperature)


def served_rewards_of(config: Config) -> ServedRewards:
    cards, gpus = ModelCards(config), config.first_gpus()
    return ServedRewards(config.rewards, cards, config.output_dir, gpus)


def served_teacher_of(config: Config) -> ServedTeacher:
    assert config.teacher is not None
    cards, gpu = ModelCards(config), config.first_gpus()[SECTION]
    return ServedTeacher(config.teacher, config.model.dtype, cards, config.output_dir, gpu)


def weights_directory(config: Config) -> Path:
    """The directory in which the run's servers read weights."""
    return run_directory(config.output_dir, config.rollout.weights)


def server_check(server: Server, config: Config, end_token_ids: Sequence[int]) -> Coroutine[Any, Any, None]:
    """The check that a server fits a run whose responses end at these tokens."""
    cards = ModelCards(config)
    task = Task(None, tuple(end_token_ids), [], [], longest_prompt(config, cards.policy))  # type: ignore[arg-type] # nothing is tokenized
    return check_server(server, config.model, config.rollout, cards, task)


def serve_run(config: Config) -> int:
    """`megatron-gvpo serve` with this configuration; returns its exit code."""
    return serve.serve(
        config.model,
        config.rollout,
        config.output_dir,
        ModelCards(config),
        config.parallel.timeout_seconds,
    )

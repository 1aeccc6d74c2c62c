"""`megatron-gvpo serve`: the rollout servers of this machine, or the trainer behind the Tinker API."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.terminal import loading, refuse
from megatron_gvpo.cli.with_model import run_with_model
from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.core.launch import launch
from megatron_gvpo.core.lazy_imports import heavy_imports

if TYPE_CHECKING:
    from megatron_gvpo.settings.config import Config
    from megatron_gvpo.settings.tinker import TinkerConfig


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve", help="run the rollout servers of this machine, or a training server"
    )
    configured.add_arguments(parser)
    parser.add_argument(
        "--tinker",
        action="store_true",
        help="serve training itself, to clients of the Tinker API: CONFIG.yaml has the sections of "
        "docs/howto/tinker_server.md",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Keep the servers running until SIGTERM or SIGINT. Raises ConfigError."""
    if options.tinker:
        return _run_tinker(options)
    from megatron_gvpo.checks.preflight import check_interpreter
    from megatron_gvpo.huggingface.card import ModelCards
    from megatron_gvpo.servers.launch.addresses import check_address

    config = configured.load(options)
    if config.rollout.uses_servers:
        check_address(config.rollout.servers)
    check_interpreter(config)  # without it, a missing engine would be started a second time
    with heavy_imports():
        from megatron_gvpo.servers.launch.serve import serve
    patience = config.parallel.timeout_seconds
    try:
        return serve(config.model, config.rollout, config.output_dir, ModelCards(config), patience)
    except RolloutError as error:  # the trainer of the job never gave the servers its GPUs
        return refuse(error, code=1)


def _run_tinker(options: argparse.Namespace) -> int:
    """Check the configuration, then serve: here, or in the ranks that it starts. Raises ConfigError."""
    from megatron_gvpo.settings.config import split_words
    from megatron_gvpo.settings.tinker import load_tinker_config

    words = options.config
    config = load_tinker_config(*split_words(words))
    _check(config, configured.world_size(options))
    if configured.is_launcher(options):
        return launch(options.nproc, options.command_line)

    def serving() -> None:
        with loading("the server"), heavy_imports():
            from megatron_gvpo.tinker.serve import serve
        serve(config)

    return run_with_model(serving)


def _check(config: TinkerConfig, ranks: int) -> None:
    """Refuse settings that cannot run, and set the variables that libraries read when they are loaded."""
    from megatron_gvpo.checks.adapters import check_adapter_layers
    from megatron_gvpo.checks.layout import check_division, check_processes
    from megatron_gvpo.huggingface.architectures import check_trainable
    from megatron_gvpo.huggingface.card import ModelCard
    from megatron_gvpo.training.environment import prepare

    card = ModelCard.read(config.model.path)
    architecture = check_trainable(card, f"model.path={config.model.path}")
    check_adapter_layers(config.model, config.parallel, card, architecture)
    check_processes(config.parallel, ranks)
    check_division(config.parallel, card)
    if config.run.rollout.uses_servers:
        _check_servers(config.run, ranks)
    with loading("the model's files"), heavy_imports():  # loads torch, so all that needs none comes before
        from megatron_gvpo.huggingface.complete_weights import stored_tensors
    stored_tensors(Path(config.model.path), "model.path")  # reports missing weights before Megatron loads
    prepare(config.parallel, config.run.rollout)


def _check_servers(run: Config, ranks: int) -> None:
    """Refuse rollout servers that cannot sample from the model, or cannot get its weights."""
    from megatron_gvpo.checks.layout import check_layout
    from megatron_gvpo.checks.preflight import check_interpreter, torch_gpus
    from megatron_gvpo.servers.cpu_engines import check_rollout_model

    cards = check_layout(run, ranks)
    check_interpreter(run)
    if not torch_gpus():
        check_rollout_model(run.model, run.rollout, cards)

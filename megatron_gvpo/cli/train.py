"""`megatron-gvpo train`: post-train a policy."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.terminal import loading, outliving_terminal, refuse, say
from megatron_gvpo.cli.with_model import run_with_model
from megatron_gvpo.core.lazy_imports import heavy_imports
from megatron_gvpo.core.signals import handled_by, stopping_signals

if TYPE_CHECKING:
    from megatron_gvpo.huggingface.card import ModelCard
    from megatron_gvpo.settings.config import Config


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("train", help="train a policy")
    configured.add_arguments(
        parser,
        "start N ranks on this machine (torchrun works, too); without it, one, or without a GPU one for each "
        "core that memory allows, where OMP_NUM_THREADS is not set",
    )
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    earlier.add_argument(
        "--resume=auto",
        dest="resume",
        action="store_const",
        const="auto",
        help="continue if there is a checkpoint, else start a run; for jobs",
    )
    earlier.add_argument("--overwrite", action="store_true", help="replace an earlier run in output_dir")
    configured.add_allow_change(parser)
    verbosity = parser.add_mutually_exclusive_group()
    verbosity.add_argument("--quiet", action="store_true", help="print warnings and errors only")
    verbosity.add_argument(
        "--verbose", action="store_true", help="print a line for every step, with all its metrics"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check the configuration, then train: here, or in the ranks that it starts. Raises ConfigError."""
    with outliving_terminal(), ExitStack() as starting:
        starting.enter_context(_ends_at_once())
        from megatron_gvpo.checks.preflight import check_interpreter, preflight
        from megatron_gvpo.runs.existing_run import earlier_of, finished_message
        from megatron_gvpo.training.environment import prepare
        from megatron_gvpo.training.ranks import warning

        config = _configured(options)
        earlier = earlier_of(options.resume, options.overwrite)
        allowed = options.allow_change
        ranks = configured.world_size(options)
        cards = preflight(config, "train", ranks, earlier=earlier, allowed=allowed)
        may_be_finished = options.resume and "WORLD_SIZE" not in os.environ
        if may_be_finished and (message := finished_message(config)) is not None:
            return _end_finished_run(config, message)
        check_interpreter(config)
        if configured.is_launcher(options):
            from megatron_gvpo.core.launch import launch

            if text := warning(config, options.nproc):
                say(f"warning: {text}", sys.stderr)
            return launch(options.nproc, options.command_line)
        _warn_of_memory(config, ranks)
        if os.environ.get("RANK", "0") == "0":
            warn_of_learning_rate(config, cards.policy)
        prepare(config.parallel, config.rollout)

        return run_with_model(lambda: _train(config, options, starting))


def _end_finished_run(config: Config, message: str) -> int:
    """Push the export if the run could not do so; return the exit code. The model is not loaded."""
    from megatron_gvpo.runs.hub import HubError, upload_export

    try:
        upload_export(config.checkpoint, Path(config.output_dir))
    except HubError as error:
        return refuse(error, code=1)
    say(message)
    return 0


def _configured(options: argparse.Namespace) -> Config:
    """Load the configuration, and set `options.nproc` where the command chooses it. Raises ConfigError."""
    from megatron_gvpo.training.ranks import choose_ranks

    if options.quiet:
        options.config.append("logging.progress=off")
    if options.verbose:
        options.config.append("logging.progress=all")
    config = configured.load(options)
    if not options.nproc and "WORLD_SIZE" not in os.environ:
        options.nproc, reason = choose_ranks(config)
        if reason and not options.quiet:
            say(reason)
    return config


def _train(config: Config, options: argparse.Namespace, starting: ExitStack) -> None:
    """Load the trainer and the model, close `starting`, and train."""
    with loading("the trainer"), heavy_imports():
        from megatron_gvpo.training.callbacks import Recorder
        from megatron_gvpo.training.trainer import Trainer
    with loading(f"the model {config.model.path}"):
        trainer = Trainer(
            config,
            [Recorder()],
            resume=options.resume,
            overwrite=options.overwrite,
            allow_change=options.allow_change,
            checked=True,
        )
    starting.close()
    trainer.fit()


def _warn_of_memory(config: Config, ranks: int) -> None:
    """Warn if the planner expects an update to need more memory than this machine's GPUs have."""
    from megatron_gvpo.checks.preflight import torch_gpus
    from megatron_gvpo.planner.prediction import excess

    gpus = torch_gpus()
    if gpus and (problem := excess(config, ranks, min(gpu.memory_gib for gpu in gpus))):
        say(f"warning: {problem}", sys.stderr)


def warn_of_learning_rate(config: Config, card: ModelCard) -> None:
    """Warn if the learning rate is far above the usual one for a model of this size, as `check` does."""
    from megatron_gvpo.inspection.rules import inspect_learning_rate

    if (verdict := inspect_learning_rate(config, card)).remedy:
        say(f"warning: optimizer.lr={verdict.sentence}: try {verdict.remedy}", sys.stderr)


def _ends_at_once() -> AbstractContextManager[None]:
    """Until training begins, a signal to stop ends the process with a message, even during an import."""

    def end(number: int, frame: FrameType | None) -> None:
        say("stopped on request before training began; nothing was written", sys.stderr)
        os._exit(128 + number)

    return handled_by(end, stopping_signals())

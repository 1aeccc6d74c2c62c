"""The command line: train, eval, export, convert, serve, recipes, slurm, plan, doctor."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from megatron_gvpo import __version__
from megatron_gvpo.cli import cluster as cluster_commands
from megatron_gvpo.runtime.environment import prepare

if TYPE_CHECKING:
    from megatron_gvpo.config.schema import Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0: done, or stopped by SIGTERM and saved; 1: a checkpoint or the records could not be written, a
    checkpoint not be read, or no rollouts be had; 2: wrong input; 143: stopped by SIGTERM before training
    began, and nothing written.
    """
    options = _parse(arguments)
    with ExitStack() as starting:
        if options.command == "train":
            starting.enter_context(_ends_at_once())
        return _main(options, list(sys.argv[1:] if arguments is None else arguments), starting)


@contextmanager
def _ends_at_once() -> Iterator[None]:
    """Until training begins, SIGTERM and SIGUSR1 end the process with a word, also amid an import."""

    def end(number: int, frame: FrameType | None) -> None:
        message = "stopped on request before training began; nothing was written"
        _say(message, sys.stderr)
        os._exit(128 + number)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _main(options: argparse.Namespace, given: list[str], starting: ExitStack) -> int:
    if options.command == "doctor":
        if options.cluster:
            return cluster_commands.run_checkup(options)
        if problem := cluster_commands.misplaced(options):
            return _refuse(ValueError(problem))
        from megatron_gvpo.cluster import doctor

        return doctor.main(as_json=options.json)
    if options.command == "recipes":
        return _recipes(options)
    if options.command == "convert":
        return _convert(Path(options.source), Path(options.target), options.like)
    from megatron_gvpo.config.parallel_layout import check_layout
    from megatron_gvpo.config.schema import ConfigError, load_config

    try:
        if options.command == "plan":
            from megatron_gvpo.cluster.planner.command import run

            return run(options)
        files = [given for given in options.config if "=" not in given]
        overrides = [given for given in options.config if "=" in given]
        if not files:
            raise ConfigError(
                "no configuration file given: megatron-gvpo train CONFIG.yaml [key.sub=value ...]"
            )
        config = load_config(files, overrides)
        if options.command == "serve":
            from megatron_gvpo.rollout.serve import serve

            return serve(config)
        if options.command == "slurm":
            return cluster_commands.run_slurm(options, config)
        check_layout(config, int(os.environ.get("WORLD_SIZE", options.nproc or 1)))
        _check_command(options, config)
    except ConfigError as error:
        return _refuse(error)
    if options.nproc > 1 and "WORLD_SIZE" not in os.environ:
        from megatron_gvpo.runtime.launch import launch

        return launch(options.nproc, given)
    return _run(options, config, starting)


def _recipes(options: argparse.Namespace) -> int:
    """List the methods, or show one."""
    from megatron_gvpo.algorithms import catalog as methods

    if options.show:
        if options.json or options.markdown:
            return _refuse(ValueError("--json and --markdown are forms of the list; show NAME prints YAML"))
        try:
            text = methods.show(options.name)
        except ValueError as error:
            return _refuse(error)
    elif options.markdown:
        text = methods.markdown()
    else:
        text = (methods.as_json() if options.json else methods.as_text()) + "\n"
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # a reader that has seen enough, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _run(options: argparse.Namespace, config: Config, starting: ExitStack) -> int:
    """The part that loads torch, Megatron and the model."""
    _quieten()
    prepare(config)
    from megatron_gvpo.callbacks import OutputError, Recorder
    from megatron_gvpo.config.schema import ConfigError
    from megatron_gvpo.data.prompts import DataError
    from megatron_gvpo.megatron.checkpoint.sharded import CheckpointError
    from megatron_gvpo.megatron.parallel import shut_down
    from megatron_gvpo.rollout.pool import RolloutError
    from megatron_gvpo.runtime.signals import Interrupted
    from megatron_gvpo.trainer import Trainer

    code = 0
    try:
        if options.command == "train":
            trainer = Trainer(config, [Recorder()], resume=options.resume, overwrite=options.overwrite)
            starting.close()
            trainer.fit()
        else:
            _use(options, config)
    except Interrupted:
        message = "stopped on request; the checkpoint is complete: continue with `train ... --resume`"
        _say(message)
    except (ConfigError, DataError) as error:
        code = _refuse(error)
    except (CheckpointError, OutputError, RolloutError) as error:
        code = _refuse(error, code=1)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    # Not after any other error: it may be this rank's alone, and others be waiting for this one.
    shut_down()
    return code


def _convert(source: Path, target: Path, like: str | None) -> int:
    """Weights from a Hugging Face directory to a Megatron one, or back."""
    _quieten()
    from megatron_gvpo.config.schema import ConfigError

    try:
        if target.exists() and any(target.iterdir()):
            raise ConfigError(f"TARGET={target}: this directory is not empty")
        from_megatron = (source / ".metadata").is_file()
        if from_megatron != (like is not None):
            raise ConfigError(
                f"SOURCE={source} is a Megatron checkpoint: --like DIR names the Hugging Face directory that "
                "the model came from"
                if from_megatron
                else f"SOURCE={source} has no .metadata, so it is no Megatron checkpoint: leave --like out"
            )
        from megatron_gvpo.megatron import parallel
        from megatron_gvpo.megatron.checkpoint import convert
        from megatron_gvpo.megatron.checkpoint.sharded import CheckpointError

        try:
            if like is None:
                convert.to_megatron(source, target)
            else:
                convert.to_hugging_face(source, target, Path(like))
        except CheckpointError as error:
            return _refuse(error, code=1)
        finally:
            parallel.shut_down()
    except ConfigError as error:
        return _refuse(error)
    print(f"{source} written to {target}")
    return 0


def _use(options: argparse.Namespace, config: Config) -> None:
    """Evaluate or export a policy."""
    from megatron_gvpo.megatron.checkpoint.convert import newest_to_hugging_face
    from megatron_gvpo.sampling.generation import evaluate

    if options.command == "export":
        written = newest_to_hugging_face(config, Path(options.out))
        return _say(f"step {written} written to {options.out}")
    _say(json.dumps(evaluate(config, options.resume), indent=2))


def _quieten() -> None:
    """Keep the terminal for the run's own lines; python -W or PYTHONWARNINGS brings warnings back.

    The libraries warn of what they lack on this machine, which `doctor` says better, and of each other.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _check_command(options: argparse.Namespace, config: Config) -> None:
    """Raises ConfigError for what only this command cannot do."""
    from megatron_gvpo.config.output_dir import check_output_dir, refuse_earlier_run
    from megatron_gvpo.config.schema import ConfigError
    from megatron_gvpo.runtime.user_functions import check_source

    if options.command == "train":
        check_output_dir(config)
        if not (options.resume or options.overwrite):
            refuse_earlier_run(config.output_dir)
        if config.logging.wandb_project is not None and find_spec("wandb") is None:
            raise ConfigError(
                f"logging.wandb_project={config.logging.wandb_project}: Weights & Biases is not installed: "
                "pip install wandb, or leave it out"
            )
    if options.command == "eval" and config.data.eval is None:
        raise ConfigError("data.eval is missing: it names the held-out prompts")
    samples = config.algorithm.sampler == "engine" or config.data.eval is not None
    if options.command in ("train", "eval") and samples:
        for i, component in enumerate(config.rewards.components):
            try:
                if component.function is not None:
                    check_source(component.function)
            except ValueError as error:
                raise ConfigError(f"rewards.components.{i}.function={component.function}: {error}") from None
    if options.command == "export" and Path(options.out).exists() and any(Path(options.out).iterdir()):
        raise ConfigError(f"--out {options.out}: this directory is not empty")


def _refuse(error: Exception, code: int = 2) -> int:
    """Say it once a node, since one may lack what others have; in a Slurm job, in every rank's own log."""
    rank, logged = os.environ.get("RANK", "0"), "MEGATRON_GVPO_LOGS" in os.environ
    where = "" if rank == "0" or logged else f" on node {platform.node()} (rank {rank})"
    if os.environ.get("LOCAL_RANK", "0") == "0" or logged:
        print(f"error{where}: {error}", file=sys.stderr, flush=True)
    return code


def _say(text: str, file: Any = None) -> None:
    """By the first rank alone."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=file, flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may also follow options: argparse takes only one unbroken run of positional arguments."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "config") or any(given.startswith("-") for given in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.config += rest
    return options


def _processes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of processes, at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-gvpo", description="RL post-training of Megatron models with GVPO, GPG and relatives."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    configured = argparse.ArgumentParser(add_help=False)
    configured.add_argument(
        "config",
        nargs="+",
        metavar="CONFIG.yaml | key.sub=value",
        help="configuration files, later ones win, and single values on top",
    )
    configured.add_argument(
        "--nproc",
        type=_processes,
        default=0,
        metavar="N",
        help="start N processes on this machine (or use torchrun)",
    )
    train = commands.add_parser("train", parents=[configured], help="post-train a policy")
    earlier = train.add_mutually_exclusive_group()
    earlier.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    earlier.add_argument("--overwrite", action="store_true", help="replace an earlier run in output_dir")
    evaluate = commands.add_parser("eval", parents=[configured], help="pass@k on the held-out prompts")
    evaluate.add_argument("--resume", action="store_true", help="of the newest checkpoint, not of model.path")
    export = commands.add_parser(
        "export", parents=[configured], help="write the newest checkpoint as a Hugging Face one"
    )
    export.add_argument("--out", required=True, metavar="DIR")
    commands.add_parser("serve", parents=[configured], help="run this machine's rollout servers")
    recipes = commands.add_parser("recipes", help="the methods: list them, or show one's composition")
    form = recipes.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true")
    form.add_argument("--markdown", action="store_true", help="as a page of Markdown, with every block")
    one = recipes.add_subparsers(dest="show", metavar="show NAME")
    one.add_parser("show", help="a recipe with every effective value").add_argument("name", metavar="NAME")
    cluster_commands.add(commands, configured)
    convert = commands.add_parser(
        "convert", help="weights from a Hugging Face directory to a Megatron one, or back"
    )
    convert.add_argument("source", metavar="SOURCE", help="a Hugging Face or a Megatron directory")
    convert.add_argument("target", metavar="TARGET")
    convert.add_argument("--like", metavar="DIR", help="back: the Hugging Face directory the model came from")
    doctor = commands.add_parser("doctor", help="what this machine has, and what is missing")
    doctor.add_argument("--json", action="store_true")
    cluster_commands.add_checkup(doctor)
    return parser

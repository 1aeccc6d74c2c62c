"""The command line: train, eval, export, doctor."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_gvpo import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done (or stopped by SIGTERM and saved), 2 wrong input."""
    options = _parser().parse_args(arguments)
    if options.command == "doctor":
        from megatron_gvpo import doctor

        return doctor.main(as_json=options.json)
    from megatron_gvpo.config import ConfigError, check_layout, load_config

    try:
        files = [given for given in options.config if "=" not in given]
        overrides = [given for given in options.config if "=" in given]
        if not files:
            raise ConfigError(
                "no configuration file given: megatron-gvpo train CONFIG.yaml [key.sub=value ...]"
            )
        config = load_config(files, overrides)
        check_layout(config, options.nproc or int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as error:
        return _refuse(error)
    if options.nproc > 1 and "WORLD_SIZE" not in os.environ:
        from megatron_gvpo.launch import launch

        given = list(sys.argv[1:] if arguments is None else arguments)
        return launch(options.nproc, given)
    return _run(options, config)


def _run(options: argparse.Namespace, config: Any) -> int:
    """The part that loads torch, Megatron and the model."""
    from megatron_gvpo.callbacks import Recorder
    from megatron_gvpo.config import ConfigError
    from megatron_gvpo.data.prompts import DataError
    from megatron_gvpo.interrupt import Interrupted
    from megatron_gvpo.megatron.checkpoint import CheckpointError
    from megatron_gvpo.megatron.parallel import shut_down
    from megatron_gvpo.trainer import Trainer

    try:
        if options.command == "train":
            Trainer(config, [Recorder()], resume=options.resume).fit()
        else:
            trainer = Trainer(config, resume=options.command == "export" or options.resume)
            with trainer.parts:
                if options.command == "eval":
                    _print_main(trainer.is_main, json.dumps(trainer.evaluate(), indent=2))
                else:
                    trainer.parts.export_hf(Path(options.out))
                    _print_main(trainer.is_main, f"step {trainer.step} written to {options.out}")
    except Interrupted:
        message = "stopped on request; the checkpoint is complete: continue with `train ... --resume`"
        _print_main(os.environ.get("RANK", "0") == "0", message)
    except (ConfigError, DataError, CheckpointError) as error:
        return _refuse(error)
    finally:
        shut_down()
    return 0


def _refuse(error: Exception) -> int:
    _print_main(os.environ.get("RANK", "0") == "0", f"error: {error}", sys.stderr)
    return 2


def _print_main(is_main: bool, text: str, file: Any = None) -> None:
    if is_main:
        print(text, file=file, flush=True)


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
        type=int,
        default=0,
        metavar="N",
        help="start N processes on this machine (or use torchrun)",
    )
    train = commands.add_parser("train", parents=[configured], help="post-train a policy")
    train.add_argument("--resume", action="store_true", help="continue from the newest complete checkpoint")
    evaluate = commands.add_parser("eval", parents=[configured], help="pass@k on the held-out prompts")
    evaluate.add_argument("--resume", action="store_true", help="of the newest checkpoint, not of model.path")
    export = commands.add_parser(
        "export", parents=[configured], help="write the newest checkpoint as a Hugging Face one"
    )
    export.add_argument("--out", required=True, metavar="DIR")
    doctor = commands.add_parser("doctor", help="what this machine has, and what is missing")
    doctor.add_argument("--json", action="store_true")
    return parser

"""`megatron-gvpo replay`: compute a recorded step of a run again, and name the first number that differs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.terminal import say
from megatron_gvpo.cli.with_model import run_with_model
from megatron_gvpo.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron_gvpo.replay.findings import Finding
    from megatron_gvpo.settings.config import Config


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("replay", help="compute a recorded step again, and name what differs")
    parser.add_argument("run_directory", metavar="RUN", type=Path, help="output directory of a run")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.sub=value",
        help="paths that are others on this machine; keys of `parallel` for a replay on several ranks",
    )
    configured.add_step(parser, "the step (default: the last recorded one)")
    parser.add_argument(
        "--against", type=Path, metavar="OTHER_RUN", help="find the first step at which two runs part"
    )
    parser.add_argument(
        "--without-model", action="store_true", help="leave out what needs the model's weights"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """0: all is equal; 1: something differs; 2: wrong input. Raises ConfigError."""
    from megatron_gvpo.checks.layout import check_layout
    from megatron_gvpo.runs.one_machine import in_layout, load_run

    directory: Path = options.run_directory
    if options.against is not None and (options.step is not None or options.without_model):
        option = "--without-model" if options.step is None else f"--step {options.step}"
        raise ConfigError(f"{option}: --against compares the records of all steps; leave it out")
    options.layout = [text for text in options.overrides if text.startswith("parallel.")]
    if options.layout and (options.against is not None or options.without_model):
        option = "--without-model" if options.against is None else "--against"
        raise ConfigError(f"{options.layout[0]}: {option} computes no model; leave the layout out")
    paths = [text for text in options.overrides if text not in options.layout]
    config = load_run(directory, paths)
    # This refuses a wrong key before heavy libraries are imported.
    divided = in_layout(config, options.layout)
    if options.layout and Path(config.model.path).is_dir():
        check_layout(divided, int(os.environ.get("WORLD_SIZE", "1")))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # on the CPU, whatever the run's layout was
    step = configured.recorded_step(options) if options.against is None else None
    config = load_run(directory, paths, step)
    differs: list[Finding] = []

    def work() -> None:
        if step is None:
            differs.extend(_compare(directory, options.against, config))
        else:
            differs.extend(_replay(directory, step, config, options))

    code = run_with_model(work)
    return code or int(bool(differs))


def _replay(directory: Path, step: int, config: Config, options: argparse.Namespace) -> list[Finding]:
    from megatron_gvpo.replay.run import replay
    from megatron_gvpo.runs.one_machine import check_model_is_there
    from megatron_gvpo.runs.record import changed_files

    for change in changed_files(directory, config):
        say(f"note: a file is not the one that the run has read: {change}")
    if not options.without_model:
        check_model_is_there(config)
    first = replay(
        config, step, not options.without_model, lambda finding: say(line(finding)), options.layout
    )
    if first is None:
        say(f"step {step}: all that was compared is equal to the run's")
        return []
    say(f"first difference: step {first.step}, {first.component}: {first.text}")
    return [first]


def _compare(one: Path, other: Path, config: Config) -> list[Finding]:
    from megatron_gvpo.core.secrets import as_written
    from megatron_gvpo.replay.against import first_parting
    from megatron_gvpo.replay.findings import Tolerances
    from megatron_gvpo.runs.one_machine import load_run
    from megatron_gvpo.runs.settings_diff import changes

    second = load_run(other)
    for change in changes(as_written(config), second):
        if change.key != "output_dir":
            say(f"note: the runs have other settings: {change}")
    steps, finding = first_parting(one, other, Tolerances.of(config.model.dtype))
    if finding is None:
        say(f"steps {steps[0]} to {steps[-1]}, as far as both runs recorded them, are equal")
        return []
    say(f"the runs part in step {finding.step}, {finding.component}: {finding.text}")
    return [finding]


def line(finding: Finding) -> str:
    """A component's line: its name, its outcome, and where it differs or why it was not compared."""
    shown = {"equal": "equal", "differs": "DIFFERS", "not checked": "not checked"}[finding.outcome]
    return f"{finding.component:<14} {shown:<12} {finding.text}".rstrip()

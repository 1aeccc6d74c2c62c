"""`megatron-gvpo verify`: compare an architecture, in tiny sizes, with transformers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.cli.terminal import loading, say
from megatron_gvpo.cli.with_model import run_with_model
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.lazy_imports import heavy_imports
from megatron_gvpo.training.environment import quieten

if TYPE_CHECKING:
    from megatron_gvpo.verify.layout import ParallelLayout
    from megatron_gvpo.verify.measures import Difference
    from megatron_gvpo.verify.run import Result


UNLISTED = "it is not in the list of supported models (docs/howto/new_family.md)"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify", help="compare a tiny model of an architecture with transformers, in every layout"
    )
    parser.add_argument("model", metavar="CONFIG_OR_DIR", help="a config.json, or a directory that has one")
    parser.add_argument(
        "--layouts", metavar="NAMES", help="only these, separated by commas: single,tp2-sp,... (default: all)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit code 0: equal in every layout that the model can have; 1: different; 2: wrong input.

    Raises ConfigError.
    """
    from megatron_gvpo.huggingface.architectures import ARCHITECTURES, REFUSED, check_family
    from megatron_gvpo.verify.shrink import shrink

    where = f"CONFIG_OR_DIR={options.model}"
    config = _read(Path(options.model), where)
    architecture = _architecture(config, where)
    is_supported = architecture in ARCHITECTURES
    if is_supported:
        check_family(config, where)
    tiny = shrink(config, where)
    layouts = _chosen(tiny, options.layouts)
    # Megatron computes in float32 and transformers in float64, both on the CPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"
    quieten()
    with loading("transformers"), heavy_imports():  # report a wrong file before Megatron is imported
        from megatron_gvpo.verify.shrink import check_known

        check_known(config, architecture, where)
    if config.get("quantization_config"):
        say(
            f"note: {where}: quantization_config in config.json is left out: the architecture is compared in "
            "float32, and training needs its weights in bfloat16 or float32",
            sys.stderr,
        )
    equal = False

    def compare() -> None:
        nonlocal equal
        from megatron_gvpo.verify.run import verify

        print(title(), flush=True)
        results = verify(tiny, layouts, where, lambda result: print(row(result), flush=True))
        message, equal = verdict(architecture, results)
        print(message)
        if not is_supported:
            print(f"training refuses it: {REFUSED.get(architecture, UNLISTED)}")

    code = run_with_model(compare)
    return code or int(not equal)


def _architecture(config: dict[str, Any], where: str) -> str:
    """The only architecture of config.json. Raises ConfigError, also for one that takes more than text."""
    from megatron_gvpo.huggingface.architectures import ARCHITECTURES, REFUSED

    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise ConfigError(f"{where}: config.json must name one architecture under architectures")
    if isinstance(config.get("text_config"), dict) and named[0] not in ARCHITECTURES:
        why = REFUSED.get(named[0], "its language model is in text_config, so it takes more than text")
        raise ConfigError(f"{where}: {named[0]}: {why}; this command compares models of text alone")
    return named[0]


def _read(path: Path, where: str) -> dict[str, Any]:
    """Return the config.json at a path, or in the directory there. Raises ConfigError."""
    from megatron_gvpo.core.json_files import read_json_object
    from megatron_gvpo.huggingface.card import ModelCard

    if path.is_file():
        return read_json_object(path)
    if not path.exists():
        raise ConfigError(f"{where}: no such file or directory")
    return ModelCard.read(str(path), key="CONFIG_OR_DIR")


def _chosen(tiny: dict[str, Any], names: str | None) -> list[ParallelLayout]:
    """Return the layouts that are named; without names, all for this machine's cores.

    `tiny`: the shrunk config.json. Raises ConfigError for an unknown name.
    """
    from megatron_gvpo.verify.layout import MOST_RANKS, layouts_for

    if names is None:
        return layouts_for(tiny, os.cpu_count() or 1)
    by_name = {str(layout): layout for layout in layouts_for(tiny, MOST_RANKS)}
    if unknown := [name for name in names.split(",") if name not in by_name]:
        raise ConfigError(
            f"--layouts {names}: no layout {unknown[0]} for this model; there are: {', '.join(by_name)}"
        )
    return [by_name[name] for name in names.split(",")]


# The lines that `megatron-gvpo verify` prints.

_COLUMNS = ("log-probs", "gradients", "norm", "update", "export")


def title() -> str:
    """The line that names the columns."""
    return f"{'layout':<24}" + "".join(f"{name:<12}" for name in _COLUMNS).rstrip()


def row(result: Result) -> str:
    """A layout's line: its differences, and the problem."""
    if result.difference is None:
        return f"{result.layout!s:<24}{'refused' if result.refused else 'FAILS'}: {result.failure}"
    difference: Difference = result.difference
    line = _line(
        str(result.layout),
        [difference.logp, difference.gradient, difference.norm, difference.update],
        "equal" if difference.exported is None else "DIFFERS",
    )
    return line if result.problem is None else f"{line}\n  FAILS: {result.problem}"


def verdict(architecture: str, results: Sequence[Result]) -> tuple[str, bool]:
    """The last line, and True if the architecture is equal in every layout that it can have."""
    equal = [result for result in results if result.problem is None]
    wrong = [str(result.layout) for result in results if result.problem is not None and not result.refused]
    if wrong or not equal:
        where = ", ".join(wrong) or "every layout, which Megatron refuses"
        return f"{architecture}: NOT equal to transformers in {where}", False
    refused = len(results) - len(equal)
    beside = f"; {refused} refused" if refused else ""
    limits, layouts = equal[0].limits, "1 layout" if len(equal) == 1 else f"{len(equal)} layouts"
    return (
        f"{architecture}: equal to transformers in {layouts}{beside} (limits: log-probs "
        f"{limits.logp:.0e}, gradients {limits.gradient:.0e}, norm {limits.norm:.0e}, update "
        f"{limits.update:.0e})",
        True,
    )


def _line(name: str, values: Sequence[float], export: str) -> str:
    return f"{name:<24}" + "".join(f"{value:<12.1e}" for value in values) + export

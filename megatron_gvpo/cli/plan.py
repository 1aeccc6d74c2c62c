"""`megatron-gvpo plan`: memory and step time of a configuration's layout, or of every layout."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.cli import configured
from megatron_gvpo.cli.terminal import loading
from megatron_gvpo.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron_gvpo.planner.command import Planned
    from megatron_gvpo.planner.own_layout import LayoutAnswer
    from megatron_gvpo.settings.config import Config

NODE = 8  # GPUs
PROMPT = 256  # default tokens of a prompt
# A search needs these options; a configuration has their values.
OF_CONFIGURATION = ("model", "gpus", "prompts", "k", "response_length")

# Options that a configuration replaces, and options that only the search reads (--write).
IN_CONFIGURATION = (
    *("model", "prompts", "k", "recipe", "mini_batches", "batch_epochs", "async_steps"),
    *("adapter_rank", "fp8", "offload", "share_prompts", "ep_exchange"),
)
OF_SEARCH = ("image_tokens", "reward_gpus", "speculate", "teacher", "teacher_gpus", "top")

_NUMBER: dict[str, Any] = {"type": configured.integer, "metavar": "N"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict whether a configuration fits and how long a step takes, or both for every layout",
        description="With a configuration: says whether its layout fits, which part is largest, what to "
        "change first, and how long a step takes. Without one: searches all layouts of --gpus for a --model. "
        "All results are predictions; docs/explanation/planner.md reports their accuracy.",
    )
    _add_cluster(parser)
    _add_step(parser)
    _add_method(parser)
    parser.add_argument("--top", default=5, help="number of layouts to show (default: 5)", **_NUMBER)
    parser.add_argument(
        "--write",
        metavar="FILE.yaml",
        help="write the best layout as a configuration file, which is given after the others",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print the plan as JSON")
    shown.add_argument(
        "--rehearse",
        action="store_true",
        help="also rehearse the best three layouts, each about a minute (docs/howto/rehearse.md)",
    )
    defaults = {name: parser.get_default(name) for name in (*IN_CONFIGURATION, *OF_SEARCH)}
    parser.set_defaults(run=run, nproc=0, named=None, over_sampling_prompts=0, defaults=defaults)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    configured.add_config(parser, "parallel.tp=4", nargs="*")
    parser.add_argument(
        "--nodes", help=f"with a configuration: the trainer's nodes of {NODE} GPUs (default: 1)", **_NUMBER
    )
    parser.add_argument("--engine", choices=["sglang", "vllm"], help="the engine of the rollout servers")
    parser.add_argument(
        "--colocated",
        action="store_true",
        help="servers on the trainer's GPUs alone, which take turns with the trainer",
    )
    parser.add_argument("--model", metavar="NAME|DIR|config.json", help="a known model, or one's config.json")
    parser.add_argument(
        "--gpus",
        help="number of GPUs, with those of all servers; with a configuration, the trainer's",
        **_NUMBER,
    )
    parser.add_argument(
        "--reward-gpus",
        default=0,
        help="how many of --gpus serve reward models and judges: the sum of their count x tp (default: 0); "
        "on several nodes they take whole nodes, together with those of --teacher-gpus",
        **_NUMBER,
    )
    parser.add_argument("--gpu", metavar="NAME", help="h800, h100, h200, a100, a800 or b200")


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", help="prompts per step", **_NUMBER)
    parser.add_argument("--k", help="responses per prompt", **_NUMBER)
    parser.add_argument(
        "--response-length",
        metavar="MEAN[,p95=TOKENS][,max=TOKENS]",
        help="tokens of a response",
    )
    parser.add_argument(
        "--prompt-tokens", help=f"mean tokens of a prompt (default: {PROMPT}, or the longest)", **_NUMBER
    )
    parser.add_argument(
        "--image-tokens",
        default=0,
        help="how many of --prompt-tokens stand for images (default: 0)",
        **_NUMBER,
    )


def _add_method(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe",
        default="gvpo",
        metavar="NAME",
        help="the method, for its scoring passes and critic (default: gvpo)",
    )
    parser.add_argument(
        "--mini-batches",
        default=1,
        help="optimizer updates per pass over a step's batch (default: 1)",
        **_NUMBER,
    )
    parser.add_argument(
        "--batch-epochs", default=1, help="passes over a step's batch (default: 1)", **_NUMBER
    )
    parser.add_argument(
        "--async-steps", default=1, help="largest number of batches sampled ahead (default: 1)", **_NUMBER
    )
    parser.add_argument(
        "--adapter-rank",
        default=0,
        help="train adapters of this rank on all linear layers (default: 0, train all weights)",
        **_NUMBER,
    )
    _add_precision(parser)
    _add_savings(parser)
    _add_teacher(parser)


def _add_savings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--share-prompts",
        action="store_true",
        help="plan with train.share_prompts: compute a group's prompt once",
    )
    parser.add_argument(
        "--ep-exchange",
        choices=("a2a", "deepep"),
        default="a2a",
        help="plan with parallel.ep_exchange: how tokens reach other ranks' experts",
    )
    parser.add_argument(
        "--speculate",
        metavar="TOKENS,acceptance=SHARE[,draft=text]",
        help="speculative rollouts: tokens proposed at a time, and the share that is accepted",
    )


def _add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fp8", action="store_true", help="train the layers in FP8")
    parser.add_argument(
        "--offload",
        default=0.0,
        type=configured.decimal,
        metavar="FRACTION",
        help="share of the optimizer's states in host memory (default: 0)",
    )


def _add_teacher(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--teacher",
        metavar="NAME|DIR|config.json",
        help="the teacher, for a recipe that has one, such as opd; held by the trainer",
    )
    parser.add_argument(
        "--teacher-gpus",
        default=0,
        help="how many of --gpus serve the teacher instead (default: 0, the trainer holds it)",
        **_NUMBER,
    )


def run(options: argparse.Namespace) -> int:
    """Print the plan, as a table or as JSON; 1 if the layout does not fit. Raises ConfigError."""
    if options.config:
        return _of_configuration(options)
    if missing := [name for name in (*OF_CONFIGURATION, "gpu") if getattr(options, name) is None]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ConfigError(f"{names}: missing; or give a configuration: megatron-gvpo plan CONFIG.yaml")
    if options.nodes is not None:
        raise ConfigError(f"--nodes {options.nodes}: goes with a configuration; --gpus counts all GPUs")
    if options.prompt_tokens is None:
        options.prompt_tokens = PROMPT
    with loading("the methods"):
        from megatron_gvpo.planner.command import run as plan
    planned = plan(options)
    return _rehearse(planned, options) if options.rehearse else 0


def _rehearse(planned: Planned, options: argparse.Namespace) -> int:
    from megatron_gvpo.rehearsal import of_plan
    from megatron_gvpo.rehearsal.process import RankFailedError
    from megatron_gvpo.rehearsal.progress import StuckRankError

    try:
        return of_plan.show(planned, options)
    except (RankFailedError, StuckRankError) as error:
        print(error, file=sys.stderr)
        return 1


def _of_configuration(options: argparse.Namespace) -> int:
    """Answer for the layout of a configuration; with --write, also search for the best one.

    Returns 0 if the layout fits, or a layout that fits was written; else 1.
    """
    _check_options(options)
    world = _world(options)
    if options.engine is not None:
        options.config.append(f"rollout.engine={options.engine}")
    if options.colocated:
        options.config += ["rollout.servers.colocated=true", "rollout.weights.transport=shared"]
    config = configured.load(options)
    with loading("the methods"):
        from megatron_gvpo.planner import workload
        from megatron_gvpo.planner.own_layout import answer
        from megatron_gvpo.rehearsal.made_model import with_directories
    gpu = workload.gpu(options.gpu or "h100")
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        local = with_directories(config, Path(folder))
        lengths = _lengths(options, config)
        options.prompt_tokens = _prompt_tokens(options, config)
        parsed = workload.parse_lengths(lengths, config.rollout.max_tokens)
        result = answer(local, world, gpu, parsed, options.prompt_tokens)
        print(json.dumps(result.to_dict(), indent=2)) if options.json else _print(result, config, options)
        options.response_length = str(parsed)
        if options.write is not None:
            _search(options, local, config.model.path, world)
    return 0 if result.fits or options.write is not None else 1


def _check_options(options: argparse.Namespace) -> None:
    """Raises ConfigError for options that do not go with a configuration, or with each other."""
    for name, default in options.defaults.items():
        if getattr(options, name) == default:
            continue
        option = f"--{name.replace('_', '-')}"
        if name in IN_CONFIGURATION:
            raise ConfigError(f"{option}: the configuration says it; leave it out, or give no configuration")
        if options.write is None:
            raise ConfigError(
                f"{option}: with a configuration only the search reads it: give --write, too, or leave it out"
            )
    if options.rehearse:
        raise ConfigError(f"--rehearse: megatron-gvpo rehearse {options.config[0]} rehearses a configuration")
    if options.json and options.write is not None:
        raise ConfigError("--json and --write: with a configuration, give one of them")
    if options.nodes is not None and options.gpus is not None:
        raise ConfigError("--nodes and --gpus: give one of them")


def _world(options: argparse.Namespace) -> int:
    """Return the number of the trainer's GPUs, from --nodes or --gpus. Raises ConfigError for a wrong one."""
    nodes = 1 if options.nodes is None else options.nodes
    world = NODE * nodes if options.gpus is None else options.gpus
    if not 1 <= world <= 65536:
        option, most = (
            (f"--nodes {nodes}", 65536 // NODE) if options.gpus is None else (f"--gpus {world}", 65536)
        )
        raise ConfigError(f"{option}: must be from 1 to {most}")
    return world


def _lengths(options: argparse.Namespace, config: Config) -> str:
    """The lengths of responses: those of --response-length, or an assumption from the longest."""
    longest = config.rollout.max_tokens
    return options.response_length or f"{longest * 0.4:g},p95={longest},max={longest}"


def _prompt_tokens(options: argparse.Namespace, config: Config) -> int:
    """The mean tokens of a prompt. Raises ConfigError for more than the configuration lets a prompt have."""
    limit, tokens = config.data.max_prompt_tokens, options.prompt_tokens
    if tokens is None:
        return PROMPT if limit is None else min(PROMPT, limit)
    if limit is not None and tokens > limit:
        raise ConfigError(f"--prompt-tokens {tokens}: prompts have at most data.max_prompt_tokens={limit}")
    return int(tokens)


def _print(result: LayoutAnswer, config: Config, options: argparse.Namespace) -> None:
    """Print the memory, whether it fits or which change would, and the time of a step."""
    _print_memory(result, config)
    if result.seconds is not None:
        phases = {name: took for name, took in result.seconds.items() if took and name != "step"}
        listed = ", ".join(f"{name} {took:.1f}" for name, took in phases.items())
        print(f"a step takes about {result.seconds['step']:.0f} s (predicted): {listed}")
    if options.response_length is None:
        print(f"--response-length: not given; {result.response_tokens:g} tokens on average are assumed")


def _print_memory(result: LayoutAnswer, config: Config) -> None:
    parts = ", ".join(f"{name} {gib:.1f}" for name, gib in result.parts_gib.items())
    least = "at least " if result.is_lower_bound else ""
    largest = max(result.parts_gib, key=lambda name: result.parts_gib[name])
    print(f"{config.model.path} on {result.gpus} x {result.gpu}, GiB on the fullest GPU (predicted): {parts}")
    if result.fits:
        print(f"fits: {least}{result.needed_gib:.1f} of {result.usable_gib:.1f} usable GiB")
        if result.is_lower_bound:
            print("what parallel.recompute keeps of the activations comes on top: see megatron-gvpo rehearse")
        return
    if result.needed_gib > result.usable_gib:
        print(
            f"does not fit: needs {least}{result.needed_gib:.1f} GiB, and {result.usable_gib:.1f} are "
            f"usable; the largest part is {largest}. What to change, the cheapest first:"
        )
    for change in result.changes:
        print(
            f"  {change.settings}: {change.gib:.1f} GiB, {'fits' if change.fits else 'is not enough alone'}"
        )
    if result.server is not None:
        print(f"does not fit: {result.server}")


def _check_room(config: Config, world: int) -> None:
    """Raises ConfigError if the servers that a run starts for itself have no GPUs beside its ranks."""
    started = config.started_gpus()
    taken = sum(started.values())
    if not taken or world + taken <= NODE:
        return
    fewer = f"give --gpus {NODE - taken}, or start" if taken < NODE else "start"
    raise ConfigError(
        f"--write: the run starts servers on {taken} GPUs ({', '.join(started)}) beside its ranks, and "
        f"{world} ranks leave none on nodes of {NODE}: {fewer} these servers elsewhere and give their urls"
    )


def _search(options: argparse.Namespace, config: Config, name: str, world: int) -> None:
    """Search the best layout for the configuration's training, and write it for the same engine."""
    from megatron_gvpo.planner.command import run as plan

    _check_room(config, world)
    rollout, train = config.rollout, config.train
    options.model, options.gpus, options.gpu = config.model.path, world, options.gpu or "h100"
    options.engine = rollout.engine if rollout.uses_servers else options.engine
    options.colocated = options.colocated or rollout.servers.colocated
    options.prompts, options.k = train.prompts_per_step, rollout.n
    options.mini_batches, options.batch_epochs = train.mini_batches, train.batch_epochs
    options.recipe = config.algorithm.recipe or options.recipe
    options.async_steps, options.over_sampling_prompts = rollout.async_steps, rollout.over_sampling_prompts
    options.adapter_rank = 0 if config.model.adapter is None else config.model.adapter.rank
    options.fp8, options.share_prompts = config.model.fp8 is not None, train.share_prompts is True
    options.offload = config.optimizer.offload_fraction
    options.ep_exchange = config.parallel.ep_exchange
    options.named = name
    plan(options)

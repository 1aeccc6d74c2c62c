"""`megatron-gvpo plan`: finds the best layout and outputs it as a table, JSON or a config file."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.core.named_file import check_named_file, write_named_file
from megatron_gvpo.planner import architecture, partial_rollouts, push_time, workload
from megatron_gvpo.planner.partial_rollouts import PartialRollouts
from megatron_gvpo.planner.search import Candidate, Plan, search
from megatron_gvpo.planner.sharing import Sharing, sharing
from megatron_gvpo.planner.step_time import rollout_seconds, served_seconds
from megatron_gvpo.planner.workload import NODE, Layout, method
from megatron_gvpo.settings.parallel import MLPS_AND_EXPERTS

if TYPE_CHECKING:
    from rich.console import Console

PREDICTED = "# Predicted, not measured:"  # every config file written by --write begins with this

LARGEST = 10**7  # limit for any count on the command line


@dataclass(frozen=True)
class Planned:
    """The result of the search, and the model and the work that the options describe."""

    plan: Plan
    model: architecture.Architecture
    work: workload.Workload
    saved: Sharing | None  # the savings of shared prompts; None if the model cannot share them
    trained: int  # GPUs without those of reward models', judges' and a teacher's servers


def run(options: argparse.Namespace) -> Planned:
    """Finds and prints the plan. Raises ConfigError for a wrong option or if nothing can run."""
    planned = _planned(options)
    plan, model, saved = planned.plan, planned.model, planned.saved
    if options.write:
        target = (Path(options.write), f"--write {options.write}", "a plan", PREDICTED)
        write_named_file(*target, overlay(plan.best[0], model.layers, planned.work, options))
    if options.json:
        choices = _partial_rollouts(plan.best[0], model, workload.gpu(options.gpu), planned.work)
        more = {
            "server_gpus": options.gpus - planned.trained,
            "partial_rollouts": [asdict(choice) for choice in choices],
        }
        print(json.dumps(to_dict(plan, options, model, saved) | more, indent=2))
    else:
        _print(plan, options, model, planned.work, saved)
    return planned


def _planned(options: argparse.Namespace) -> Planned:
    """Checks the options and searches. Raises ConfigError."""
    _check_counts(options)
    gpus = options.gpus - _server_gpus(options)
    if gpus > NODE and gpus % NODE:
        raise ConfigError(
            f"--gpus {options.gpus}: more than one node of {NODE} GPUs; give a multiple of {NODE}"
        )
    if options.write:
        check_named_file(Path(options.write), f"--write {options.write}", "a plan", PREDICTED)
    model, gpu = architecture.load(options.model), workload.gpu(options.gpu)
    _check_adapters(options, model)
    model = replace(model, adapter_rank=options.adapter_rank)
    _check_images(options, model)
    work = _workload(options, gpu)
    saved = sharing(model, work)
    if options.share_prompts and saved is None:
        what = "latent attention" if model.latent else "a sliding window"
        raise ConfigError(f"--share-prompts: a model with {what} cannot share prompts; leave it out")
    plan = search(
        model,
        gpu,
        gpus,
        work,
        ahead=options.async_steps,
        fp8=options.fp8,
        offload=options.offload,
        colocated=options.colocated,
    )
    return Planned(plan, model, work, saved, gpus)


def _check_counts(options: argparse.Namespace) -> None:
    """Raises ConfigError for a number that is out of its range, whatever the model."""
    for name in ("gpus", "prompts", "k", "prompt_tokens", "mini_batches", "batch_epochs", "top"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
        if getattr(options, name) > LARGEST:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at most {LARGEST}")
    if options.async_steps < 0:
        raise ConfigError(f"--async-steps {options.async_steps}: must be at least 0")
    if options.async_steps > 100:
        raise ConfigError("--async-steps: must be at most 100, as rollout.async_steps")
    if not 0 <= options.offload <= 1:
        raise ConfigError(f"--offload {options.offload}: must be a fraction from 0 to 1")
    if options.prompts % options.mini_batches:
        raise ConfigError(
            f"--mini-batches {options.mini_batches} does not divide --prompts {options.prompts}"
        )


def _check_adapters(options: argparse.Namespace, model: architecture.Architecture) -> None:
    if not 0 <= options.adapter_rank <= 4096:
        raise ConfigError(f"--adapter-rank {options.adapter_rank}: must be from 1 to 4096, or 0 for none")
    if options.adapter_rank and options.fp8:
        raise ConfigError("--adapter-rank with --fp8: adapters on FP8 layers have not been proven")
    if options.adapter_rank and not model.adapted:
        raise ConfigError(f"--adapter-rank with --model {options.model}: adapters on it have not been proven")


def _workload(options: argparse.Namespace, gpu: architecture.Gpu) -> workload.Workload:
    """Returns a step's work. Raises ConfigError if method and options do not go together."""
    lengths = workload.parse_lengths(options.response_length)
    asks = method(options.recipe, options.mini_batches)
    if asks.compares and options.k < 2:
        raise ConfigError(
            f"--k {options.k}: must be at least 2; --recipe {options.recipe} compares the responses to a "
            "prompt"
        )
    return workload.Workload(
        options.prompts,
        options.k,
        options.prompt_tokens,
        lengths,
        options.mini_batches,
        asks.scoring,
        asks.critic,
        options.batch_epochs,
        options.share_prompts,
        workload.parse_speculation(options.speculate) if options.speculate else None,
        options.image_tokens,
        workload.planned_teacher(options, asks, gpu, options.prompt_tokens + lengths.maximum),
        options.ep_exchange,
    )


def _server_gpus(options: argparse.Namespace) -> int:
    """Returns the GPUs that servers of reward models, judges and a teacher take from the others.

    A run starts them on the GPUs behind its own, on one machine; on several they have nodes of their own.
    Raises ConfigError if they leave none.
    """
    counts = {"--reward-gpus": options.reward_gpus, "--teacher-gpus": options.teacher_gpus}
    for name, count in counts.items():
        if count < 0:
            raise ConfigError(f"{name} {count}: must be at least 0")
    wanted = sum(counts.values())
    taken: int = wanted if options.gpus <= NODE else math.ceil(wanted / NODE) * NODE
    if taken >= options.gpus:
        options_given = " and ".join(f"{name} {count}" for name, count in counts.items() if count)
        rounding = f", which are {taken} in whole nodes" if taken > wanted else ""
        raise ConfigError(f"{options_given}{rounding}: --gpus {options.gpus} leaves none to train on")
    return taken


def _check_images(options: argparse.Namespace, model: architecture.Architecture) -> None:
    """Raises ConfigError for images of a model that takes none, and for settings that images exclude."""
    count = options.image_tokens
    if not 0 <= count <= options.prompt_tokens:
        raise ConfigError(
            f"--image-tokens {count}: must be from 0 to --prompt-tokens {options.prompt_tokens}"
        )
    if model.vision is None:
        if count:
            raise ConfigError(f"--image-tokens {count}: --model {options.model} takes no images")
        return
    refused = {
        "--adapter-rank": options.adapter_rank,
        "--fp8": options.fp8,
        "--share-prompts": options.share_prompts,
        "--teacher": options.teacher is not None,
        f"--recipe {options.recipe}": method(options.recipe, options.mini_batches).critic,
    }
    if used := [name for name, value in refused.items() if value]:
        raise ConfigError(f"{used[0]}: not supported with a model that takes images; leave it out")


def overlay(chosen: Candidate, layers: int, work: workload.Workload, options: argparse.Namespace) -> str:
    """Returns the layout as the YAML text of a config file. `layers`: layers of the model.

    Files are merged key by key, so the text has every key of the layout, those with their defaults, too.
    """
    layout = chosen.layout
    train = {"prompts_per_step": work.prompts, "mini_batches": work.mini_batches}
    train |= {"batch_epochs": work.batch_epochs} if work.batch_epochs > 1 else {}
    train["share_prompts"] = work.share_prompts
    train["max_tokens_per_micro_batch"] = chosen.micro_tokens
    is_deepep = work.ep_exchange == "deepep" and layout.ep > 1
    values: dict[str, Any] = {
        "parallel": parallel(layout, layers) | {"ep_exchange": "deepep" if is_deepep else "a2a"},
        "rollout": _rollout(layout, work, options.engine or "sglang") | _carried(layout, options),
        "train": train,
    }
    if layout.fp8:
        values["model"] = {"fp8": {"recipe": "mxfp8" if options.gpu.lower().startswith("b") else "blockwise"}}
    if options.adapter_rank:
        values.setdefault("model", {})["adapter"] = {
            "rank": options.adapter_rank,
            "alpha": options.adapter_rank,
        }
    values["optimizer"] = {"offload_fraction": layout.offload}
    if (taught := work.teacher) is not None:
        server = None if taught.is_on_trainer else {"tp": taught.tp, "count": taught.gpus // taught.tp}
        # On several machines the trainer fills the one on which the run would start servers.
        if taught.is_on_trainer or options.gpus <= NODE:
            values["teacher"] = {"server": server}
    text = yaml.safe_dump(values, sort_keys=False)
    return (
        f"{PREDICTED} {chosen.seconds.step:.0f} s a step on {options.gpus} x {options.gpu} "
        f"for {options.named or options.model}.\n# megatron-gvpo {_launch(layout, options.gpus)}\n{text}"
    )


def _rollout(layout: Layout, work: workload.Workload, engine: str) -> dict[str, Any]:
    """Return the keys of the section `rollout` that place the servers, and a step's sizes."""
    own = layout.rollout_gpus or layout.gpus
    servers: dict[str, Any] = {"tp": layout.rollout_tp, "count": max(1, min(NODE, own) // layout.rollout_tp)}
    servers |= {"nodes": max(1, layout.rollout_tp // NODE), "urls": []}
    section: dict[str, Any] = {"engine": engine, "n": work.k, "max_tokens": work.lengths.maximum}
    section["servers"] = servers | {"colocated": not layout.rollout_gpus}
    section["weights"] = {"transport": layout.transport}
    if work.speculation is not None:
        method = "ngram" if work.speculation.from_text else "mtp"
        section["speculation"] = {"method": method, "tokens": work.speculation.tokens}
    return section | {"async_steps": layout.async_steps}


def _carried(layout: Layout, options: argparse.Namespace) -> dict[str, int]:
    """The keys of partial rollouts, which only colocated servers need."""
    if layout.rollout_gpus or not options.over_sampling_prompts:
        return {"over_sampling_prompts": 0}
    return {"over_sampling_prompts": options.over_sampling_prompts, "async_steps": options.async_steps}


def _launch(layout: Layout, gpus: int) -> str:
    """The command that starts the run; `gpus`: all of its GPUs, those of servers included."""
    if layout.gpus < gpus <= NODE:  # the run starts its servers behind its ranks
        return f"train CONFIG.yaml THIS.yaml --nproc {layout.gpus}"
    nodes = f"--nodes {math.ceil(layout.gpus / NODE)}"
    if layout.gpus < NODE:
        nodes += f" --ranks-per-node {layout.gpus}"
    if layout.rollout_gpus:
        nodes += f" --rollout-nodes {math.ceil(layout.rollout_gpus / NODE)}"
    return f"slurm CONFIG.yaml THIS.yaml {nodes}"


def parallel(layout: Layout, layers: int) -> dict[str, Any]:
    """Returns the keys of the section `parallel` that divide a model. `layers`: layers of the model."""
    keys: dict[str, Any] = {"tp": layout.tp, "sequence_parallel": layout.tp > 1}
    keys |= {key: getattr(layout, key) for key in ("pp", "vpp", "cp", "ep", "etp")}
    stages = layout.stage_layers(layers)
    keys["stage_layers"] = list(stages) if len(set(stages)) > 1 else None
    keys["recompute"] = "full" if layout.recompute else "none"
    keys |= {"recompute_layers": None, "recompute_modules": list(MLPS_AND_EXPERTS)}
    return keys | {"offload_layers": 0, "offload_modules": []}


def to_dict(
    plan: Plan, options: argparse.Namespace, model: architecture.Architecture, saved: Sharing | None
) -> dict[str, Any]:
    """Returns the plan in plain types, for --json."""
    return {
        "predicted": True,
        "model": options.model,
        "parameters": model.parameters,
        "adapter_parameters": model.adapters,
        "teacher": options.teacher,
        "gpus": options.gpus,
        "gpu": options.gpu,
        "recipe": options.recipe,
        "considered": plan.considered,
        "best": [candidate.to_dict() for candidate in plan.best[: options.top]],
        "losers": plan.losers,
        "impossible": plan.impossible,
        "shared_prompts": None if saved is None else saved.to_dict(),
    }


def _print(
    plan: Plan,
    options: argparse.Namespace,
    model: architecture.Architecture,
    work: workload.Workload,
    saved: Sharing | None,
) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if Console().is_terminal else 180)
    _print_task(console, options, model, work)
    console.print(f"All numbers are predicted. {plan.considered} layouts considered; the best:\n")
    _print_table(console, plan.best[: options.top], work)
    _print_best(console, plan.best[0], options, model, work, saved)
    for title, lines in (("why not otherwise", plan.losers), ("what cannot run", plan.impossible)):
        if lines:
            console.print(f"\n{title} (predicted)")
        for line in lines:
            console.print(f"  {line}")


def _print_task(
    console: Console, options: argparse.Namespace, model: architecture.Architecture, work: workload.Workload
) -> None:
    console.print(
        f"{options.named or options.model}: {model.parameters:,} parameters. {options.gpus} x {options.gpu}, "
        f"{work.responses} responses a step of {work.lengths.mean:g} tokens "
        f"(95 % under {work.lengths.p95:g}, at most {work.lengths.maximum}), {work.updates} update(s) a step."
    )
    if taken := _server_gpus(options):
        where = "behind the trainer's" if options.gpus <= NODE else "of nodes of their own (servers.urls)"
        console.print(
            f"{taken} of the GPUs, {where}, are for the servers of reward models, judges or the teacher: "
            f"{options.gpus - taken} train and generate."
        )
    if model.adapter_rank:
        console.print(
            f"Adapters of rank {model.adapter_rank} train: {model.adapters:,} parameters. A push sends "
            f"{2 * model.parameters / architecture.GIB:.3g} GiB merged, "
            f"or {2 * model.adapters / 2**20:.3g} MiB of adapters alone."
        )


def _print_table(console: Console, candidates: Sequence[Candidate], work: workload.Workload) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    taught = ("teacher",) if work.teacher is not None else ()
    phases = ("step", "rollout", "scoring", *taught, "training", "optimizer", "sync", "waiting")
    for column in ("predicted layout", *(f"{phase} s" for phase in phases), "GiB", "MFU", "micro-batch"):
        table.add_column(column, justify="left" if column == "predicted layout" else "right")
    for candidate in candidates:
        took, used = candidate.seconds.by_phase(), candidate.memory.in_gib()
        cells = [f"{took[phase]:.1f}" for phase in phases]
        table.add_row(
            candidate.layout.name,
            *cells,
            f"{used['total']:.0f}",
            f"{candidate.mfu:.0%}",
            f"{candidate.micro_tokens} tokens",
        )
    console.print(table)


def _print_best(
    console: Console,
    best: Candidate,
    options: argparse.Namespace,
    model: architecture.Architecture,
    work: workload.Workload,
    saved: Sharing | None,
) -> None:
    parts = ", ".join(
        f"{name} {value:.1f}" for name, value in best.memory.in_gib().items() if value and name != "total"
    )
    console.print(f"\npredicted memory of the first, in GiB on its fullest GPU: {parts}")
    if best.layout.offload:
        console.print(f"and in host memory, for the optimizer: {best.host_gib:.0f} GiB a node")
    if work.teacher is not None:
        console.print(_of_teacher(work.teacher, best, options, work))
    if saved is not None:
        console.print(f"\n{saved.text(work.share_prompts)}")
    if work.speculation is not None:
        plain = rollout_seconds(
            model,
            workload.gpu(options.gpu),
            best.layout.engines,
            best.layout.rollout_tp,
            replace(work, speculation=None),
        )
        console.print(
            f"\nspeculative rollouts: {best.seconds.rollout:.1f} s in place of {plain:.1f} s, with "
            f"{work.speculation.length:.2f} tokens a verification (predicted)"
        )
    gpu = workload.gpu(options.gpu)
    for choice in _partial_rollouts(best, model, gpu, work):
        console.print(_of_partial_rollouts(best, choice))
    names = push_time.possible(model, best.layout)
    took = {name: push_time.TRANSPORTS[name](model, gpu, best.layout).seconds for name in names}
    chosen = took.pop(best.layout.transport)
    slower = "".join(f", and {seconds:.1f} s with {name}" for name, seconds in took.items())
    console.print(
        f"predicted for a weight push: {chosen:.1f} s with "
        f"rollout.weights.transport={best.layout.transport}, which is counted above{slower}"
    )
    if not best.layout.rollout_gpus:
        console.print("colocated: assumes that trainer and servers use the GPU's memory in turn")


def _partial_rollouts(
    best: Candidate, model: architecture.Architecture, gpu: architecture.Gpu, work: workload.Workload
) -> list[PartialRollouts]:
    """Returns predictions for partial rollouts of the layout's colocated servers; none for other servers."""
    if best.layout.rollout_gpus:
        return []
    return partial_rollouts.choices(model, gpu, best.layout.engines, best.layout.rollout_tp, work)


def _of_partial_rollouts(best: Candidate, choice: PartialRollouts) -> str:
    """Returns a line with the time that partial rollouts save."""
    rollout, step = best.seconds.rollout, best.seconds.step
    return (
        f"with rollout.over_sampling_prompts={choice.prompts} and rollout.async_steps={choice.oldest}: "
        f"rollouts of {choice.seconds:.1f} s in place of {rollout:.1f} s, a step of "
        f"{step - rollout + choice.seconds:.0f} s in place of {step:.0f} s; {choice.carried:.0%} of the "
        "responses from several versions of the weights (predicted)"
    )


def _of_teacher(
    taught: workload.PlannedTeacher, best: Candidate, options: argparse.Namespace, work: workload.Workload
) -> str:
    """Returns a line with the teacher's location, and the memory and time that it takes."""
    name = f"teacher {options.teacher}, {taught.model.parameters:,} parameters: "
    if taught.is_on_trainer:
        return (
            f"{name}held by the trainer; {best.teacher_host_gib:.0f} GiB of host memory a node between passes"
        )
    took = served_seconds(taught, workload.gpu(options.gpu), work)
    text = (
        f"{name}{taught.gpus // taught.tp} server(s) of {taught.tp} GPU(s) score the responses in "
        f"{took:.1f} s; the trainer scores its own meanwhile"
    )
    if options.gpus > NODE:
        text += "; the run starts none beside a whole machine of ranks, so give their teacher.server.urls"
    return text

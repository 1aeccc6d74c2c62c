"""Rank function of test_resharding.py: train and save under one layout, continue under others."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import shutil
import signal
import sys
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from helpers.cases.gradient_cases import small
from helpers.distributed import forget_layout, run_number
from helpers.workers.gradient_worker import Case, Layout, config_of, sizes_of

MOMENTS = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Continuation:
    """Contents of a checkpoint under Hugging Face names, and the results of two updates after it."""

    states: dict[str, dict[str, Tensor]]  # "weights", and the optimizer's moments by MOMENTS
    losses: list[float]
    grad_norms: list[float]
    lrs: list[float]
    weights: dict[str, Tensor]


def run(directory: str) -> None:
    """Run one part of work.pt: [(layout, layout that saves, case), ...]. The layout that saves continues,
    too.

    Rank 0 writes {layout}-of-{layout that saves}-{model}.pt.
    """
    from megatron_gvpo.megatron.checkpoint.directory import complete_checkpoints
    from megatron_gvpo.megatron.checkpoint.load import load_policy
    from megatron_gvpo.megatron.checkpoint.save import save_policy
    from megatron_gvpo.megatron.policy import Policy

    folder = Path(directory)
    for layout, source, case in torch.load(folder / "work.pt", weights_only=False)[run_number()]:
        name = f"{source}-{case.model}"
        with sizes_of(layout):
            policy = Policy.of(config_of(case, layout, folder))
            if layout == source:
                policy.update(case.rows, at_step_start=False)
                save_policy(folder / name, 1, policy, {"mine": 7}, keep=1)
            else:
                assert load_policy(complete_checkpoints(folder / name)[-1], policy)["mine"] == 7
            continued = _continued(policy, case)
        if dist.get_rank() == 0:
            torch.save(continued, folder / f"{layout}-of-{name}.pt")
        forget_layout()


def _continued(policy: Any, case: Case) -> Continuation:
    states = {"weights": _copy(policy), **{name: _moments(policy, name) for name in MOMENTS}}
    results = [policy.update(case.rows, at_step_start=False) for _ in range(2)]
    return Continuation(
        states,
        losses=[result.metrics["loss"] for result in results],
        grad_norms=[result.update.grad_norm for result in results],
        lrs=[result.update.lr for result in results],
        weights=_copy(policy),
    )


def _copy(policy: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


@torch.no_grad()
def _moments(policy: Any, name: str) -> dict[str, Tensor]:
    """Export one kind of the optimizer's tensors, in place of the weights, under Hugging Face names."""
    policy.model.finish_param_gather()
    parameters = list(policy.model.weights())
    weights = [p.clone() for p in parameters]
    runs = []  # collected before anything is overwritten, because fp32 masters are the weights
    for optimizer in policy.optimizer.megatron.chained_optimizers:
        for parameter in optimizer.model_param_gbuf_map:
            run = optimizer._get_model_param_range_map(parameter)["param"]
            states = optimizer._get_main_param_and_optimizer_states(parameter)
            if "master_param" in states:  # the master is in host memory, apart from the weight
                assert torch.equal(states["param"], states["master_param"])
            runs.append((parameter, run, states[name].clone()))
    for parameter in parameters:
        parameter.zero_()
    for parameter, run, value in runs:
        parameter.view(-1)[run.start : run.end] = value
    for chunk in policy.model.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            dist.all_reduce(buffer.param_data, group=buffer.data_parallel_group)
    moments = _copy(policy)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
    return moments


def killed_while_saving(directory: str) -> None:
    """Kill the process in the middle of a background save."""
    from megatron_gvpo.megatron.checkpoint.directory import complete_checkpoints
    from megatron_gvpo.megatron.checkpoint.save import save_policy
    from megatron_gvpo.megatron.policy import Policy

    folder = Path(directory)
    case = torch.load(folder / "case.pt", weights_only=False)
    policy = Policy.of(config_of(case, Layout(1), folder))
    policy.update(case.rows, at_step_start=False)
    save_policy(folder / "killed", 1, policy, {}, keep=1, asynchronous=True)
    policy.update(case.rows, at_step_start=False)
    assert [path.name for path in complete_checkpoints(folder / "killed")] == ["step_00000001"]
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    save_policy(folder / "killed", 2, policy, {}, keep=1, asynchronous=True)
    policy.model.finish_background_work()
    raise AssertionError("a file grew beyond its limit")


def saved_again(directory: str) -> None:
    """Save a step a second time, and test a kill before every change on disk.

    Each test copies the directory, loads from the copy, and saves again there; the results are recorded.
    """
    from megatron_gvpo.megatron.checkpoint.load import load_newest, load_policy
    from megatron_gvpo.megatron.checkpoint.save import save_policy
    from megatron_gvpo.megatron.policy import Policy

    folder = Path(directory)
    root, instants = folder / "again", folder / "instants"
    case = torch.load(folder / "case.pt", weights_only=False)
    policy = Policy.of(config_of(case, Layout(1), folder))
    weights = []
    copying = False

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal copying
        changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir") or (
            event == "open" and str(arguments[0]).startswith(str(root)) and arguments[2] & os.O_ACCMODE
        )
        if changes and len(weights) == 2 and not copying:
            copying = True
            shutil.copytree(root, instants / f"{len(list(instants.iterdir())):04}")
            copying = False

    instants.mkdir()
    sys.addaudithook(look)  # Python calls the hook before it changes a file
    for number in (1, 2):
        policy.update(case.rows, at_step_start=False)
        weights.append(_copy(policy))
        save_policy(root, 1, policy, {"mine": number}, keep=1)
    weights.append({})  # no further copies are needed
    results = []
    for instant in [*sorted(instants.iterdir()), root]:
        loaded = load_newest(instant, lambda path: load_policy(path, policy)["mine"]) or 0
        expected = weights[loaded - 1] if loaded else {}
        same = all(torch.equal(tensor, expected[name]) for name, tensor in policy.weights() if loaded)
        names = []
        for step in (1, 2):
            save_policy(instant, step, policy, {"mine": 3}, keep=1)
            names += sorted(path.name for path in instant.iterdir())
        results.append((loaded, same, names))
    torch.save(results, folder / "again.pt")


def fails_on_one_rank(directory: str) -> None:
    """Let one rank fail in each part of a save, then of a load; every rank writes the error that it
    raised.
    """
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace

    from megatron_gvpo.core.errors import CheckpointError
    from megatron_gvpo.megatron.checkpoint import load, save, state
    from megatron_gvpo.megatron.checkpoint.load import load_newest, load_policy
    from megatron_gvpo.megatron.checkpoint.save import save_policy
    from megatron_gvpo.megatron.policy import Policy

    folder, rank = Path(directory), dist.get_rank()
    case = torch.load(folder / "case.pt", weights_only=False)
    policy = Policy.of(config_of(case, Layout(2), folder))
    save_policy(folder / "alone", 1, policy, {"mine": 7}, keep=1)
    newest = load_newest(folder / ("alone", "not mounted")[rank], lambda path: path)
    assert newest is not None and newest.name == "step_00000001", "what rank 0 sees"
    heard = []

    def hear(action: Callable[..., Any], *arguments: Any) -> None:
        try:
            action(*arguments)
        except CheckpointError as error:
            heard.append(str(error))

    model = policy.model.chunks[0].module
    owners = {"sharded_state_dict": model, "load_state_dict": model, "save": save.Writer}
    for part, failing in PARTS_OF_A_SAVE:
        with _failing(owners.get(part, save), part) if rank == failing else contextlib.nullcontext():
            hear(save_policy, folder / "alone", 2, policy, {}, 1)
    for part, call, failing in PARTS_OF_A_LOAD:
        with _failing(owners.get(part, load), part, call) if rank == failing else contextlib.nullcontext():
            hear(load_policy, folder / "alone" / "step_00000001", policy)
    own = state.weights_state

    def claimed(model: Any) -> Any:
        return dict_list_map_outplace(lambda base: replace(base, replica_id=0), own(model))

    with contextlib.ExitStack() as patches:
        for module in (state, load) if rank == 1 else ():
            patches.enter_context(unittest.mock.patch.object(module, "weights_state", claimed))
        hear(load_policy, folder / "alone" / "step_00000001", policy)
    hear(load_policy, folder / ("alone/step_00000001", "not mounted")[rank], policy)
    assert load_policy(folder / "alone" / "step_00000001", policy)["mine"] == 7
    torch.save(heard, folder / f"heard-{rank}.pt")


def _failing(owner: Any, name: str, call: int = 1) -> Any:
    """Replace a function by one that fails at a given call."""
    original, calls, rank = getattr(owner, name), itertools.count(1), dist.get_rank()

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            raise OSError(28, f"rank {rank} has no space left")
        return original(*arguments, **options)

    return unittest.mock.patch.object(owner, name, fail)


# The functions that fail, each with the rank on which it fails.
PARTS_OF_A_SAVE = [
    ("sharded_state_dict", 0),  # of the model
    ("sharded_state_dict", 1),
    ("validate_sharding_integrity", 0),
    ("validate_sharding_integrity", 1),
    ("save", 0),  # of the writer
    ("save", 1),
    ("save_config", 0),  # metadata.json, which no other writes
]
# The same for a policy with weights of the reference, which are loaded first: (function, number of the call,
# rank).
PARTS_OF_A_LOAD = [
    (part, call, rank)
    for part in (
        "open_checkpoint",
        "sharded_state_dict",
        "validate_sharding_integrity",
        "read_state",
        "load_state_dict",
    )
    for call in (1, 2)
    for rank in (0, 1)
]


def peak_of_a_save(directory: str) -> None:
    """Measure by how many bytes saving in the background raises the process's peak; rank 0 writes peak.pt."""
    from megatron_gvpo.megatron.checkpoint.save import save_policy
    from megatron_gvpo.megatron.policy import Policy

    folder = Path(directory)
    case = torch.load(folder / "case.pt", weights_only=False)
    policy = Policy.of(config_of(case, Layout(1), folder))
    policy.update(case.rows, at_step_start=False)
    save_policy(folder / "peak", 1, policy, {}, keep=1)  # a first save loads and caches modules
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    save_policy(folder / "peak", 2, policy, {}, keep=1, asynchronous=True)
    policy.model.finish_background_work()
    optimizer = sum(t.nbytes for t in policy.optimizer.tensors())
    torch.save({"rise": _status("VmHWM") - before, "optimizer": optimizer}, folder / "peak.pt")


def _status(name: str) -> int:
    """A value of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


SQUARE, EXPERTS = Layout(4, tp=2, pp=2), Layout(4, ep=2, overlap=True)
EVERYWHERE = Layout(4, tp=2, pp=2, ep=2, sequence_parallel=True)
INTERLEAVED = Layout(4, pp=2, vpp=2)
HEADS = Layout(2, tp=2, sequence_parallel=True)
# (model, or a family's title, and the layout that saves): the layouts that continue from the checkpoint.
MOVES: dict[tuple[str, Layout], list[Layout]] = {
    ("untied", SQUARE): [Layout(1), Layout(4), Layout(4, pp=4)],
    ("tied", SQUARE): [Layout(1), Layout(4, overlap=True), Layout(4, pp=4), INTERLEAVED],
    ("tied", INTERLEAVED): [Layout(2, cp=2)],
    ("tied", Layout(1)): [Layout(2, pp=2, stage_layers=(1, 3)), Layout(1, offload=1.0)],
    ("untied", Layout(2, offload=0.5)): [Layout(2, offload=0.5, pp=2), Layout(1)],
    ("qwen3_moe", EVERYWHERE): [Layout(1), EXPERTS, Layout(4, pp=4)],
    ("qwen3_moe", EXPERTS): [Layout(2, tp=2, etp=2, sequence_parallel=True), INTERLEAVED],
    ("deepseek_v3", EVERYWHERE): [Layout(2, ep=2), Layout(2, pp=2)],
    # These have parameters of heads: attention sinks, and those of gated delta nets.
    ("GPT-OSS", HEADS): [Layout(1)],
    ("Qwen3-Next", HEADS): [Layout(1)],
    # These have many buckets, and tensors that are written and read without a copy.
    ("untied", small(Layout(2))): [Layout(1), small(Layout(2, pp=2)), small(SQUARE)],
    ("tied", small(Layout(4, pp=2))): [small(Layout(4)), small(Layout(2, offload=0.5)), INTERLEAVED],
    ("qwen3_moe", small(EXPERTS)): [small(EVERYWHERE), Layout(2, pp=2)],
    ("deepseek_v3", small(Layout(2, ep=2))): [small(EVERYWHERE)],
}
# `make test` runs these moves, `make proof` all of MOVES.
QUICK: set[tuple[str, Layout, Layout]] = {
    ("untied", SQUARE, Layout(4, pp=4)),
    ("untied", Layout(2, offload=0.5), Layout(1)),
    ("qwen3_moe", EVERYWHERE, Layout(1)),
    ("deepseek_v3", EVERYWHERE, Layout(2, ep=2)),
    ("tied", small(Layout(4, pp=2)), small(Layout(4))),
    ("GPT-OSS", HEADS, Layout(1)),
}

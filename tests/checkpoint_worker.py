"""What every rank does for test_resharding.py: train and save under one layout, go on under others."""

from __future__ import annotations

import contextlib
import resource
import signal
import unittest.mock
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import forget_layout, run_number
from gradient_worker import Case, Layout, config_of
from torch import Tensor

MOMENTS = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Continuation:
    """What a checkpoint holds under Hugging Face names, and what two updates after it came to."""

    states: dict[str, dict[str, Tensor]]  # "weights", and the optimizer's by MOMENTS
    losses: list[float]
    grad_norms: list[float]
    lrs: list[float]
    weights: dict[str, Tensor]


def run(directory: str) -> None:
    """One launch of work.pt: [(layout, layout that saves, case), ...]. The layout that saves goes on, too.

    Rank 0 writes {layout}-of-{layout that saves}-{model}.pt.
    """
    from megatron_gvpo.megatron import checkpoint
    from megatron_gvpo.megatron.policy import Policy

    place = Path(directory)
    for layout, source, case in torch.load(place / "work.pt", weights_only=False)[run_number()]:
        name = f"{source}-{case.model}"
        policy = Policy(config_of(case, layout, place))
        if layout == source:
            policy.update(case.rows, at_step_start=False)
            checkpoint.save(place / name, 1, policy, {"mine": 7}, keep=1)
        else:
            assert checkpoint.load(checkpoint.complete(place / name)[-1], policy)["mine"] == 7
        found = _continued(policy, case)
        if dist.get_rank() == 0:
            torch.save(found, place / f"{layout}-of-{name}.pt")
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
    """One of the optimizer's tensors under Hugging Face names: in the weights' places, it is exported."""
    policy.model.settle()
    parameters = list(policy.model.weights())
    weights = [p.clone() for p in parameters]
    runs = []  # before anything is overwritten: in fp32, masters are the weights
    for optimizer in policy.optimizer.megatron.chained_optimizers:
        for parameter in optimizer.model_param_gbuf_map:
            run = optimizer._get_model_param_range_map(parameter)["param"]
            states = optimizer._get_main_param_and_optimizer_states(parameter)
            if "master_param" in states:  # in host memory, beside the weight
                assert torch.equal(states["param"], states["master_param"])
            runs.append((parameter, run, states[name].clone()))
    for parameter in parameters:
        parameter.zero_()
    for parameter, run, value in runs:
        parameter.view(-1)[run.start : run.end] = value
    for chunk in policy.model.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            dist.all_reduce(buffer.param_data, group=buffer.data_parallel_group)
    found = _copy(policy)
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
    return found


def killed_while_saving(directory: str) -> None:
    """The kernel ends the process in the middle of a save in the background."""
    from megatron_gvpo.megatron import checkpoint
    from megatron_gvpo.megatron.policy import Policy

    place = Path(directory)
    case = torch.load(place / "case.pt", weights_only=False)
    policy = Policy(config_of(case, Layout(1), place))
    policy.update(case.rows, at_step_start=False)
    checkpoint.save(place / "killed", 1, policy, {}, keep=1, asynchronous=True)
    policy.update(case.rows, at_step_start=False)
    assert [path.name for path in checkpoint.complete(place / "killed")] == ["step_00000001"]
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    checkpoint.save(place / "killed", 2, policy, {}, keep=1, asynchronous=True)
    policy.model.about_to_change()
    raise AssertionError("a file grew beyond its limit")


def fails_on_one_rank(directory: str) -> None:
    """A rank fails alone in one part of a save after the other; every rank writes what it heard."""
    from megatron_gvpo.megatron import checkpoint, saving
    from megatron_gvpo.megatron.policy import Policy

    place, rank = Path(directory), dist.get_rank()
    case = torch.load(place / "case.pt", weights_only=False)
    policy = Policy(config_of(case, Layout(2), place))
    checkpoint.save(place / "alone", 1, policy, {"mine": 7}, keep=1)
    heard = []

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, f"rank {rank} has no space left")

    for part, failing in PARTS_OF_A_SAVE:
        model = policy.model.chunks[0].module
        of = {"sharded_state_dict": model, "save": saving.Writer}.get(part, saving)
        with unittest.mock.patch.object(of, part, fail) if rank == failing else contextlib.nullcontext():
            try:
                checkpoint.save(place / "alone", 2, policy, {}, keep=1)
            except checkpoint.CheckpointError as error:
                heard.append(str(error))
    assert checkpoint.load(place / "alone" / "step_00000001", policy)["mine"] == 7
    try:
        checkpoint.load(place / ("alone/step_00000001", "not mounted")[rank], policy)
    except checkpoint.CheckpointError as error:
        heard.append(str(error))
    torch.save(heard, place / f"heard-{rank}.pt")


# What is replaced by a function that fails, and the rank on which.
PARTS_OF_A_SAVE = [
    ("sharded_state_dict", 0),  # the model's
    ("sharded_state_dict", 1),
    ("validate_sharding_integrity", 0),
    ("validate_sharding_integrity", 1),
    ("save", 0),  # the writer's
    ("save", 1),
    ("save_config", 0),  # metadata.json, which no other writes
]


def peak_of_a_save(directory: str) -> None:
    """Bytes by which saving in the background raises the process's peak; rank 0 writes peak.pt."""
    from megatron_gvpo.megatron import checkpoint, saving
    from megatron_gvpo.megatron.policy import Policy

    place, saving.FILE_BYTES = Path(directory), 8 << 20
    case = torch.load(place / "case.pt", weights_only=False)
    policy = Policy(config_of(case, Layout(1), place))
    policy.update(case.rows, at_step_start=False)
    checkpoint.save(place / "peak", 1, policy, {}, keep=1)  # what a first save loads and caches
    Path("/proc/self/clear_refs").write_text("5")  # from here on, the peak is what comes
    before = _status("VmRSS")
    checkpoint.save(place / "peak", 2, policy, {}, keep=1, asynchronous=True)
    policy.model.about_to_change()
    optimizer = sum(t.nbytes for t in policy.optimizer.tensors())
    torch.save({"rise": _status("VmHWM") - before, "optimizer": optimizer}, place / "peak.pt")


def _status(name: str) -> int:
    """A line of the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


SQUARE, EXPERTS = Layout(4, tp=2, pp=2), Layout(4, ep=2, overlap=True)
EVERYWHERE = Layout(4, tp=2, pp=2, ep=2, sequence_parallel=True)
INTERLEAVED = Layout(4, pp=2, vpp=2)
# (model, the layout that saves): the layouts that go on.
MOVES: dict[tuple[str, Layout], list[Layout]] = {
    ("untied", SQUARE): [Layout(1), Layout(4), Layout(4, pp=4)],
    ("tied", SQUARE): [Layout(1), Layout(4, overlap=True), Layout(4, pp=4), INTERLEAVED],
    ("tied", INTERLEAVED): [Layout(2, cp=2)],
    ("tied", Layout(1)): [Layout(2, pp=2, stage_layers=(1, 3)), Layout(1, offload=1.0)],
    ("untied", Layout(2, offload=0.5)): [Layout(2, offload=0.5, pp=2), Layout(1)],
    ("qwen3_moe", EVERYWHERE): [Layout(1), EXPERTS, Layout(4, pp=4)],
    ("qwen3_moe", EXPERTS): [Layout(2, tp=2, etp=2, sequence_parallel=True), INTERLEAVED],
    ("deepseek_v3", EVERYWHERE): [Layout(2, ep=2), Layout(2, pp=2)],
}

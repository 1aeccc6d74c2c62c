"""Runs both sides in separate processes, and prints a line for every layout and a verdict."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.megatron.cpu.bridge import import_bridge
from megatron_gvpo.megatron.gradient_export import export_gradients
from megatron_gvpo.megatron.parallel import megatron_device
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.settings.config import Config, build_config
from megatron_gvpo.verify import reference
from megatron_gvpo.verify.layout import ParallelLayout
from megatron_gvpo.verify.measures import (
    MICRO_BATCH,
    TEMPERATURE,
    UPDATE,
    Computed,
    Difference,
    Limits,
    compare,
    make_rows,
)
from megatron_gvpo.verify.shrink import VOCABULARY, save_tiny

if TYPE_CHECKING:
    from megatron_gvpo.types import TrainBatch


SECONDS = 600.0  # limit for one side in one layout
_COLLECTIVE = timedelta(seconds=120)


def verify(
    config: dict[str, Any],
    layouts: Sequence[ParallelLayout],
    where: str,
    report: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Compare the architecture of a shrunk config.json in every layout with transformers.

    `report` is called with each result as soon as it exists. The process must not have used torch's threads
    before, because it forks. Raises ConfigError, which begins with `where`, if transformers cannot build the
    model.
    """
    import_bridge()
    results = []
    with tempfile.TemporaryDirectory(prefix="verify-") as name:
        directory = Path(name)
        _in_processes(1, reference_side, config, directory, where)
        limits = Limits()
        for layout in layouts:
            try:
                _in_processes(layout.ranks, candidate_side, layout, directory)
                result = read_result(layout, directory)
            except ConfigError as error:
                result = Result(layout, limits, None, str(error), refused=True)
            except RuntimeError as error:
                result = Result(layout, limits, None, str(error))
            report(result)
            results.append(result)
    return results


def _in_processes(ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run `work` in forks of this process, the ranks of a gloo process group.

    Raises ConfigError if a fork raises it, RuntimeError with the first other error, or if a fork is not done
    in SECONDS.
    """
    fork = get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            fork.Process(target=_rank, args=(r, ranks, folder, work, arguments)) for r in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + SECONDS
        try:
            while any(process.is_alive() for process in processes):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not done after {SECONDS:.0f} s")
                if any(process.exitcode for process in processes):
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.join()
        for file in sorted(folder.glob("refused-*")):
            raise ConfigError(file.read_text())
        for file in sorted(folder.glob("failed-*"), key=lambda file: file.stat().st_mtime):
            raise RuntimeError(file.read_text())
        if codes := [process.exitcode for process in processes if process.exitcode]:
            raise RuntimeError(f"a rank ended with exit code {codes[0]}")


def _rank(rank: int, ranks: int, folder: Path, work: Callable[..., None], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    with suppress(OSError):
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=_COLLECTIVE
        )
        work(*arguments)
    except ConfigError as error:
        (folder / f"refused-{rank}").write_text(str(error))
        os._exit(1)
    except BaseException as error:
        first = " ".join(str(error).split())[:400]
        (folder / f"failed-{rank}").write_text(f"{type(error).__name__}: {first}")
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


# The two sides of a comparison, each in a separate process, and the difference of their results.


@dataclass(frozen=True)
class Result:
    """One layout's difference from transformers, or the reason for which there is none."""

    layout: ParallelLayout
    limits: Limits
    difference: Difference | None
    failure: str | None = None  # an error while the model was built or ran
    refused: bool = False  # the failure is a ConfigError: a layout that the model cannot have

    @property
    def problem(self) -> str | None:
        return self.failure if self.difference is None else self.difference.problem(self.limits)


def reference_side(config: dict[str, Any], directory: Path, where: str) -> None:
    """Write the tiny checkpoint, and the results of transformers with it."""
    save_tiny(config, directory / "model", where)
    model, rows = reference.load(directory / "model"), make_rows(VOCABULARY)
    wanted = by_transformers(model, directory / "model", rows)
    with reference.in_float32(model):
        rounding = compare(by_transformers(model, directory / "model", rows), wanted)
    torch.save((wanted, rounding), directory / "wanted.pt")


def by_transformers(model: Any, directory: Path, rows: TrainBatch) -> Computed:
    """Return the results of a model of `reference.load` in its dtype; `directory` has its checkpoint."""
    logp_r = torch.cat(reference.log_probs(model, rows, TEMPERATURE))
    parameters = dict(model.named_parameters())
    values = torch.autograd.grad(-logp_r.mean(), list(parameters.values()), allow_unused=True)
    gradients = {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(parameters.items(), values, strict=True)
    }
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    updated = reference.clipped_adamw(parameters, gradients, norm, UPDATE)
    return Computed(
        logp_r=logp_r.detach(),
        gradients=reference.as_in_file(model, gradients),
        norm=norm,
        updated=reference.as_in_file(model, updated),
        exported=load_file(directory / "model.safetensors"),
    )


def candidate_side(layout: ParallelLayout, directory: Path) -> None:
    """Write the results of this package's build of the checkpoint under `layout`. A collective."""

    policy = Policy.of(config_of(directory / "model", layout))
    computed = compute(policy, make_rows(VOCABULARY))
    if dist.get_rank() == 0:
        torch.save(computed, directory / f"{layout}.pt")


def read_result(layout: ParallelLayout, directory: Path) -> Result:
    """Compare the results that both sides have written into this run's private directory."""
    with torch.serialization.safe_globals([Computed, Difference]):  # nothing else is unpickled
        wanted, rounding = torch.load(directory / "wanted.pt", weights_only=True)
        computed = torch.load(directory / f"{layout}.pt", weights_only=True)
    return Result(layout, Limits.for_rounding(rounding), compare(computed, wanted))


# The side of this package: a model built by Megatron-Bridge in one layout, and its results.


def compute(policy: Policy, rows: TrainBatch) -> Computed:
    """Compute on `rows`, with one update. A collective."""
    exported = _copied(policy.weights())
    gradients: dict[str, Tensor] = {}
    apply = policy.optimizer.apply

    def export_first() -> Any:
        with megatron_device():
            policy.optimizer.megatron.prepare_grads()
        gradients.update(export_gradients(policy.model))
        return apply()

    policy.optimizer.apply = export_first  # type: ignore[method-assign]
    logp_r = policy.score(rows)
    update = policy.update(rows, at_step_start=True).update
    return Computed(
        logp_r=logp_r,
        gradients=gradients,
        norm=update.grad_norm,
        updated=_copied(policy.weights()),
        exported=exported,
    )


def config_of(directory: Path, layout: ParallelLayout) -> Config:
    """The configuration of a comparison under `layout`."""
    return build_config(
        {
            "output_dir": "unused",
            "model": {"path": str(directory), "dtype": "float32"},
            "data": {"train": {"path": "unused", "demonstration_key": "unused"}},
            "algorithm": {"recipe": "sft"},
            "rollout": {"temperature": TEMPERATURE},
            "rewards": {"components": [{"name": "math"}]},
            "train": {"steps": 1, "prompts_per_step": 1, "max_tokens_per_micro_batch": MICRO_BATCH},
            "optimizer": UPDATE,
            "parallel": layout.settings,
        }
    )


def _copied(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named}

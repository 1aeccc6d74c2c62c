"""Ranks of rehearsals, in a process with the null CUDA: `python -m ...rank JOBS.json PID`.

PID is the process of the command `rehearse`, which starts this process; this process ends with it. Libraries
are imported once, and every rank is a child process of its own. It runs the phases of a training step of that
rank, on the project's own classes: build, scoring, two updates, a checkpoint's layout, export, and the
release of memory to colocated servers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_gvpo.core.environment import die_with_parent
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.rehearsal.nullcuda import counters
from megatron_gvpo.rehearsal.progress import ProgressFile

if TYPE_CHECKING:
    from megatron_gvpo.planner.prediction import Size
    from megatron_gvpo.rehearsal.world import FakeWorld
    from megatron_gvpo.settings.config import Config

PROGRESS = "progress"  # the file in the folder of jobs to which ranks write their progress


@dataclass(frozen=True)
class RankJob:
    """A rank to rehearse. `micro_batches`: in an update; None: enough to reach its peak of memory."""

    files: list[str]  # configuration files
    overrides: list[str]
    rank: int
    world: int
    micro_batches: int | None = None
    # Directories that lack weights; `fill` adds them.
    made: list[str] = dataclasses.field(default_factory=list)
    until: str | None = None  # the last phase to rehearse; None: all phases
    rollouts: str | None = None  # a run's saved rollouts; None: rows are made up


def main(jobs_file: str, parent: int) -> int:
    """Run the jobs, one after the other.

    Beside the file, job i's output is in `log-i`, and `result-i` has its phases, `error`, a problem that the
    user can mend, or `failed`, the exit code of a process that ended otherwise.
    """
    die_with_parent(parent)
    # The null CUDA is loaded in this process; the compilers that Triton starts do not need it.
    os.environ.pop("LD_PRELOAD", None)
    jobs = [RankJob(**job) for job in json.loads(Path(jobs_file).read_text())]
    begin = time.perf_counter()
    folder = Path(jobs_file).parent
    progress = ProgressFile(folder / PROGRESS)
    with progress.phase(jobs[0].rank, "import"):
        world = _import(jobs[0])
    seconds = time.perf_counter() - begin
    own = os.getpid()
    for number, job in enumerate(jobs):
        result_file = folder / f"result-{number}"
        if (child := os.fork()) == 0:
            die_with_parent(own)
            os._exit(_run(job, world, progress, seconds, folder / f"log-{number}", result_file))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not result_file.is_file():
            result_file.write_text(json.dumps({"failed": code}))
        seconds = 0.0
    return 0


def _import(job: RankJob) -> FakeWorld:
    """Import all ranks' libraries, and initialise CUDA, which a child must not do after its fork."""
    from megatron_gvpo.rehearsal.world import FakeWorld
    from megatron_gvpo.settings.config import load_config
    from megatron_gvpo.training.environment import prepare

    world = FakeWorld()  # must come before the import of megatron-core
    config = load_config(job.files, job.overrides)
    prepare(config.parallel, config.rollout)
    import torch

    import megatron_gvpo.megatron.policy  # noqa: F401 - the longest import
    from megatron_gvpo.huggingface.architectures import add_model_types

    add_model_types()  # transformers reads a made model's config.json before Megatron-Bridge does
    torch.cuda.init()
    return world


def _run(
    job: RankJob,
    world: FakeWorld,
    progress: ProgressFile,
    import_seconds: float,
    log: Path,
    result_file: Path,
) -> int:
    """Rehearse in this process, whose output goes to `log`; returns its exit code."""
    with log.open("w") as opened:
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    try:
        result = rehearse(job, world, progress) | {"import_seconds": round(import_seconds, 1)}
    except ConfigError as error:
        result = {"error": str(error)}
    except BaseException:
        traceback.print_exc()
        if (function := counters.refused()) is not None:
            print(f"The null CUDA does not answer {function}, which was called last.", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        return 1
    result_file.write_text(json.dumps(result))
    return 0


def rehearse(job: RankJob, world: FakeWorld, progress: ProgressFile) -> dict[str, Any]:
    """Run the phases of one rank. Raises ConfigError for a configuration that the run would refuse, too."""
    from megatron_gvpo.rehearsal import made_model, stand_ins
    from megatron_gvpo.rehearsal.recorder import PhaseRecorder, host_gib
    from megatron_gvpo.settings.config import load_config
    from megatron_gvpo.training.environment import prepare

    with progress.phase(job.rank, "preparation"):
        stand_ins.allow_forks()
        world.join(job.rank, job.world)
        config = load_config(job.files, job.overrides)
        prepare(config.parallel, config.rollout)
        for directory in job.made:
            if not made_model.has_weights(Path(directory)):
                made_model.fill(Path(directory))
        stand_ins.install(made_weights=bool(job.made))
    recorder = PhaseRecorder(world)
    run = RankRun(config, job)
    for name, phase in run.phases():
        with progress.phase(job.rank, name), recorder.phase(name) as results:
            results |= phase() or {}
        if recorder.is_out_of_memory:
            if counters.read()["failed_reservations"]:
                raise ConfigError(
                    f"phase {name}: this machine refused to reserve more address space for the device: raise "
                    "`ulimit -v`, or set vm.overcommit_memory to 0 or 1"
                )
            break
        if name == job.until:
            break
    return {
        "rank": job.rank,
        "role": run.role,
        "pack": {} if run.size is None else asdict(run.size) | {"tokens": run.size.tokens_of_a_pack},
        "rollouts": run.rollouts,
        "parts": run.parts,
        "host_gib": host_gib(),
        "phases": [asdict(phase) for phase in recorder.phases],
    }


Results = dict[str, Any] | None


class RankRun:
    """The phases of a rank, in the order of a run; each returns values to show."""

    def __init__(self, config: Config, job: RankJob) -> None:
        self._config, self._job = config, job
        self.parts: dict[str, float] = {}  # GiB of weights, gradients, optimizer, activations, head
        self.role: dict[str, int] = {}
        self.size: Size | None = None  # the size of made-up rows
        self.rollouts: dict[str, int | str] = {}  # the description of saved rollouts
        algorithm = config.algorithm.sized(config.rollout.max_tokens)
        self._estimator = None if algorithm.estimator is None else algorithm.estimator.build()

    def phases(self) -> list[tuple[str, Callable[[], Results]]]:
        config = self._config
        phases: list[tuple[str, Callable[[], Results]]] = [
            ("build", self.build),
            ("scoring", self.score),
            ("first update", self.first_update),
            ("second update", self.second_update),
            ("checkpoint", self.checkpoint),
            ("export", self.export),
        ]
        if config.rollout.uses_servers and config.rollout.weights.traits.sends_own:
            phases.append(("push plan", self.push_plan))
        if config.rollout.servers.colocated:
            phases.append(("release, restore", self.hand_over))
        return phases

    def build(self) -> Results:
        from megatron_gvpo.megatron.parallel import rank_in_each_group
        from megatron_gvpo.megatron.policy import Policy
        from megatron_gvpo.planner.prediction import size_of
        from megatron_gvpo.rehearsal import saved_rows
        from megatron_gvpo.rehearsal.made_rows import make_rows

        config, job = self._config, self._job
        self.policy = Policy.of(config)
        data_parallel = self.policy.data_parallel_ranks
        self.role = rank_in_each_group()
        if job.rollouts is None:
            self.size = size_of(config, data_parallel, job.micro_batches)
            self._rows = make_rows(config, self.size, data_parallel)
        else:
            saved = saved_rows.load(job.rollouts)
            self._rows = saved.rows(config)
            self.rollouts = {"file": str(saved.file)} | saved_rows.sizes(self.policy, config, self._rows)
        model = self.policy.model
        return {"parameters": sum(weight.numel() for weight in model.weights())}

    def score(self) -> Results:
        """The passes before a step's first update: critic, estimator, references, teacher."""
        from megatron_gvpo.algorithms.base import STEP_START, TEACHER

        policy, algorithm, rows = self.policy, self._config.algorithm, self._rows
        start_r = policy.score(rows)

        def of(reference: Any) -> Any:
            if reference == STEP_START:
                return start_r
            if reference == TEACHER:
                return start_r if policy.teacher is None else policy.score_teacher(rows)
            return policy.score_reference(rows)

        columns: dict[str, Any] = {}
        if policy.critic is not None:
            columns["value_r"] = policy.critic.values(rows)
        read = {} if algorithm.estimator is None else algorithm.estimator.reference_policies
        columns |= {f"{column}_logp_r": of(reference) for column, reference in read.items()}
        if self._estimator is not None:
            rows, _ = self._estimator.fill(rows.with_columns(**columns))
        references = algorithm.loss.reference_policies
        columns = {"old_logp_r": None, "ref_logp_r": None}
        self._second = rows.with_columns(
            **columns | {f"{column}_logp_r": of(reference) for column, reference in references.items()}
        )
        first = {
            f"{column}_logp_r": None if reference == STEP_START else of(reference)
            for column, reference in references.items()
        }
        self._first = rows.with_columns(**columns | first)
        return None

    def first_update(self) -> Results:
        done = self.policy.update(self._first, at_step_start=True)
        self.parts |= {name.split("/")[1].removesuffix("_gib"): value for name, value in done.memory.items()}
        if self.policy.critic is not None:
            self.policy.critic.update(self._first)
        return {"skipped": done.update.skipped, "head": done.head}

    def second_update(self) -> Results:
        done = self.policy.update(self._second, at_step_start=False)
        if self.policy.critic is not None:
            self.policy.critic.update(self._second)
        self._measure_state()
        return {"skipped": done.update.skipped}

    def _measure_state(self) -> None:
        """Measure the exact sizes after an update, when all of the optimizer's states exist."""
        from megatron_gvpo.megatron.device_memory import storages
        from megatron_gvpo.rehearsal.recorder import GIB

        trained = self.policy._trained
        parts = {
            "weights": storages(w for model, _ in trained for w in model.weights()),
            "gradients": storages(g for model, _ in trained for g in model.gradient_buffers()),
            "optimizer": storages(t for _, optimizer in trained for t in optimizer.tensors()),
        }
        for name, part in parts.items():
            own = {
                address: s
                for address, s in part.items()
                if name == "weights" or address not in parts["weights"]
            }
            self.parts[name] = sum(storage.nbytes() for storage in own.values()) / GIB

    def checkpoint(self) -> Results:
        """Compute the layout of a checkpoint: the entries that this rank would write. Nothing is written."""
        from megatron_gvpo.megatron.checkpoint.state import own_tensors

        tensors = own_tensors(self.policy)
        return {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors)}

    def export(self) -> Results:
        count = elements = 0
        for _, tensor in self.policy.weights(on_host=False):
            count, elements = count + 1, elements + tensor.numel()
        return {"tensors": count, "parameters": elements}

    def push_plan(self) -> Results:
        """The parts of Hugging Face's tensors that this rank would send by itself."""
        from megatron_gvpo.rehearsal import stand_ins

        with stand_ins.positions_of_all_ranks():
            own = self.policy.own_weights()
        elements = sum((part.bottom - part.top) * (part.right - part.left) for part in own.parts)
        return {"tensors": len(own.tensors), "parts": len(own.parts), "elements": elements}

    def hand_over(self) -> Results:
        """Release the device to colocated servers, and measure how much of it the trainer still occupies."""
        import torch

        from megatron_gvpo.rehearsal.recorder import GIB

        memory = self.policy.memory
        memory.release("training")
        memory.copy_weights_ahead()
        memory.release("weights")
        torch.cuda.empty_cache()
        stays = torch.cuda.memory_reserved() / GIB
        memory.restore("weights")
        memory.restore("training")
        return {"stays_gib": stays}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))

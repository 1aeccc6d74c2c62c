"""Trains SmolLM2-135M-Instruct, a pretrained language model, with GVPO on a laptop.

    python examples/smollm2/run.py [--task sums|reading] [--overwrite] [--nproc N] [key.sub=value ...]

It fetches the model (94 MB, once), makes the problems, trains, evaluating before, while and after it trains,
and writes the report. The task `sums` asks for the sum or difference of two numbers; `reading` asks who did
what in three to six sentences, and needs the package reasoning-gym. The same command continues a stopped run;
`--overwrite` begins again. The other arguments go to the training command.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from make_task import make_task
from model import cached_model

HERE = Path(__file__).parent
RUNS = Path("runs")
REWARDS = ("strict", "lenient")


class Task(NamedTuple):
    """A task: its run's directory, configuration files, the reward that trains, and words for the summary."""

    run: Path
    files: tuple[str, ...]
    trained: str
    answered: str
    graded: str
    learnt: str  # follows `graded` where both shares have risen
    held_out: str


TASKS = {
    "sums": Task(
        RUNS / "smollm2",
        ("gvpo.yaml",),
        "strict",
        "answered {before:.0%} of a test's sums right",
        "The right number stood anywhere in {before:.0%} of its responses before and in {after:.0%} now",
        ", so it learnt more than to end with the number",
        "no sum of the test has two numbers that a training sum has together",
    ),
    "reading": Task(
        RUNS / "smollm2_reading",
        ("gvpo.yaml", "reading.yaml"),
        "lenient",
        "named the right person first in {before:.0%} of its responses to a test's stories",
        "A response was the right name alone in {before:.0%} before and in {after:.0%} now",
        ": no reward asked for that form, so what it learnt is whom to name",
        "the test's stories are not among the training stories",
    ),
}


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    name, arguments = task_of(sys.argv[1:])
    if name not in TASKS:
        return refuse(f"--task {name}: there are {' and '.join(TASKS)}")
    if not Path("examples/smollm2").is_dir():  # the configurations name rewards below it
        return refuse(f"run this in the repository's root: cd {HERE.resolve().parents[1]}")
    task = TASKS[name]
    for argument in arguments:
        if argument.startswith("output_dir="):
            task = task._replace(run=Path(argument.removeprefix("output_dir=")))
    stopped: list[int] = []
    signal.signal(signal.SIGINT, lambda *_: stopped.append(1))  # the commands save a checkpoint and end

    def run(title: str, *command: str) -> int:
        print(f"\n== {title}: {' '.join(command)}", flush=True)
        return subprocess.call([sys.executable, *command])

    if code := run("fetch the model", str(HERE / "model.py")):
        return code
    try:
        make_inputs(RUNS / "smollm2")
    except OSError as error:
        file = error.filename2 or error.filename or RUNS / "smollm2"
        return refuse(f"{file}, which this program writes: {error.strerror}")
    resume = [] if "--overwrite" in arguments else ["--resume=auto"]
    files = [str(HERE / file) for file in task.files]
    code = run("GVPO", "-m", "megatron_gvpo", "train", *resume, *files, *arguments)
    if code or stopped:
        if stopped:
            print("stopped: the same command goes on where the last checkpoint was saved", file=sys.stderr)
        return code or 128 + signal.SIGINT
    if code := run("report", "-m", "megatron_gvpo", "report", str(task.run)):
        return code

    result = read_result(task.run)
    (task.run / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print("\n" + in_words(result, task))
    where = {"curve": "curve.png", "samples and more curves": "report.html", "model": "hf"}
    made = {name: task.run / file for name, file in where.items()}
    print("   ".join(f"{name}: {file}" for name, file in made.items() if file.exists()))
    return 0


def refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


def task_of(arguments: list[str]) -> tuple[str, list[str]]:
    """The name that `--task NAME` or `--task=NAME` gives, by default `sums`, and the other arguments."""
    words = [word for argument in arguments for word in split_option(argument)]
    if "--task" not in words:
        return "sums", words
    i = words.index("--task")
    return "".join(words[i + 1 : i + 2]), words[:i] + words[i + 2 :]


def split_option(argument: str) -> list[str]:
    return argument.split("=", 1) if argument.startswith("--task=") else [argument]


def make_inputs(directory: Path) -> None:
    """Make the problems and a link to the model, which a run records as its paths. Raises OSError."""
    make_task(directory / "task")
    model = directory / "model"
    model.unlink(missing_ok=True)
    model.symlink_to(cached_model().resolve(), target_is_directory=True)


def read_result(run: Path) -> dict[str, Any]:
    """Every evaluation's share of right answers by both grades, and the seconds of all steps."""
    import pyarrow.parquet

    from megatron_gvpo.observe import read_metrics

    evaluations = []
    for file in sorted((run / "rollouts").glob("eval_*.parquet")):
        rows = pyarrow.parquet.read_table(
            file, columns=["step", "rewards", "response_tokens", "finish_reason"]
        ).to_pylist()
        grades = [dict(row["rewards"]) for row in rows]
        evaluations.append(
            {"step": rows[0]["step"]}
            | {name: fmean(grade[name] for grade in grades) for name in REWARDS}
            | {"response_tokens": fmean(row["response_tokens"] for row in rows)}
            | {"cut_off": fmean(row["finish_reason"] == "length" for row in rows)}
        )
    seconds = [record["time/step"] for record in read_metrics(run / "metrics.jsonl") if "time/step" in record]
    return {"steps": len(seconds), "evaluations": evaluations, "seconds": sum(seconds)}


def in_words(result: Mapping[str, Any], task: Task) -> str:
    """Return the result in three sentences, for a reader who does not know the project."""
    if not result["evaluations"]:
        return "The run made no evaluation, so there are no shares of right answers to compare."
    before, after = result["evaluations"][0], result["evaluations"][-1]
    watched = next(name for name in REWARDS if name != task.trained)
    share = after[task.trained]
    has_learnt = all(after[name] > before[name] for name in REWARDS)
    return (
        f"Before training, SmolLM2, a language model of 135 million parameters, "
        f"{task.answered.format(before=before[task.trained])}; after {result['steps']} steps of GVPO, in "
        f"which it was only told which of its own answers were right, the share is {share:.0%}.\n"
        f"{task.graded.format(before=before[watched], after=after[watched])}{task.learnt * has_learnt}.\n"
        f"The steps took {result['seconds'] / 60:.0f} minutes on this machine, and {task.held_out}."
    )


if __name__ == "__main__":
    sys.exit(main())

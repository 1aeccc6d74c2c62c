"""Trains SmolLM2-135M-Instruct, a pretrained language model, with GVPO to answer sums, on a laptop.

    python examples/smollm2/run.py [--overwrite] [--nproc N] [key.sub=value ...]

It fetches the model (94 MB, once), makes the problems, trains, evaluating before, while and after it trains,
and writes the report. Stopped, it goes on at the same command; `--overwrite` begins again. The arguments go
to the training command.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from make_task import make_task
from model import cached_model

HERE = Path(__file__).parent
RUN = Path("runs/smollm2")
REWARDS = ("strict", "lenient")


def main() -> int:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return 0
    arguments = sys.argv[1:]
    stopped: list[int] = []
    signal.signal(
        signal.SIGINT, lambda *_: stopped.append(1)
    )  # the commands end by themselves and save first

    def run(title: str, *command: str) -> int:
        print(f"\n== {title}: {' '.join(command)}", flush=True)
        return subprocess.call([sys.executable, *command])

    if code := run("fetch the model", str(HERE / "model.py")):
        return code
    make_task(RUN / "task")
    model, target = RUN / "model", cached_model().resolve()
    if model.is_symlink():
        model.unlink()
    model.symlink_to(target, target_is_directory=True)
    resume = [] if "--overwrite" in arguments else ["--resume=auto"]
    code = run("GVPO", "-m", "megatron_gvpo", "train", *resume, str(HERE / "gvpo.yaml"), *arguments)
    if code or stopped:
        if stopped:
            print("stopped: the same command goes on where the last checkpoint was saved", file=sys.stderr)
        return code or 128 + signal.SIGINT
    run("report", "-m", "megatron_gvpo", "report", str(RUN))

    result = read_result(RUN)
    (RUN / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print("\n" + in_words(result))
    print(f"curve: {RUN}/curve.png   samples and more curves: {RUN}/report.html   model: {RUN}/hf")
    return 0


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


def in_words(result: Mapping[str, Any]) -> str:
    """Three sentences for someone who has seen nothing of this before."""
    before, after = result["evaluations"][0], result["evaluations"][-1]
    return (
        f"Before training, SmolLM2, a language model of 135 million parameters, answered "
        f"{before['strict']:.0%} of a test's sums right; after {result['steps']} steps of GVPO, in which it "
        f"was only told which of its own answers were right, it answers {after['strict']:.0%} right.\n"
        f"The right number stood anywhere in {before['lenient']:.0%} of its responses before and in "
        f"{after['lenient']:.0%} now, so it learnt more than to end with the number.\n"
        f"The steps took {result['seconds'] / 60:.0f} minutes on this machine, and no sum of the test has "
        "two numbers that a training sum has together."
    )


if __name__ == "__main__":
    sys.exit(main())

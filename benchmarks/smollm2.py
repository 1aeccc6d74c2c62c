"""Makes the committed result and picture of a finished run of examples/smollm2.

    make real
    python benchmarks/smollm2.py --beside "nothing"     # or the other programs of the machine

It writes benchmarks/results/smollm2_cpu.json and docs/smollm2.png: the share of held-out sums that are right
by the strict grade (the response ends by itself, and its last number is the answer) and by the lenient one
(the answer is anywhere in it), and the mean reward of each step, which is the strict grade of training sums.
It adds the strict share of each kind of problem and, as `start_alone`, a share of the model before the run:
of the sums and differences that it completes correctly after "14 + 9 =" with its most probable tokens.
`--task reading` writes the result of a run of the task `reading` to
benchmarks/results/smollm2_reading_cpu.json, and makes no picture.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_gvpo.core.json_files import read_metrics
from megatron_gvpo.observe.summary import BLUE, GREY, LINE, ORANGE, STYLE

ROOT = Path(__file__).parent.parent
NAMED = (("strict", BLUE, "ends with the right number"), ("lenient", ORANGE, "right number anywhere"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=("sums", "reading"), default="sums")
    parser.add_argument("--beside", required=True, help="what else the machine did, such as its load")
    options = parser.parse_args()
    name, command = ("smollm2", "make real")
    if options.task == "reading":
        name, command = ("smollm2_reading", "make real OPTIONS='--task reading'")
    run = Path("runs") / name
    result = json.loads((run / "result.json").read_text())
    rewards = [m["reward/mean"] for m in read_metrics(run / "metrics.jsonl") if "reward/mean" in m]
    machine = {"processor": processor(), "cores": os.cpu_count(), "beside": options.beside}
    versions = {name: version(name) for name in ("torch", "transformers", "megatron-core", "megatron-bridge")}
    record = {"command": command, "machine": machine, "versions": versions, **result, "reward": rewards}
    if options.task == "sums":
        for evaluation in result["evaluations"]:
            evaluation["by_kind"] = shares_by_kind(run / "rollouts" / f"eval_{evaluation['step']:06}.parquet")
        record["start_alone"] = {f"to {most}": right_alone(run / "model", most) for most in (12, 20)}
    file = ROOT / "benchmarks" / "results" / f"{name}_cpu.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    print(file.relative_to(ROOT))
    if options.task == "sums":
        draw(result["evaluations"], rewards, ROOT / "docs" / "smollm2.png")
        print("docs/smollm2.png")


def shares_by_kind(file: Path) -> dict[str, dict[str, float]]:
    """The responses of an evaluation and the share that is right by the strict grade, by kind of problem."""
    import pyarrow.parquet

    grades: dict[str, list[float]] = {"stories": [], "sums": [], "differences": []}
    for row in pyarrow.parquet.read_table(file, columns=["prompt", "rewards"]).to_pylist():
        is_plain = "What is" in row["prompt"]
        kind = "stories" if not is_plain else "sums" if " + " in row["prompt"] else "differences"
        grades[kind].append(dict(row["rewards"])["strict"])
    return {kind: {"responses": len(of), "strict": fmean(of)} for kind, of in grades.items() if of}


def right_alone(model: Path, most: int, problems: int = 200) -> float:
    """The share of problems with numbers from 2 to `most` that greedy decoding completes correctly."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rng = random.Random(most)
    tokenizer, network = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    right = 0
    for i in range(problems):
        smaller, larger = sorted(rng.sample(range(2, most + 1), 2))
        sign, answer = ("+", larger + smaller) if i % 2 else ("-", larger - smaller)
        question = [{"role": "user", "content": f"What is {larger} {sign} {smaller}?"}]
        opened = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        text = f"{opened}{larger} {sign} {smaller} ="
        input_ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            output = network.generate(input_ids, max_new_tokens=6, do_sample=False)
        numbers = re.findall(r"\d+", tokenizer.decode(output[0, input_ids.shape[1] :]))
        right += numbers[:1] == [str(answer)]
    return right / problems


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def draw(evaluations: list[dict[str, Any]], rewards: list[float], png: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    steps = [evaluation["step"] for evaluation in evaluations]
    with rc_context(STYLE):
        figure = Figure(figsize=(5.2, 2.4), layout="constrained")
        axis = figure.subplots()
        steps_of_training = range(1, len(rewards) + 1)
        axis.plot(steps_of_training, [100 * r for r in rewards], color=LINE, label="training, strict")
        for name, colour, label in NAMED:
            shares = [100 * evaluation[name] for evaluation in evaluations]
            axis.plot(steps, shares, "o-", color=colour, markersize=3.5, label=label)
            axis.annotate(
                f"{shares[-1]:.0f} %", (steps[-1], shares[-1]), xytext=(5, -3), textcoords="offset points"
            )
        axis.set_ylim(0, 100)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_title("SmolLM2-135M on held-out sums, percent right")
        axis.set_xlabel("steps of GVPO", color=GREY)
        axis.legend(frameon=False, loc="lower right", fontsize=8)
        figure.savefig(png, dpi=130)


if __name__ == "__main__":
    main()

"""Functions that examples of conversations share: they make the model and problems, and run commands."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AddedToken, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

HERE = Path(__file__).parent
PAD, END = "<|pad|>", "<|end|>"
SPACES = ("Ċ", "Ġ")  # newline and space, in the symbols of byte-level BPE
SHOWN = ("step", "eval/pass@1", "env/turns", "env/calls", "env/tool_calls")

Problem = dict[str, Any]  # the fields of a line of the data


def make_material(
    about: str, make_model: Callable[[Path, int], None], make_data: Callable[[Path, int], None]
) -> None:
    """The command line of a make_task.py: `--out DIR [--seed 0]` writes DIR/model and DIR/data."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_model(options.out / "model", options.seed)
    make_data(options.out / "data", options.seed)


def small_tokenizer(
    tokens: Sequence[str],
    *,
    words: Sequence[str] = (),
    marks: Sequence[str] = (),
    template: str | None = None,
) -> Qwen2Tokenizer:
    """A tokenizer of PAD, END, space, newline, `tokens` of one character, and whole `words`.

    `marks` are special tokens, beside PAD and END.
    """
    characters = [PAD, END, *SPACES, *tokens]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(characters)},
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=None,
    )
    if marks:
        tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    tokenizer.add_tokens([AddedToken(word, normalized=False, special=False) for word in words])
    tokenizer.chat_template = template
    return tokenizer


def save_small_model(tokenizer: Qwen2Tokenizer, directory: Path, seed: int) -> None:
    """Write a Hugging Face checkpoint of Qwen2's architecture, with 0.8 M random parameters."""
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.06,  # about 1 / sqrt(hidden size): a small model learns faster with it
        tie_word_embeddings=False,
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def write_problems(
    directory: Path, sizes: Mapping[str, int], make_problem: Callable[[random.Random], Problem], seed: int
) -> None:
    """Write `<split>.jsonl` for each split, with problems whose prompts are all different."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    used: set[str] = set()
    for split, size in sizes.items():
        with (directory / f"{split}.jsonl").open("w") as file:
            for _ in range(size):
                problem = make_problem(rng)
                while problem["prompt"] in used:
                    problem = make_problem(rng)
                used.add(problem["prompt"])
                file.write(json.dumps(problem) + "\n")


def run_example(name: str, *overrides: str) -> int:
    """Run the three commands of `examples/<name>`: make the task, fine-tune, GVPO; return the exit status.

    `overrides` and the arguments of the command line go to the GVPO run; `--help` describes the example.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(sys.modules["__main__"].__doc__)
        return 0
    example, directory = HERE / name, Path("runs") / name
    begin = time.perf_counter()
    seconds: dict[str, float] = {}

    def run(title: str, *command: str) -> None:
        print(f"\n== {title}: {' '.join(command)}", flush=True)
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True)
        seconds[title] = time.perf_counter() - start

    train, cpu = ("-m", "megatron_gvpo", "train", "--overwrite"), str(HERE / "cpu.yaml")
    try:
        run("make the task", str(example / "make_task.py"), "--out", str(directory / "task"))
        run("warm start (SFT)", *train, str(example / "sft.yaml"), cpu)
        run("GVPO", *train, str(example / "gvpo.yaml"), cpu, *overrides, *sys.argv[1:])
    except subprocess.CalledProcessError as error:
        print(f"{name} stopped: `{' '.join(error.cmd[1:])}` ended with {error.returncode}", file=sys.stderr)
        return 1
    total = time.perf_counter() - begin
    evaluations = _evaluations(directory / "metrics.jsonl")
    result = {"evaluations": evaluations, "seconds": {"total": total, "by_command": seconds}}
    (directory / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    talks = any("env/turns" in line for line in evaluations)
    print("\nstep  held-out pass@1" + "  turns in training" * talks)
    for line in evaluations:
        turns = f"  {line['env/turns']:17.1f}" if "env/turns" in line else ""
        print(f"{line['step']:4}  {line['eval/pass@1']:15.1%}{turns}")
    print(f"{total:.0f} s in all: " + ", ".join(f"{title} {s:.0f} s" for title, s in seconds.items()))
    return 0


def _evaluations(metrics: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [{key: line[key] for key in SHOWN if key in line} for line in lines if "eval/pass@1" in line]

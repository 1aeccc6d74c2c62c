"""Seconds a GRPO step on CPU: TRL's GRPOTrainer and this trainer, the same work, turn by turn.

A tiny Qwen2 (4 layers, hidden 128, fp32), 32 prompts of 16 tokens x 8 responses, one optimizer update a step,
the same responses, rewards and learning rate on both sides. Each side is a process with its own trainer,
which runs its own loop; a callback stops it after every step until it is its turn again. Measured is

  equal   the training step on given responses of 128 tokens: advantages, packing or padding, forward,
          loss, backward, optimizer
  ragged  the same, with given responses of 4 to 128 tokens, uniform
  whole   the whole step, with each side's own sampling of 128 tokens, rewards and transfer of the weights

Responses cannot be stopped at chosen lengths while they are sampled, so there is no whole ragged step. The
model's weights rule its end token out, so that all sampled responses have full length.

That it is the same computation shows in the gradient norms, which agree step by step on given responses,
each step's depending on all updates before it. TRL gets the settings that are fastest here: no gradient
checkpointing, no reference model, and micro-batches of 64 (of 256, 64 and 32 responses the fastest). It
computes the entropy for its log, and has no switch for that.

Ratios are TRL / ours of neighbouring steps, above 1 where ours is faster. On a machine that does other work,
read the median, and `of_fastest`, the ratio of each side's fastest step. The first run makes an environment
with TRL in the user's cache directory (a few minutes).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PINS = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")  # the others: constraints.txt
PROMPTS, RESPONSES, PROMPT_TOKENS, MAX_TOKENS, MIN_TOKENS = 32, 8, 16, 128, 4
LEARNING_RATE = 1e-4
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BATCH = {
    **MODEL,
    "dtype": "float32",
    "prompts": PROMPTS,
    "responses": RESPONSES,
    "prompt_tokens": PROMPT_TOKENS,
    "response_tokens": {"equal": MAX_TOKENS, "ragged": [MIN_TOKENS, MAX_TOKENS]},
}
FIRST_TOKEN = 0x4E00  # token i is the character chr(FIRST_TOKEN + i)


class Case(NamedTuple):
    lengths: str
    vocab: int
    target: float | None = None  # median ratio, TRL / ours
    whole: bool = False


CASES = {
    "equal": Case("equal", 64, target=1.0),
    "ragged": Case("ragged", 64, target=1.5),
    "whole": Case("equal", 64, whole=True),
    "equal_8k": Case("equal", 8192),
    "ragged_8k": Case("ragged", 8192),
}


def main() -> None:
    args = parse()
    if args.side is not None:
        {"ours": run_ours, "trl": run_trl}[args.side](args)
        return
    trl_python = make_environment()
    report: dict[str, Any] = {"machine": machine(), "settings": settings(args), "batch": BATCH, "cases": {}}
    for name in args.cases:
        report["cases"][name] = measure(name, args, trl_python)
        print_case(name, report["cases"][name])
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=list(CASES),
        metavar="CASE",
        help=f"of {', '.join(CASES)} (8k: a vocabulary of 8192, not 64); default: all",
    )
    parser.add_argument("--rounds", type=int, default=8, help="measured steps of each side (8)")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before them (1)")
    parser.add_argument("--threads", type=int, default=2, help="of each side (2); they never run at once")
    parser.add_argument("--trl-batch", type=int, default=64, help="TRL's per_device_train_batch_size (64)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="our max_tokens_per_micro_batch (8192)")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    for hidden in ("--side", "--case", "--directory"):  # of one side's process
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args()


# The two sides: each a process, told over its standard input when to take a step.


def measure(name: str, args: argparse.Namespace, trl_python: Path) -> dict[str, Any]:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        make_material(Path(directory), case.vocab)
        with (
            Side("trl", trl_python, name, directory, args) as trl,
            Side("ours", Path(sys.executable), name, directory, args) as ours,
        ):
            for _ in range(args.warm_up):
                trl.step(), ours.step()
            rounds = []
            for i in range(args.rounds):
                rounds.append((trl.step(), ours.step()))
                shown = " and ".join(f"{side['wall_s']:.1f} s" for side in rounds[-1])
                print(f"{name} {i + 1}/{args.rounds}: TRL and ours {shown}", file=sys.stderr, flush=True)
            parts = [ours.step("parts")["seconds"] for _ in range(3)]
            operators = ours.step("operators")["operators"]
    return summarise(case, rounds, parts, operators)


class Side:
    """One trainer's process, which takes a step when told and answers with its figures."""

    def __init__(self, side: str, python: Path, case: str, directory: str, args: argparse.Namespace) -> None:
        options = ["--side", side, "--case", case, "--directory", directory]
        for name, value in settings(args).items():
            options += [f"--{name.replace('_', '-')}", str(value)]
        self._log = Path(directory) / f"{side}.log"
        self._process = subprocess.Popen(
            [str(python), __file__, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(args.threads)},
        )

    def step(self, how: str = "plain") -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(how, file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise SystemExit(f"{self._log.stem} ended before its time:\n{self._log.read_text()}") from None

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()  # the end of its input ends it


class Turns:
    """Inside one side's process: waits for its turn, measures the step, answers."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever the libraries print is no answer

    def wait(self) -> str:
        how = sys.stdin.readline().strip()
        if not how:
            os._exit(0)  # in the middle of a run, which would go on to save its model
        self._wall, self._cpu = -time.perf_counter(), -time.process_time()
        return how

    def stop(self) -> None:
        self._wall += time.perf_counter()
        self._cpu += time.process_time()

    def answer(self, **figures: Any) -> None:
        answer = {"wall_s": self._wall, "cpu_s": self._cpu, **figures}
        print(json.dumps(answer), file=self._answers, flush=True)


def run_trl(args: argparse.Namespace) -> None:
    turns = Turns()
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class InTurn(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.stop()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            turns.answer(grad_norm=logs["grad_norm"])

    def given(prompts: list[str], trainer: Any) -> dict[str, Any]:
        responses = given_responses(case, trainer.state.global_step + 1)
        return {
            "prompt_ids": [encode(prompt) for prompt in prompts],
            "completion_ids": [ids for group in responses for ids in group],
            "logprobs": None,
        }

    case = CASES[args.case]
    directory = Path(args.directory)
    config = GRPOConfig(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=args.trl_batch,
        gradient_accumulation_steps=PROMPTS * RESPONSES // args.trl_batch,
        num_generations=RESPONSES,
        max_completion_length=MAX_TOKENS,
        loss_type="grpo",
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=10**6,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(directory / "model"),
        reward_funcs=lambda completions, **_: [reward("", text) for text in completions],
        args=config,
        train_dataset=Dataset.from_json(str(directory / "train.jsonl")),
        callbacks=[InTurn()],
        rollout_func=None if case.whole else given,
    )
    trainer.train()


def run_ours(args: argparse.Namespace) -> None:
    turns = Turns()
    import torch

    from megatron_gvpo.callbacks import Callback
    from megatron_gvpo.config import build_config
    from megatron_gvpo.trainer import Trainer
    from megatron_gvpo.types import Group, Rollout

    class InTurn(Callback):
        def __init__(self) -> None:
            self.seconds: dict[str, float] = {}
            self.how = "plain"

        def on_step(self, trainer: Trainer, step: int, metrics: Any) -> None:
            if step:  # 0 is the evaluation before the first
                turns.stop()
                figures = {"grad_norm": metrics["train/grad_norm"]}
                if self.how == "operators":
                    profiler.stop()
                    figures["operators"] = operator_shares(profiler)
                self.seconds["step"] = metrics["time/step"]
                turns.answer(**figures, seconds=self.seconds)
            how = turns.wait()
            self.seconds.clear()
            if how == "parts" != self.how:
                take_apart(self.seconds)
            if how == "operators":
                profiler.start()
            self.how = how

    class Given:
        def sample(self, prompts: Any, seed: int) -> list[Group]:
            responses = given_responses(case, trainer.step + 1)
            return [
                Group(prompt, [rollout(ids) for ids in group])
                for prompt, group in zip(prompts, responses, strict=True)
            ]

    def rollout(ids: list[int]) -> Rollout:
        text = decode(ids)
        return Rollout(ids, [], text, "length", reward=reward("", text))

    case, directory = CASES[args.case], Path(args.directory)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    config = build_config(
        {
            "output_dir": str(directory / "ours"),
            "model": {"path": str(directory / "model"), "dtype": "float32"},
            "data": {
                "train": {"path": str(directory / "train.jsonl"), "answer_key": None},
                "chat_template": False,
                "shuffle": False,
                "max_prompt_tokens": PROMPT_TOKENS,
            },
            "algorithm": {"recipe": "grpo", "estimator": {"eps": 1e-4}, "loss": {"kl_coef": 0.0}},
            "rollout": {"n": RESPONSES, "max_tokens": MAX_TOKENS},
            "rewards": {"components": [{"name": "even", "function": f"{__file__}:reward"}]},
            "train": {
                "steps": 10**6,
                "prompts_per_step": PROMPTS,
                "max_tokens_per_micro_batch": args.max_tokens,
            },
            "optimizer": {"lr": LEARNING_RATE, "betas": [0.9, 0.999], "clip_grad": 1.0},
        }
    )
    trainer = Trainer(config, [InTurn()])
    if not case.whole:
        trainer.parts.sampler = Given()
        trainer.parts.sync = lambda version: None  # nothing samples from the weights
    trainer.fit()


def take_apart(seconds: dict[str, float]) -> None:
    """From now on, add up in `seconds` what the parts of our step take."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_gvpo import parts
    from megatron_gvpo.megatron import forward, optimizer, policy

    def timed(owner: Any, name: str, part: str, within: str | None = None) -> None:
        function = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            took = time.perf_counter() - begin
            seconds[part] = seconds.get(part, 0.0) + took
            if within is not None:
                seconds[within] = seconds.get(within, 0.0) - took
            return result

        setattr(owner, name, wrapped)

    timed(parts.EngineSampler, "sample", "sampling and rewards")
    timed(parts.InProcess, "push", "weights to the engine")
    timed(policy, "plan", "planning and packing")
    timed(policy.Rows, "select", "planning and packing")
    timed(forward.TokenBatch, "pack", "planning and packing", within="forward")
    timed(forward, "_packed_params", "planning and packing", within="forward")
    timed(forward, "linear_logprob", "head with its backward", within="forward")
    timed(schedules, "forward_step", "forward")
    timed(schedules, "backward_step", "backward")
    timed(optimizer.Optimizer, "zero_grad", "optimizer")
    timed(optimizer.Optimizer, "apply", "optimizer")


def operator_shares(profiler: Any) -> dict[str, float]:
    """Shares of a step's operator time, the largest first."""
    kinds = {"mm": "matrix products", "addmm": "matrix products", "bmm": "matrix products"}
    microseconds: dict[str, float] = {}
    for event in profiler.key_averages():
        name = event.key.removeprefix("aten::").rstrip("_")
        name = "attention" if "flash_attention" in name else kinds.get(name, name)
        if event.key.startswith("aten::"):
            microseconds[name] = microseconds.get(name, 0.0) + event.self_cpu_time_total
    total = sum(microseconds.values())
    largest = sorted(microseconds, key=lambda name: -microseconds[name])[:8]
    return {name: round(microseconds[name] / total, 3) for name in largest}


# What both sides get.


def make_material(directory: Path, vocab: int) -> None:
    """A model with random weights, a tokenizer with a character a token, and prompts."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    padding, *characters = [decode([i]) for i in range(vocab - 1)]
    tokenizer = Qwen2Tokenizer(
        vocab={padding: 0}, merges=[], pad_token=padding, eos_token=None, unk_token=None
    )
    tokenizer.add_tokens(characters)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(directory / "model")

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        **MODEL,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # a coordinate that all tokens share, and the head of the end token abhors
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] = -10.0
    model.save_pretrained(directory / "model")

    rng = random.Random(0)
    prompts = [decode(rng.choices(range(1, vocab - 1), k=PROMPT_TOKENS)) for _ in range(64 * PROMPTS)]
    (directory / "train.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))


def given_responses(case: Case, step: int) -> list[list[list[int]]]:
    """Token ids of the responses to each prompt."""
    rng = random.Random(step)

    def response() -> list[int]:
        length = MAX_TOKENS if case.lengths == "equal" else rng.randint(MIN_TOKENS, MAX_TOKENS)
        return rng.choices(range(1, case.vocab - 1), k=length)

    return [[response() for _ in range(RESPONSES)] for _ in range(PROMPTS)]


def reward(prompt: str, response: str) -> float:
    """The share of even tokens: something that differs between responses and costs nothing."""
    return sum(i % 2 == 0 for i in encode(response)) / max(len(response), 1)


def encode(text: str) -> list[int]:
    return [ord(character) - FIRST_TOKEN for character in text]


def decode(ids: list[int]) -> str:
    return "".join(chr(FIRST_TOKEN + i) for i in ids)


def make_environment() -> Path:
    """The Python of an environment with TRL, made where it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-gvpo"
    directory = cache / "-".join(PINS).replace("==", "-")
    python, complete = directory / "bin" / "python", directory / ".complete"
    if not complete.exists():
        print(f"making an environment with {', '.join(PINS)} in {cache}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python)]
        subprocess.run([*install, "--constraints", str(ROOT / "constraints.txt"), *PINS], check=True)
        complete.touch()
    return python


# The report.


def settings(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in ("threads", "trl_batch", "max_tokens")}


def machine() -> dict[str, Any]:
    versions = dict(pin.split("==") for pin in PINS)
    versions |= {name: version(name) for name in ("torch", "transformers", "megatron-core")}
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[1],
        "python": platform.python_version(),
        **versions,
    }


def summarise(
    case: Case, rounds: list[tuple[dict, dict]], parts: list[dict[str, float]], operators: dict[str, float]
) -> dict[str, Any]:
    median_of = {name: median(p.get(name, 0.0) for p in parts) for name in parts[0]}
    median_of["rest"] = 2 * median_of["step"] - sum(median_of.values())
    return {
        **case._asdict(),
        "trl_s": spread(trl["wall_s"] for trl, _ in rounds),
        "ours_s": spread(ours["wall_s"] for _, ours in rounds),
        "ratio": ratios(rounds, "wall_s"),
        "cpu_ratio": ratios(rounds, "cpu_s"),
        "grad_norm": rounds[-1][1]["grad_norm"],
        # Sampled responses differ between the sides, and so do their gradients.
        "grad_norm_difference": None
        if case.whole
        else max(abs(ours["grad_norm"] / trl["grad_norm"] - 1) for trl, ours in rounds),
        "ours_parts_s": {name: round(value, 3) for name, value in median_of.items()},
        "ours_operators": operators,
    }


def ratios(rounds: list[tuple[dict, dict]], clock: str) -> dict[str, float]:
    fastest = [min(r[side][clock] for r in rounds) for side in (0, 1)]
    of_fastest = round(fastest[0] / fastest[1], 3)
    return spread(trl[clock] / ours[clock] for trl, ours in rounds) | {"of_fastest": of_fastest}


def spread(values: Iterable[float]) -> dict[str, float]:
    values = sorted(values)
    return {"min": round(values[0], 3), "median": round(median(values), 3), "max": round(values[-1], 3)}


def print_case(name: str, result: dict[str, Any]) -> None:
    trl, ours, ratio = (result[key] for key in ("trl_s", "ours_s", "ratio"))
    target = "" if result["target"] is None else f", target {result['target']}"
    print(
        f"{name}: TRL {trl['median']:.2f} s, ours {ours['median']:.2f} s; ratio {ratio['median']:.2f} "
        f"({ratio['min']:.2f} to {ratio['max']:.2f}{target}), "
        f"of the fastest {ratio['of_fastest']:.2f}; in CPU time {result['cpu_ratio']['median']:.2f}"
    )
    if result["grad_norm_difference"] is not None:
        print(f"  gradient norms differ by at most {result['grad_norm_difference']:.0e}")
    print("  ours: " + ", ".join(f"{part} {value:.2f} s" for part, value in result["ours_parts_s"].items()))
    print("  ours: " + ", ".join(f"{name} {share:.0%}" for name, share in result["ours_operators"].items()))


if __name__ == "__main__":
    main()

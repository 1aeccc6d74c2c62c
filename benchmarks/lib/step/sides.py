"""The two sides of step_vs_trl.py: each is a process that takes a step for each line of its standard input.

    python sides.py SIDE --case CASE --directory DIR --trl-batch N --max-tokens N

A line "plain" asks for one step. The answer is a line of JSON with its figures. Our side also accepts "parts"
and "operators", which add the time by part or by operator. The end of the input ends the process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # TRL's environment and ours run this file

from lib.step import task
from lib.step.task import (
    CASES,
    LEARNING_RATE,
    MAX_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    RESPONSES,
    decode,
    encode,
    even_share,
    given_responses,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("side", choices=("trl", "ours"))
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="directory of the model and prompts")
    parser.add_argument("--trl-batch", type=int, required=True, help="TRL's per_device_train_batch_size")
    parser.add_argument("--max-tokens", type=int, required=True, help="our max_tokens_per_micro_batch")
    args = parser.parse_args()
    {"trl": run_trl, "ours": run_ours}[args.side](args)


class Turns:
    """The turns of one side's process: it waits for a turn, measures the step, and answers."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries' output goes to standard error, so that the answers contain none of it

    def wait(self) -> str:
        how = sys.stdin.readline().strip()
        if not how:
            os._exit(0)  # an ordinary exit would let the run save its model
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

    def responses_of_case(prompts: list[str], trainer: Any) -> dict[str, Any]:
        responses = given_responses(case, trainer.state.global_step + 1)
        return {
            "prompt_ids": [encode(prompt) for prompt in prompts],
            "completion_ids": [ids for group in responses for ids in group],
            "logprobs": None,
        }

    case, directory = CASES[args.case], args.directory
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
        reward_funcs=lambda completions, **_: [even_share(text) for text in completions],
        args=config,
        train_dataset=Dataset.from_json(str(directory / "train.jsonl")),
        callbacks=[InTurn()],
        rollout_func=None if case.is_full_step else responses_of_case,
    )
    trainer.train()


def run_ours(args: argparse.Namespace) -> None:
    turns = Turns()
    import torch

    from megatron_gvpo.groups import Group, Rollout
    from megatron_gvpo.sampling.batch_queues import BatchQueue
    from megatron_gvpo.settings.config import build_config
    from megatron_gvpo.training.callbacks import Callback
    from megatron_gvpo.training.trainer import Trainer

    class InTurn(Callback):
        def __init__(self) -> None:
            self.seconds: dict[str, float] = {}
            self.how = "plain"

        def on_step(self, trainer: Trainer, step: int, metrics: Any) -> None:
            if step:  # 0 is the evaluation before the first
                turns.stop()
                assert not metrics.get("reward/errors"), "the reward function fails"
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
        def request(self, prompts: Any, seed: int) -> Any:
            return prompts

        def complete(self, prompts: Any, step: int) -> list[Group]:
            responses = given_responses(case, step)
            return [
                Group(prompt, [rollout(ids) for ids in group])
                for prompt, group in zip(prompts, responses, strict=True)
            ]

    def rollout(ids: list[int]) -> Rollout:
        text = decode(ids)
        return Rollout(ids, [], text, "length", reward=even_share(text))

    case, directory = CASES[args.case], args.directory
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
            "rewards": {"components": [{"name": "even", "function": f"{task.__file__}:reward"}]},
            "train": {
                "steps": 10**6,
                "prompts_per_step": PROMPTS,
                "max_tokens_per_micro_batch": args.max_tokens,
            },
            "optimizer": {"lr": LEARNING_RATE, "betas": [0.9, 0.999], "clip_grad": 1.0},
        }
    )
    trainer = Trainer(config, [InTurn()])
    if not case.is_full_step:
        parts = trainer.components
        parts.batches = BatchQueue(parts.order, parts.prompts, Given(), PROMPTS)
        parts.sync = lambda version: None  # type: ignore[method-assign] # nothing samples from the weights
    trainer.fit()


def take_apart(seconds: dict[str, float]) -> None:
    """From now on, add the seconds of the parts of each of our steps to `seconds`."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_gvpo.megatron import forward, microbatch, optimizer, policy
    from megatron_gvpo.sampling import embedded, samplers

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

    timed(samplers.EngineSampler, "finish", "sampling and rewards")
    timed(embedded.EmbeddedEngine, "sync", "weights to the engine")
    timed(microbatch, "plan", "planning and packing")
    timed(policy.TrainBatch, "select", "planning and packing")
    timed(forward.PackedBatch, "pack", "planning and packing", within="forward")
    timed(forward, "_packed_params", "planning and packing", within="forward")
    timed(forward, "linear_logprob", "head with its backward", within="forward")
    timed(schedules, "forward_step", "forward")
    timed(schedules, "backward_step", "backward")
    timed(optimizer.Optimizer, "zero_grad", "optimizer")
    timed(optimizer.Optimizer, "apply", "optimizer")


def operator_shares(profiler: Any) -> dict[str, float]:
    """Return the operators' shares of a step's operator time, the largest first."""
    kinds = dict.fromkeys(("mm", "addmm", "bmm", "_linear_pointwise"), "matrix products")
    microseconds: dict[str, float] = {}
    for event in profiler.key_averages():
        library, _, name = event.key.rstrip("_").rpartition("::")
        name = "attention" if "flash_attention" in name else kinds.get(name, name)
        if library in ("aten", "mkldnn"):
            microseconds[name] = microseconds.get(name, 0.0) + event.self_cpu_time_total
    total = sum(microseconds.values())
    largest = sorted(microseconds, key=lambda name: -microseconds[name])[:8]
    return {name: round(microseconds[name] / total, 3) for name in largest}


if __name__ == "__main__":
    main()

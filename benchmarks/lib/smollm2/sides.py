"""The two sides of smollm2_vs_trl.py: each is a process that trains SmolLM2 with GRPO and writes its figures.

    python sides.py SIDE --task DIR --model DIR --work DIR --seed N --steps N --out FILE

FILE gets a line of JSON for each step: the share of right responses, their mean length, processor and clock
seconds, and the process's peak memory so far. TRL's environment and ours run this file.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2"
sys.path.insert(0, str(EXAMPLE))

from rewards import strict  # noqa: E402

SYSTEM_PROMPT = "You are a calculator. Answer with one number."
PROMPTS, RESPONSES, MAX_TOKENS = 16, 8, 16
LEARNING_RATE, WARM_UP = 3e-5, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("side", choices=("trl", "ours"))
    for name in ("task", "model", "work", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--trl-batch", type=int, default=32, help="TRL's per_device_train_batch_size (32)")
    args = parser.parse_args()
    {"trl": run_trl, "ours": run_ours}[args.side](args)


class Clock:
    """Measures steps, and writes a line for each."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.start()

    def start(self) -> None:
        self._wall, self._processor = time.perf_counter(), time.process_time()

    def write(self, **figures: float) -> None:
        seconds = {
            "clock": time.perf_counter() - self._wall,
            "processor": time.process_time() - self._processor,
        }
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        with self._file.open("a") as lines:
            lines.write(json.dumps({**figures, **seconds, "peak_gib": peak}) + "\n")
        self.start()


def run_trl(args: argparse.Namespace) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    clock = Clock(args.out)
    batch: dict[str, float] = {}

    class Measure(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not batch:  # the time before the first step is that of the start
                clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.write(**batch)

    def reward(completions: Any, completion_ids: Any, answer: list[str], **_: Any) -> list[float]:
        rewards = []
        for completion, ids, right in zip(completions, completion_ids, answer, strict=True):
            finish = "stop" if tokenizer.eos_token_id in ids else "length"
            rollout = SimpleNamespace(text=completion[0]["content"], finish_reason=finish)
            rewards.append(strict(SimpleNamespace(answer=right), rollout))
        batch.update(reward=fmean(rewards), tokens=fmean(map(len, completion_ids)))
        return rewards

    def conversation(record: dict[str, str]) -> dict[str, Any]:
        system = {"role": "system", "content": SYSTEM_PROMPT}
        return {"prompt": [system, {"role": "user", "content": record["prompt"]}], "answer": record["answer"]}

    config = GRPOConfig(
        output_dir=str(args.work),
        per_device_train_batch_size=args.trl_batch,
        gradient_accumulation_steps=PROMPTS * RESPONSES // args.trl_batch,
        num_generations=RESPONSES,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        loss_type="grpo",
        beta=0.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=WARM_UP,
        max_grad_norm=1.0,
        max_steps=args.steps,
        seed=args.seed,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    data = Dataset.from_list([conversation(json.loads(line)) for line in problems(args).splitlines()])
    trainer = GRPOTrainer(
        model=str(args.model), reward_funcs=reward, args=config, train_dataset=data, callbacks=[Measure()]
    )
    trainer.train()


def run_ours(args: argparse.Namespace) -> None:
    from megatron_gvpo.settings.config import load_config
    from megatron_gvpo.training.callbacks import Callback
    from megatron_gvpo.training.trainer import Trainer

    clock = Clock(args.out)

    class Measure(Callback):
        def on_step(self, trainer: Trainer, step: int, metrics: Any) -> None:
            if step:  # 0 is the report before the first
                clock.write(reward=metrics["reward/strict"], tokens=metrics["response/length"])
            else:
                clock.start()

    overrides = {
        "output_dir": args.work,
        "model.path": args.model,
        "data.train.path": args.task,
        "data.eval": None,
        "data.shuffle": False,
        "algorithm": {"recipe": "grpo", "estimator": {"eps": 1e-4}, "loss": {"kl_coef": 0.0}},
        "train.steps": args.steps,
        "train.seed": args.seed,
        "train.mini_batches": 1,
        "optimizer.lr": LEARNING_RATE,
        "optimizer.decay": "constant",
        "optimizer.warmup_steps": WARM_UP,
        "optimizer.betas": [0.9, 0.999],
        "optimizer.clip_grad": 1.0,
        "checkpoint.every": 0,
        "checkpoint.export_hf": False,
        "eval.every": 0,
    }
    texts = [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
    Trainer(load_config([EXAMPLE / "gvpo.yaml"], texts), [Measure()]).fit()


def problems(args: argparse.Namespace) -> str:
    return args.task.read_text()


if __name__ == "__main__":
    main()

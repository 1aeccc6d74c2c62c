"""Makes the records of a run and its saved responses without training, for tests of the report.

The responses are texts that a byte-level tokenizer splits, with characters that several tokens share.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_gvpo.observe.rollouts.schema import schema

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    "{{ 7 * 7 }} ${7 * 7} \u202e\u2028 &lt;b&gt; ]]> \x00",
)
WORDS = (
    *("so", "the", "sum", "of", "carry", "over", "digits", "is", "first", "we", "add", "then", "check"),
    *("\\boxed{42}", "12", "+", "30", "=", "42", "\u2192", "\U0001f600\n"),
)


def make_tokenizer(directory: Path) -> Tokenizer:
    """Write tokenizer.json of a small byte-level tokenizer; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS[:20])] * 4, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def make_run(
    directory: Path,
    steps: int = 4,
    prompts: int = 3,
    k: int = 4,
    words: int = 20,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    texts: Sequence[str] = (),
) -> Path:
    """Write metrics.jsonl, config.yaml, run.json, hf/tokenizer.json and rollouts/ of a run that improves.

    `texts` are the first responses of every step; the others have about `words` words.
    """
    draw = random.Random(seed)
    tokenizer = make_tokenizer(directory / "hf")
    (directory / "rollouts").mkdir()
    records = []
    for step in range(steps + 1):
        right = 0.2 + 0.6 * step / max(steps, 1)
        record: dict[str, Any] = {"step": step}
        if step % max(1, steps // 4) == 0:
            rows = _rows(draw, tokenizer, "eval", step, prompts, k, words, right, ())
            _write(directory / f"rollouts/eval_{step:06d}.parquet", rows)
            record["eval/pass@1"] = sum(row["reward"] for row in rows) / len(rows)
        if step:
            rows = _rows(draw, tokenizer, "train", step, prompts, k, words, right, texts)
            _write(directory / f"rollouts/step_{step:06d}.parquet", rows)
            record |= _metrics(draw, step, rows)
        records.append(record)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    values = {"output_dir": str(directory), "train": {"steps": steps, "seed": seed}, **(config or {})}
    (directory / "config.yaml").write_text(yaml.safe_dump(values))
    start = {"time": "2026-11-22T10:00:00+00:00", "from_step": 0, "host": "node1", "pid": 1, "world_size": 1}
    start |= {"command": "megatron-gvpo train run.yaml", "directory": "/", "versions": {"torch": "2.13"}}
    (directory / "run.json").write_text(json.dumps({"files": {}, "starts": [start]}))
    return directory


def _rows(
    draw: random.Random,
    tokenizer: Tokenizer,
    kind: str,
    step: int,
    prompts: int,
    k: int,
    words: int,
    right: float,
    texts: Sequence[str],
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for i in range(prompts * k):
        text = (
            texts[i]
            if i < len(texts)
            else " ".join(draw.choices(WORDS, k=draw.randint(words // 2, 2 * words)))
        )
        ids = [*tokenizer.encode(text).ids, 0]
        engine = [-draw.expovariate(2.0) for _ in ids]
        reward = float(draw.random() < right)
        advantage = reward - right
        rows.append(
            {
                **{"step": step, "kind": kind, "group": i // k, "member": i % k},
                **{
                    "prompt_id": f"p{i // k}",
                    "prompt": f"What is {i // k} + {step}?",
                    "prompt_ids": [1, 2, 3],
                },
                **{"response": text, "response_ids": ids, "reward": reward},
                **{"rewards": {"math": reward}, "reward_errors": {"math": "timeout" if i == 1 else None}},
                **{"advantage": advantage, "advantages": None, "source": "policy"},
                **{"version_first": step - 1, "version_last": step - 1, "rollout_logprobs": engine},
                "trainer_logprobs": [x + draw.gauss(0, 0.03) for x in engine] if kind == "train" else None,
                **{"weight": -advantage, "weights": [-advantage * draw.random() for _ in ids]},
                **{"finish_reason": "stop", "prompt_tokens": 3, "response_tokens": len(ids)},
                **{"seconds": draw.random(), "server": None},
            }
        )
    return rows


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows, schema(["math"])), file)


def _metrics(draw: random.Random, step: int, rows: list[dict[str, Any]]) -> dict[str, float]:
    noise = draw.gauss(0, 0.02)
    return {
        "reward/mean": sum(row["reward"] for row in rows) / len(rows),
        "reward/math": sum(row["reward"] for row in rows) / len(rows),
        "response/length": sum(row["response_tokens"] for row in rows) / len(rows),
        **{"response/truncated": 0.0, "reward/groups_with_signal": 0.7 + noise},
        **{"train/kl": 0.001 * step + abs(noise) / 100, "train/grad_norm": 0.5 + noise, "train/loss": noise},
        **{"mismatch/kl": 1e-4 * (1 + noise), "mismatch/abs_max": 0.1 + noise, "train/lr": 1e-6},
        **{"time/rollout": 4 + noise, "time/reward": 0.3, "time/scoring": 0.5, "time/training": 3 - noise},
        **{"time/sync": 0.2, "time/step": 8.4, "throughput/tokens_per_s": 5200 * math.exp(noise)},
        **({"memory/weights_gib": 2.0, "memory/peak_gib": 9.5, "memory/head_gib": 1.5} if step == 1 else {}),
        **{f"device/gpu{i}/utilization": 0.9 + noise for i in range(2)},
    }

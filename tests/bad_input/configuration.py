"""Configurations that cannot be meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bad_input.case import TRAIN, Case, Expected, with_text


def value(override: str, *says: str, expected: Expected = "refused") -> Case:
    """One value on top of a good configuration; the error must name the key."""
    key = override.partition("=")[0].split(".")[-1]
    engine = ("rollout.engine=vllm",) if override.startswith(("rollout.servers", "rollout.weights")) else ()
    arguments = (*TRAIN, *engine, override)
    says = says or (() if expected == "either" else (key,))
    return Case("configuration", override[:60], arguments, expected=expected, says=says)


def file(name: str, text: str | bytes, *says: str, expected: Expected = "refused") -> Case:
    """Another file on top of a good configuration; the error must name the file or its key."""
    arguments = ("train", "run.yaml", "more.yaml", *TRAIN[2:])
    return Case(
        "configuration", name, arguments, with_text("more.yaml", text), expected, says or ("more.yaml",)
    )


def on_disk(name: str, spoil: Callable[[Path], object], *arguments: str, says: tuple[str, ...]) -> Case:
    return Case("configuration", name, arguments, spoil, "refused", says)


DIGITS = "9" * 5000
COMPONENT = "rewards.components=[{name: variety, function: 'reward.py:reward', "

CONFIGURATION = [
    Case("configuration", "a sound run", TRAIN, expected="runs"),
    *(
        value(f"{key}=true")
        for key in (
            "optimizer.min_lr",
            "optimizer.eps",
            "rollout.n",
            "rollout.temperature",
            "rollout.top_p",
            "train.seed",
            "train.mini_batches",
            "rewards.timeout",
            "rewards.workers",
            "checkpoint.keep",
            "parallel.tp",
            "eval.n",
            "rollout.servers.port",
            "rollout.weights.timeout",
            "rollout.mismatch_threshold",
            "data.max_prompt_tokens",
        )
    ),
    value("optimizer.betas=[true, 0.9]"),
    value("eval.k=[true]"),
    value("logging.profile_steps=[true, true]"),
    value("rollout.stop_token_ids=[true]"),
    value(COMPONENT + "weight: true}]", "weight"),
    value("train.seed=-1"),
    value("train.seed=99999999999999999999999999"),
    value("eval.seed=-5"),
    value("eval.seed=1e30"),
    value(f"train.seed={DIGITS}"),
    value(f"train.steps={DIGITS}"),
    value("train.steps=1e400"),
    value("train.steps=2.5"),
    value("train.steps=0"),
    value("train.steps="),
    value("train.steps=99999999999999999999"),
    value("rollout.n=1000000000000"),
    value("rollout.max_tokens=1000000000000000000"),
    value("rollout.batch_size=0"),
    value("rollout.temperature=.nan"),
    value("rollout.temperature=0"),
    value("rollout.temperature=-.inf"),
    value("rollout.temperature=1e-300"),
    value("rollout.top_p=1.5"),
    value("rollout.top_p=0"),
    value("rollout.stop_token_ids=[-1]"),
    value("rollout.stop_token_ids=[123456789]"),
    value("rollout.stop_token_ids=[99999999999999999999]"),
    value("rollout.async_steps=-1"),
    value("rollout.engine=SGLANG"),
    value("rollout.engine=os.system"),
    value("rollout.weights.transport=pigeon"),
    value("rollout.servers.port=70000"),
    value("rollout.servers.port=-1"),
    value("rollout.servers.count=0"),
    value("rollout.servers.health_timeout=0"),
    value("rollout.servers.health_timeout=.inf"),
    value("rollout.servers.start_timeout=1e300"),
    value("rollout.servers.urls=['ftp://host']", "urls"),
    value("rollout.servers.urls=['http://']", "urls"),
    value("rollout.servers.urls=['http://h:99999']", "urls"),
    value("rewards.timeout=1e300"),
    value("rewards.timeout=0"),
    value("rewards.workers=1000000"),
    value("rewards.components=[]"),
    value("rewards.components=[{name: ''}]", "name", "components"),
    value("rewards.components=[{name: 'a/b', function: 'reward.py:reward'}]", expected="either"),
    value("rewards.components=null", "components"),
    value("rewards.components=math", "components"),
    value(COMPONENT + "weight: .inf}]", "weight"),
    value(COMPONENT + "weight: 0}]", "weight", "components"),
    value(COMPONENT + "options: [1]}]", "options"),
    value(COMPONENT + "wieght: 1}]", "wieght"),
    value("rewards.components=[{name: x, function: 'reward.py'}]", "reward.py"),
    value("rewards.components=[{name: x, function: 'nothere.py:reward'}]", "nothere.py"),
    value("rewards.components=[{name: x, function: 'reward.py:'}]", "reward.py"),
    value("rewards.components=[{name: x, function: 'no.such.module:f'}]", "no.such.module", "no"),
    value("train.mini_batches=5"),
    value("train.prompts_per_step=1000000000"),
    value("train.max_tokens_per_micro_batch=3", expected="either"),
    value("train.max_tokens_per_micro_batch=1e18"),
    value("train.head_stash_mb=-1"),
    value("train.batch_epochs=0"),
    value("train.deterministic=maybe"),
    value("optimizer.lr=0"),
    value("optimizer.lr=-1e-5"),
    value("optimizer.lr=1e-5e"),
    value("optimizer.lr=.inf"),
    value("optimizer.lr=1000000"),
    value("optimizer.min_lr=1"),
    value("optimizer.eps=0"),
    value("optimizer.betas=[0.9]"),
    value("optimizer.betas=[0.9, 1.0]"),
    value("optimizer.betas=0.9"),
    value("optimizer.warmup_steps=-1"),
    value("optimizer.decay=exponential"),
    value("optimizer.clip_grad=-1"),
    value("optimizer.offload_fraction=1.5"),
    value("eval.k=[0]"),
    value("eval.k=[]", expected="either"),
    value("eval.every=-1"),
    value("eval.n=0"),
    value("checkpoint.keep=0"),
    value("checkpoint.every=-2"),
    value("checkpoint.every=1.5"),
    value("data.max_prompt_tokens=0"),
    value("data.prompt_too_long=cut"),
    value("data.train.limit=0"),
    value("data.train.path=null", "path"),
    value("data.train.path=[a, b]", "path"),
    value("data.train.path=''", "path"),
    value("data.train.path=data/none.jsonl", "none.jsonl"),
    value("model.path=''", "path"),
    value("model.path=nowhere", "nowhere"),
    value("model.path=run.yaml", "run.yaml"),
    value("model.dtype=float64"),
    value("model.fp8={recipe: magic}", "recipe"),
    value("output_dir=''", "output_dir"),
    value("output_dir=run.yaml", "output_dir"),
    value("output_dir=run.yaml/below", "output_dir"),
    value('output_dir="a\\0b"', "output_dir"),
    value("output_dir=/proc/nothing", "output_dir"),
    value("output_dir=" + "x" * 300, "output_dir"),
    value("output_dir=model", expected="either"),
    value("output_dir=[1]", "output_dir"),
    value("logging.profile_steps=[0, 1]"),
    value("logging.profile_steps=[3]"),
    value("logging.progress=loud"),
    value("parallel.tp=3"),
    value("parallel.pp=2"),
    value("parallel.stage_layers=[2, 2]"),
    value("parallel.timeout_seconds=0"),
    value("parallel.timeout_seconds=1e12"),
    value("parallel.ep=2"),
    value("algorithm=nosuchrecipe", "nosuchrecipe"),
    value("algorithm=[gvpo]", "algorithm"),
    value("algorithm={recipe: gvpo, loss: 3}", "loss"),
    value("algorithm={recipe: gvpo, loss: {name: nosuch}}", "nosuch"),
    value("algorithm={recipe: gvpo, loss: {name: gvpo, beta: true}}", "beta"),
    value("algorithm={recipe: gvpo, loss: {name: gvpo, beta: .nan}}", "beta"),
    value("algorithm={recipe: ../../etc/passwd}", "algorithm", "passwd"),
    value("train.stepz=3", "stepz", "steps"),
    value("trian.steps=3", "trian"),
    value("train=5", "train"),
    value("=3", "override"),
    value("train..steps=1", "train"),
    value(".=1", "override", "''"),
    value("a" * 5000 + "=1", "aaa"),
    value("train.steps={a: {b: {c: 1}}}"),
    file("an empty file", "", "more.yaml", expected="either"),
    file("a list", "- 1\n- 2\n"),
    file("a word", "hello\n"),
    file("tabs", "train:\n\tsteps: 1\n"),
    file("duplicate keys", "train: {steps: 1, steps: 2}\n", "steps"),
    file(
        "an alias bomb",
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [" + ",".join([f"*{chr(97 + i)}"] * 9) + "]\n" for i in range(9)
        ),
    ),
    file("nested 20,000 deep", "a: " + "[" * 20000 + "]" * 20000),
    file("a Python object", "train: !!python/object/apply:os.system ['touch ran_code']\n"),
    file("Latin-1", "output_dir: caf\xe9\n".encode("latin-1")),
    file("NUL bytes", b"train: {steps: 1}\x00\n"),
    file("binary", bytes(range(256)) * 10),
    file("two documents", "train: {steps: 1}\n---\ntrain: {steps: 2}\n"),
    file("a number as key", "1: 2\n", "1"),
    file("null as key", "null: 2\n", "more.yaml", "None", "null"),
    file("a megabyte of one key", "x" * 1000000 + ": 1\n", "more.yaml", "xxx"),
    file("a date", "train: {seed: 2026-11-22}\n", "seed"),
    file("a sexagesimal number", "train: {seed: 1:30}\n", "seed"),
    file("an octal number", "train: {seed: 0o17}\n", "seed", expected="either"),
    on_disk("a missing file", lambda t: None, "train", "nothere.yaml", says=("nothere.yaml",)),
    on_disk("a directory", lambda t: None, "train", "model", says=("model",)),
    on_disk(
        "a FIFO",
        lambda t: __import__("os").mkfifo(t / "pipe.yaml"),
        "train",
        "pipe.yaml",
        says=("pipe.yaml",),
    ),
    on_disk("a file name that is too long", lambda t: None, "train", "y" * 5000 + ".yaml", says=("yyy",)),
]

# mypy: disable-error-code="func-returns-value"
"""Runs that are resumed after something has changed, and files that contradict each other."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from bad_input.case import RESUME, TRAIN, Case, Expected, with_line, with_text, with_values
from bad_input.checkpoints import checkpoints_of
from bad_input.data import converted, record
from bad_input.weights import CONFIG, NORM, _sharded

Spoil = Callable[[Path], object]


def case(
    name: str,
    spoil: Spoil,
    *says: str,
    expected: Expected = "refused",
    arguments: Sequence[str] = TRAIN,
    resumed: bool = False,
    after: Callable[[Path], str] = lambda _: "",
    **environment: str | None,
) -> Case:
    return Case(
        "contradictions", name, arguments, spoil, expected, says, environment, resumed=resumed, after=after
    )


def resumed(name: str, spoil: Spoil, *says: str, more: Sequence[str] = (), **options: Any) -> Case:
    """The command continues a run that was stopped after its second checkpoint."""
    return case(name, spoil, *says, resumed=True, arguments=(*RESUME, *more), **options)


def each_step_once(task: Path) -> str:
    lines = (task / "run/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    return "" if [step for step in steps if step] == list(range(1, max(steps) + 1)) else "silent"


def saved(key: str, value: object) -> Callable[[Path], str]:
    """Checks what the run took the key for."""

    def check(task: Path) -> str:
        file = task / "run/config.yaml"
        section, _, name = key.partition(".")
        return "" if file.is_file() and yaml.safe_load(file.read_text())[section][name] == value else "silent"

    return check


def intact(name: str) -> tuple[Spoil, Callable[[Path], str]]:
    """Copies the model to the directory `name`, and checks that it is still there afterwards."""

    def spoil(task: Path) -> None:
        shutil.copytree(task / "model", task / name)

    return spoil, lambda task: "" if (task / name / "model.safetensors").is_file() else "lost"


def linked_lock(task: Path) -> None:
    (task / "precious.txt").write_text("years of work")
    (task / "run").mkdir(exist_ok=True)
    (task / "run/run.lock").symlink_to("../precious.txt")


def moved(name: str) -> Spoil:
    """Moves a file or directory elsewhere, and leaves a link in its place."""

    def spoil(task: Path) -> None:
        (task / "elsewhere").mkdir()
        target = task / "elsewhere" / Path(name).name
        (task / name).rename(target)
        (task / name).symlink_to(os.path.relpath(target, (task / name).parent))

    return spoil


def dated_backwards(task: Path) -> None:
    """The older a checkpoint, the later its date."""
    for number, directory in enumerate(reversed(checkpoints_of(task))):
        for path in (directory, *directory.rglob("*")):
            os.utime(path, (4e9 + number, 4e9 + number))


def larger_tokenizer(task: Path, uses: str = "") -> None:
    """A token that the model has no row for; `uses`: a prompt that has it."""
    file = task / "model/tokenizer.json"
    content = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": 5000, "content": "<new>", **flags})
    file.write_text(json.dumps(content))
    if uses:
        with_line(record(prompt=uses))(task)


def tokenizer_values(**values: Any) -> Spoil:
    def spoil(task: Path) -> None:
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (file := task / "model" / name).is_file():
                content = json.loads(file.read_text()) | values
                file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return spoil


def chat(line: str) -> Spoil:
    """A model with a chat template, and one line of data."""
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
    return lambda t: (with_text("model/chat_template.jinja", template)(t), with_line(line)(t))


def twice_in_index(task: Path) -> None:
    _sharded(task, dict)
    file = task / "model/model.safetensors.index.json"
    text = file.read_text()
    other = "one" if f'"{NORM}": "two' in text else "two"
    file.write_text(
        text.replace('{"weight_map": {', "").replace(
            f'"{NORM}": ', f'"{NORM}": "{other}.safetensors", "{NORM}": '
        )
    )


def shard(change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(task: Path) -> None:
        _sharded(task, dict)
        file = task / "model/two.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return spoil


def different_copies(task: Path) -> None:
    """The norm of another value is in the shard to which the index does not give it."""
    from safetensors.torch import save_file

    _sharded(task, dict)
    index = json.loads((task / "model/model.safetensors.index.json").read_text())["weight_map"]
    other = next(name for name in sorted(set(index.values())) if name != index[NORM])
    tensors = load_file(task / "model" / other)
    tensors[NORM] = torch.full((128,), 7.0)
    save_file(tensors, task / "model" / other, metadata={"format": "pt"})


def hub_cache(broken: bool) -> Spoil:
    """The layout of the hub's cache: links to files that a hash names."""

    def spoil(task: Path) -> None:
        blobs = task / "model" / "blobs"
        blobs.mkdir()
        for file in [path for path in (task / "model").iterdir() if path.is_file()]:
            file.rename(blobs / file.name[::-1])
            file.symlink_to(f"blobs/{file.name[::-1]}")
        if broken:
            (blobs / "model.safetensors"[::-1]).unlink()

    return spoil


def yaml_file(
    name: str, text: str | bytes, *says: str, expected: Expected = "refused", **options: Any
) -> Case:
    """Another configuration file, before the overrides that shorten the run."""
    arguments = ("train", "run.yaml", "more.yaml", *TRAIN[2:])
    says = says or (("more.yaml",) if expected == "refused" else ())
    return case(name, with_text("more.yaml", text), *says, arguments=arguments, expected=expected, **options)


KEEPS_HF, HF_THERE = intact("run/hf")
OVERWRITE = (*TRAIN, "--overwrite")

AFTER_A_CHANGE = [
    resumed("data that grew", converted(lambda d: d + d.splitlines(True)[3] * 10), "data.train.path"),
    resumed("data that shrank", converted(lambda d: b"".join(d.splitlines(True)[:-1])), "data.train.path"),
    resumed("data of another date", lambda t: os.utime(t / "data/train.jsonl", (0, 0)), expected="runs"),
    resumed("data with other line ends", converted(lambda d: d.replace(b"\n", b"\r\n")), "data.train.path"),
    resumed("a layout for two ranks on one", lambda t: None, "parallel.tp", more=("parallel.tp=2",)),
    resumed(
        "a change of a key that is none allowed",
        lambda t: None,
        "lrr",
        more=("--allow-change", "optimizer.lrr"),
    ),
    resumed("checkpoints dated backwards", dated_backwards, expected="runs", after=each_step_once),
    resumed(
        "the run's own configuration gone", lambda t: (t / "run/config.yaml").unlink(), expected="either"
    ),
    resumed("run.json a list", with_text("run/run.json", "[]"), "run.json"),
    resumed("output_dir moved, and a link there", moved("run"), expected="runs", after=each_step_once),
    resumed("checkpoints on another disk", moved("run/checkpoints"), expected="runs", after=each_step_once),
    resumed(
        "rollouts a file",
        lambda t: (shutil.rmtree(t / "run/rollouts", True), (t / "run/rollouts").write_text("x")),
        "rollouts",
    ),
    resumed(
        "tensorboard a file",
        lambda t: (t / "run/tensorboard").write_text("x"),
        "tensorboard",
        more=("logging.tensorboard=true",),
    ),
    resumed(
        "metrics that end in NULs, as after a power failure",
        lambda t: (t / "run/metrics.jsonl").open("ab").write(b'{"step": 9, "rew\0\0\0\0'),
        expected="runs",
        after=each_step_once,
    ),
    resumed(
        "metrics beyond the newest checkpoint",
        lambda t: shutil.rmtree(checkpoints_of(t)[-1]),
        expected="runs",
        after=each_step_once,
    ),
    resumed("a lock that is a directory", lambda t: (t / "run/run.lock").mkdir(), "run.lock"),
    case(
        "a lock that is a link to a file of the user's",
        linked_lock,
        expected="either",
        after=lambda t: "" if (t / "precious.txt").read_text() == "years of work" else "lost",
    ),
    case(
        "--overwrite of the model that it reads",
        KEEPS_HF,
        "model.path",
        arguments=(*OVERWRITE, "model.path=run/hf"),
        after=HF_THERE,
    ),
    case(
        "--overwrite of the teacher",
        KEEPS_HF,
        "teacher.path",
        arguments=(*OVERWRITE, "algorithm=opd", "teacher.path=run/hf"),
        after=HF_THERE,
    ),
    case(
        "--overwrite of a reward model",
        KEEPS_HF,
        "model.path",
        arguments=(
            *OVERWRITE,
            "rewards.components=[{name: rm, model: {path: run/hf, servers: {engine: vllm, urls: ['http://127.0.0.1:9']}}}]",
        ),
        after=HF_THERE,
    ),
    case(
        "--overwrite of the reward's file",
        lambda t: ((t / "run/exports").mkdir(parents=True), shutil.copy(t / "reward.py", t / "run/exports")),
        "function",
        arguments=(
            *OVERWRITE,
            "rewards.components=[{name: variety, function: 'run/exports/reward.py:reward'}]",
        ),
        after=lambda t: "" if (t / "run/exports/reward.py").is_file() else "lost",
    ),
    Case(
        "contradictions",
        "export onto the run",
        ("export", "run.yaml", "output_dir=run", "--out", "run"),
        says=("--out run",),
        resumed=True,
        after=lambda t: "" if (t / "run/metrics.jsonl").is_file() else "lost",
    ),
]

FILES = [
    case("an index that gives a tensor twice", twice_in_index, "index.json"),
    case("copies of a tensor with different values", different_copies, NORM, expected="either"),
    case("a shard cut by one byte", shard(lambda d: d[:-1]), "two.safetensors"),
    case("a shard with one byte more", shard(lambda d: d + b"\0"), "two.safetensors"),
    case("a hub cache whose weights are gone", hub_cache(True), "model.safetensors"),
    case("a hub cache", hub_cache(False), expected="runs"),
    case(
        "config.json that gives a size twice",
        lambda t: (t / "model/config.json").write_text(
            (t / "model/config.json").read_text().replace("{", '{"hidden_size": 64,', 1)
        ),
        CONFIG,
    ),
    case(
        "a prompt with a token that the model lacks",
        lambda t: larger_tokenizer(t, "1+<new>="),
        "train.jsonl:7",
    ),
    case("a tokenizer with a token that the model lacks", larger_tokenizer, expected="either"),
    case(
        "an end token that the model lacks",
        lambda t: (larger_tokenizer(t), tokenizer_values(eos_token="<new>")(t)),
        "eos_token",
    ),
    case("no end token", tokenizer_values(eos_token=None), "eos_token"),
    case(
        "generation_config.json with other end tokens",
        with_text("model/generation_config.json", '{"eos_token_id": [999], "max_length": 1}'),
        expected="either",
    ),
    case("generation_config.json cut off", with_text("model/generation_config.json", "{"), expected="either"),
    case("end tokens that contradict", with_values(eos_token_id=[3, 4], bos_token_id=99), expected="either"),
    case("an empty prompt in a chat template", chat(record(prompt="")), "line 7"),
    case("a prompt of spaces in a chat template", chat(record(prompt=" \n\t ")), "line 7"),
    case("a message of nothing", chat(record(prompt=[{"role": "user", "content": ""}])), "line 7"),
    case("gzip called JSON lines", converted(gzip.compress), "train.jsonl"),
    case("CSV called JSON lines", with_text("data/train.jsonl", "prompt,answer\n1+1=,2\n"), "line 1"),
    case("lines that end in CR alone", converted(lambda d: d.replace(b"\n", b"\r")), "train.jsonl"),
    case("byte order marks in the middle", converted(lambda d: d + b"\xef\xbb\xbf" + d), expected="either"),
    case(
        "held-out data in UTF-16",
        lambda t: (t / "data/held.jsonl").write_bytes(record().encode("utf-16")),
        "held.jsonl",
        arguments=(*TRAIN, "data.eval={path: data/held.jsonl}"),
    ),
    case(
        "a directory of data with a broken link",
        lambda t: (t / "data/zz.jsonl").symlink_to("nowhere"),
        "zz.jsonl",
        arguments=(*TRAIN, "data.train.path=data"),
    ),
    case("data from /dev/zero", lambda t: None, "/dev/zero", arguments=(*TRAIN, "data.train.path=/dev/zero")),
    case("a configuration from /dev/zero", lambda t: None, "/dev/zero", arguments=("train", "/dev/zero")),
    case("a model at /dev/null", lambda t: None, "/dev/null", arguments=(*TRAIN, "model.path=/dev/null")),
]

VALUES = [
    yaml_file(
        "merge keys",
        "train: {<<: {seed: 3, batch_epochs: 1}, seed: 7}\n",
        expected="runs",
        after=saved("train.seed", 7),
    ),
    yaml_file("an anchor under a key of its own", "base: &b {lr: 1.0e-3}\noptimizer: *b\n", "base"),
    yaml_file("1_000", "train: {seed: 1_000}\n", expected="either", after=saved("train.seed", 1000)),
    yaml_file(
        "1e3 for an integer",
        "train: {seed: 1e3}\n",
        "seed",
        expected="either",
        after=saved("train.seed", 1000),
    ),
    yaml_file(
        "a quoted number", 'train: {seed: "12"}\n', "seed", expected="either", after=saved("train.seed", 12)
    ),
    yaml_file("full-width digits", "train: {seed: １２}\n", "seed"),
    yaml_file("a Cyrillic letter in a key", "tr\u0430in: {steps: 1}\n", "in"),
    yaml_file("no-break spaces", "train:\u00a0{steps: 1}\n", "more.yaml", "train"),
    yaml_file(
        "a byte order mark", b"\xef\xbb\xbftrain: {seed: 5}\n", expected="runs", after=saved("train.seed", 5)
    ),
    yaml_file(
        "CRLF in a configuration", b"train:\r\n  seed: 5\r\n", expected="runs", after=saved("train.seed", 5)
    ),
    yaml_file(
        "UTF-16 for a configuration",
        "train: {seed: 5}\n".encode("utf-16"),
        expected="either",
        after=saved("train.seed", 5),
    ),
    case(
        "a variable that is empty",
        lambda t: None,
        "model.path",
        arguments=(*TRAIN, "model.path={env: NOTHING}"),
        NOTHING="",
    ),
    case("stop words of nothing", lambda t: None, "stop", arguments=(*TRAIN, "rollout.stop=['']")),
]

CONTRADICTIONS = [*AFTER_A_CHANGE, *FILES, *VALUES]

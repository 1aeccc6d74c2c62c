"""Adapters and images, which came after the other classes were tried."""

from __future__ import annotations

import functools
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_input.later_keys import GRPO, VLLM, keys, of_config

ADAPTER = "model.adapter.rank=4"


def saved_adapter(config: dict[str, Any] | str, weights: bytes = b"") -> Callable[[Path], object]:
    """Writes the directory `lora`, as Hugging Face PEFT would."""

    def spoil(task: Path) -> None:
        (task / "lora").mkdir()
        text = config if isinstance(config, str) else json.dumps(config)
        (task / "lora" / "adapter_config.json").write_text(text)
        if weights:
            (task / "lora" / "adapter_model.safetensors").write_bytes(weights)

    return spoil


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]}
WITH_LORA = (GRPO, ADAPTER, "model.adapter.path=lora", "model.adapter.targets=[q_proj, v_proj]")


def pictures(change: Callable[[dict[str, Any]], object] = lambda _: None, **of_model: Any) -> Any:
    """Puts a model that takes images, and prompts with them, in the place of the task's; changes a record."""

    def spoil(task: Path) -> None:
        shutil.rmtree(task / "model")
        shutil.copytree(_material() / "model", task / "model")
        shutil.copytree(_material() / "data", task / "data", dirs_exist_ok=True)
        lines = (task / "data" / "train.jsonl").read_text().splitlines()
        record = json.loads(lines[4])
        change(record)
        lines[4] = json.dumps(record)
        (task / "data" / "train.jsonl").write_text("\n".join(lines) + "\n")
        (task / "data" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno picture")
        of_config(**of_model)(task / "model")

    return spoil


@functools.cache
def _material() -> Path:
    """A model that takes images, with random weights, and 16 problems."""
    sys.path.append(str(Path(__file__).parents[2] / "examples" / "images"))
    import importlib.util

    file = Path(__file__).parents[2] / "examples" / "images" / "make_task.py"
    spec = importlib.util.spec_from_file_location("images_task", file)
    assert spec is not None and spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    directory = Path(tempfile.mkdtemp(prefix="bad-images-"))
    task.make_model(directory / "model", 0)
    (directory / "data" / "pictures").mkdir(parents=True)
    rng = random.Random(0)
    problems = [task.make_problem(directory / "data", f"pictures/{i}.png", rng) for i in range(16)]
    (directory / "data" / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    return directory


def without_processor(task: Path) -> None:
    pictures()(task)
    (task / "model" / "preprocessor_config.json").unlink()


IMAGES = (GRPO, "data.train.images_key=images", "rewards.components=[{name: math}]")

ADAPTERS = [
    keys("a rank of 0", GRPO, "model.adapter.rank=0", says=("rank",)),
    keys("a rank of true", GRPO, "model.adapter.rank=true", says=("rank",)),
    keys("a rank beyond the layers", GRPO, "model.adapter.rank=4096", says=(), expected="runs"),
    keys("an alpha of -1", GRPO, "model.adapter={rank: 4, alpha: -1}", says=("alpha",)),
    keys("DoRA", GRPO, "model.adapter={type: dora}", says=("dora",)),
    keys("an adapter of the output layer", GRPO, "model.adapter={targets: [lm_head]}", says=("lm_head",)),
    keys("an adapter of nothing", GRPO, "model.adapter={targets: []}", says=("targets",)),
    keys("a layer that the model lacks", GRPO, "model.adapter={targets: [q_a_proj]}", says=("q_a_proj",)),
    keys(
        "a layer twice",
        GRPO,
        "model.adapter={targets: [q_proj, q_proj]}",
        says=(),
        expected="runs",
    ),
    keys("all layers and one", GRPO, "model.adapter={targets: [all, q_proj]}", says=("targets",)),
    keys(
        "one shared A of two layers",
        GRPO,
        "model.adapter={type: lora, targets: [q_proj, v_proj]}",
        says=("targets",),
    ),
    keys("a path that is not there", *WITH_LORA, says=("adapter.path",)),
    keys("an adapter that is not JSON", *WITH_LORA, says=("adapter_config.json",), spoil=saved_adapter("{")),
    keys("an adapter of another rank", *WITH_LORA, says=("rank",), spoil=saved_adapter(LORA | {"r": 8})),
    keys(
        "an adapter of another kind",
        *WITH_LORA,
        says=("peft_type",),
        spoil=saved_adapter(LORA | {"peft_type": "IA3"}),
    ),
    keys(
        "an adapter with DoRA", *WITH_LORA, says=("use_dora",), spoil=saved_adapter(LORA | {"use_dora": True})
    ),
    keys(
        "an adapter of other layers",
        *WITH_LORA,
        says=("targets",),
        spoil=saved_adapter(LORA | {"target_modules": ["k_proj"]}),
    ),
    keys(
        "an adapter without weights",
        *WITH_LORA,
        says=("adapter_model.safetensors",),
        spoil=saved_adapter(LORA),
    ),
    keys(
        "an adapter cut short",
        *WITH_LORA,
        says=("adapter_model.safetensors",),
        spoil=saved_adapter(LORA, b"\x40\0\0\0\0\0\0\0{}"),
    ),
    keys(
        "the transport adapter without one",
        GRPO,
        VLLM,
        "rollout.weights.transport=adapter",
        says=("adapter",),
    ),
    keys(
        "an adapter sent by shards",
        GRPO,
        VLLM,
        ADAPTER,
        "rollout.weights.transport=sharded",
        says=("sharded",),
    ),
]
PICTURES = [
    keys("images for a model of text", GRPO, "data.train.images_key=pictures", says=("images_key",)),
    keys("vision training without a tower", GRPO, "model.train_vision=true", says=("train_vision",)),
    keys(
        "a picture that is not there",
        *IMAGES,
        says=("nothere.png",),
        spoil=pictures(lambda r: r.update(images=["nothere.png"])),
    ),
    keys(
        "a picture that is none",
        *IMAGES,
        says=("broken.png",),
        spoil=pictures(lambda r: r.update(images=["broken.png"])),
    ),
    keys(
        "a picture that is a number",
        *IMAGES,
        says=("images",),
        spoil=pictures(lambda r: r.update(images=[5])),
    ),
    keys(
        "a picture from the network",
        *IMAGES,
        says=("images",),
        spoil=pictures(lambda r: r.update(images=["https://127.0.0.1:9/a.png"])),
    ),
    keys(
        "a picture that is not base64",
        *IMAGES,
        says=("images",),
        spoil=pictures(lambda r: r.update(images=["data:image/png;base64,@@@"])),
    ),
    keys(
        "more marks than pictures",
        *IMAGES,
        says=("<image>",),
        spoil=pictures(lambda r: r.update(prompt="<image><image>?")),
    ),
    keys(
        "pictures under a key that no record has",
        *IMAGES,
        "data.train.images_key=pictures",
        says=("line 1:",),
        spoil=pictures(),
    ),
    keys("pictures with an adapter", *IMAGES, ADAPTER, says=("adapter",), spoil=pictures()),
    keys(
        "pictures with a token beyond the vocabulary",
        *IMAGES,
        says=("image_token_id",),
        spoil=pictures(image_token_id=10**6),
    ),
    keys(
        "pictures without a processor",
        *IMAGES,
        says=("preprocessor_config.json", "processor"),
        spoil=without_processor,
    ),
    keys(
        "pictures in too short a prompt",
        *IMAGES,
        "data.max_prompt_tokens=4",
        says=("max_prompt_tokens",),
        spoil=pictures(),
    ),
]


LATER_MODELS = [*ADAPTERS, *PICTURES]

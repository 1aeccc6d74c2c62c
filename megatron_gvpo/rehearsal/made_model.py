"""Makes a Hugging Face directory from a config.json: its safetensors have true shapes and take no disk.

A model that takes images gets the usual image processor of its family, unless the directory has one.
"""

from __future__ import annotations

import json
import math
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.planner import architecture
from megatron_gvpo.settings.config import Config

_SHARD_BYTES = 5 << 30


def known_models() -> dict[str, Any]:
    """{name on the hub: its config.json}"""
    known: dict[str, Any] = json.loads(
        resources.files(architecture.__package__).joinpath("models.json").read_text()
    )
    return known


def has_weights(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def paths_of(config: Config) -> dict[str, str]:
    """The directories of the models that the trainer holds, by the keys that name them."""
    paths = {"model.path": config.model.path}
    if (critic := config.algorithm.critic) is not None and critic.path is not None:
        paths["algorithm.critic.path"] = critic.path
    if config.teacher is not None and config.teacher.server is None:
        paths["teacher.path"] = config.teacher.path
    return paths


def prepare(path: str, key: str, folder: Path) -> Path:
    """Return a directory for the model `path`: `path` if it has weights, else a new one in `folder`.

    `path`: a directory with a config.json, or the name of a known model, of which the part behind the last
    slash is enough. Writes config.json and the directory's small files; `fill` adds the weights. Raises
    ConfigError, which names `key`, for anything else.
    """
    directory = Path(path)
    if has_weights(directory):
        return directory
    made = folder / directory.name
    made.mkdir(parents=True, exist_ok=True)
    if (directory / "config.json").is_file():
        for file in directory.iterdir():
            if file.is_file() and file.suffix in (".json", ".txt", ".jinja", ".model"):
                shutil.copy(file, made)
        add_image_processor(made)
        return made
    known = known_models()
    names = [name for name in known if directory.name in (name, name.partition("/")[2])]
    if not names:
        short = ", ".join(name.partition("/")[2] for name in known)
        raise ConfigError(
            f"{key}={path}: no config.json there, and not a known model; known are {short}. The config.json "
            "of any model is enough: put it into that directory"
        )
    (made / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **known[names[0]]}, indent=2))
    add_image_processor(made)
    return made


def with_directories(config: Config, folder: Path) -> Config:
    """The configuration with a directory for every model that the trainer holds, made where it has to be.

    The copy is not validated, because no run uses it.
    """
    made = {key: str(prepare(path, key, folder / key)) for key, path in paths_of(config).items()}
    changes: dict[str, Any] = {"model": config.model.model_copy(update={"path": made["model.path"]})}
    if (path := made.get("teacher.path")) is not None and config.teacher is not None:
        changes["teacher"] = config.teacher.model_copy(update={"path": path})
    if (path := made.get("algorithm.critic.path")) is not None and config.algorithm.critic is not None:
        critic = config.algorithm.critic.model_copy(update={"path": path})
        changes["algorithm"] = config.algorithm.model_copy(update={"critic": critic})
    return config.model_copy(update=changes)


def add_image_processor(directory: Path) -> None:
    """Write preprocessor_config.json for a model that takes images and lacks it."""
    vision = json.loads((directory / "config.json").read_text()).get("vision_config")
    if vision is None or (file := directory / "preprocessor_config.json").is_file():
        return
    keys = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size"}
    keys["merge_size"] = "spatial_merge_size"
    sizes = {name: vision[key] for name, key in keys.items() if key in vision}
    file.write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor", **sizes}))


def fill(directory: Path) -> None:
    """Write the weights of a made directory: headers of true names and shapes, and no bytes behind them."""
    import transformers

    from megatron_gvpo.huggingface.complete_weights import _expected

    config = transformers.AutoConfig.from_pretrained(directory)
    # Files of vision-language models may have this key beside the language model's section.
    text = config.get_text_config()
    is_tied = bool(getattr(text, "tie_word_embeddings", getattr(config, "tie_word_embeddings", False)))
    shards: list[dict[str, Any]] = [{}]
    end = 0
    for name, shape in _expected(config, is_tied).items():
        size = 2 * math.prod(shape)
        if end and end + size > _SHARD_BYTES:
            shards.append({})
            end = 0
        shards[-1][name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        header = json.dumps({"__metadata__": {"format": "pt"}, **shard}).encode()
        header += b" " * (-len(header) % 8)
        with (directory / file).open("wb") as opened:
            opened.write(len(header).to_bytes(8, "little") + header)
            opened.truncate(8 + len(header) + max(tensor["data_offsets"][1] for tensor in shard.values()))
    index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))

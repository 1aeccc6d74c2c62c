"""Rank function of a trainer whose prompts have images, with a real server; and the models that it serves."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from helpers.paths import ROOT
from helpers.servers.real_servers import engine_python
from megatron_gvpo.core.errors import RolloutError
from megatron_gvpo.data.task import load_task
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.megatron.policy import Policy
from megatron_gvpo.sampling.served import ServedEngine
from megatron_gvpo.settings.config import Config, build_config
from megatron_gvpo.settings.sections import SamplingConfig
from megatron_gvpo.types import TrainBatch

SAMPLING = SamplingConfig(max_tokens=6)
MODELS = ("qwen3_vl", "qwen2_5_vl")


def make(directory: Path, model: str) -> None:
    """Write directory/{model,data}: the example's, or a model of the other family with its tokenizer."""
    task = runpy.run_path(str(ROOT / "examples" / "images" / "make_task.py"))
    task["make_model"](directory / "model", 0)
    task["SIZES"].update(train=4, test=1)
    task["make_data"](directory / "data", 0)
    if model == "qwen2_5_vl":
        _save_qwen2_5(directory / "model")
    mark, file = "<image>", directory / "data" / "train.jsonl"
    first, second, third, _ = map(json.loads, file.read_text().splitlines())
    records = [
        first,
        {**second, "prompt": f"1{mark}2{mark}?", "images": second["images"] + third["images"]},
        {**third, "prompt": "3?", "images": []},
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def _save_qwen2_5(directory: Path) -> None:
    source = json.loads((directory / "config.json").read_text())
    text = {key: source["text_config"][key] for key in ("vocab_size", "eos_token_id", "pad_token_id")}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"hidden_size": 32, "num_heads": 2, "depth": 2, "window_size": 28, "fullatt_block_indexes": [1]}
    text |= {**sizes, "intermediate_size": 96, "max_position_embeddings": 256, "initializer_range": 0.1}
    vision |= {"intermediate_size": 48, "out_hidden_size": 128, "initializer_range": 0.1}
    # the example's processor divides pictures by this size
    vision |= {"patch_size": source["vision_config"]["patch_size"]}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "bos_token_id": None, "rope_parameters": rope, "tie_word_embeddings": False},
        vision_config=vision,
        tie_word_embeddings=False,
        **{key: source[key] for key in source if key.endswith("_token_id") and key not in text},
    )
    torch.manual_seed(0)
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)


def config_of(engine: str, folder: Path, **servers: object) -> Config:
    """The configuration of the run; `servers`: further keys of `rollout.servers`."""
    return build_config(
        {
            "output_dir": str(folder / "run"),
            "model": {"path": str(folder / "model"), "dtype": "float32", "train_vision": True},
            "data": {"train": {"path": str(folder / "data" / "train.jsonl"), "images_key": "images"}},
            "algorithm": "grpo",
            "rollout": {
                "engine": engine,
                "n": 2,
                "max_tokens": SAMPLING.max_tokens,
                "servers": {"python": engine_python(engine), "context_length": 128, **servers},
            },
            "rewards": {"components": [{"name": "math"}]},
            "train": {"steps": 2, "prompts_per_step": 3, "max_tokens_per_micro_batch": 256},
            "optimizer": {"lr": 1e-2, "warmup_steps": 0},
        }
    )


def run(engine: str, url: str, folder: str, transports: str) -> None:
    """Push over each of `transports`, sample, and compare with the trainer; update before each later push."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    directory, results = Path(folder), []
    config = config_of(engine, directory, urls=[url])
    policy, task = Policy.of(config), load_task(config, ModelCards(config).policy)
    rows = first_rows = None
    for step, transport in enumerate(transports.split(",")):
        weights = config.rollout.weights.model_copy(
            update={"transport": transport, "directory": f"{folder}/weights"}
        )
        rollout = config.rollout.model_copy(update={"weights": weights})
        pushing = config.model_copy(update={"rollout": rollout})
        with ServedEngine(
            pushing.model, pushing.rollout, pushing.output_dir, ModelCards(pushing), task, policy
        ) as engine_of_step:
            if rows is not None:
                policy.update(rows, at_step_start=True)
            engine_of_step.sync(step)
            groups = engine_of_step.collect([engine_of_step.submit(task.prompts, 2, SAMPLING, seed=step)])
            rows = TrainBatch.from_groups(groups)
            rows = rows.with_columns(advantage_n=torch.tensor([1.0, -1.0] * len(groups)))
            gap = (policy.score(rows) - rows.engine_logp_r).abs()
            gaps = [gap[rows.seq_r == row].max().item() for row in range(len(rows))]
            first_rows = first_rows or rows
            first_logp = policy.score(first_rows).tolist()
            results.append({"transport": transport, "gaps": gaps, "first_logp": first_logp})
    if dist.get_rank() == 0:
        (directory / "found.json").write_text(json.dumps(results))
    dist.barrier()


def refused(engine: str, url: str, folder: str) -> None:
    """Ask a server whose model has another image processor; write the error."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
    config = config_of(engine, Path(folder), urls=[url])
    try:
        cards = ModelCards(config)
        ServedEngine(
            config.model,
            config.rollout,
            config.output_dir,
            cards,
            load_task(config, cards.policy),
            Policy.of(config),
        ).__enter__()
    except (ValueError, RolloutError) as error:
        (Path(folder) / "error").write_text(str(error))


def spoil_processor(directory: Path) -> None:
    """Give the model in `directory` an image processor that makes four times the tokens of a picture."""
    file = directory / "preprocessor_config.json"
    values = json.loads(file.read_text())
    size = {key: 4 * area for key, area in values["size"].items()}
    file.write_text(json.dumps({**values, "size": size}))

# mypy: disable-error-code="func-returns-value"
"""Models that are not what their files say."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bad_input.case import TRAIN, Case, Expected, with_text, with_values


class RunsCode:
    """A pickle of this writes a file where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (eval, ("open('ran_code', 'w').write('x')",))


def with_tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor] | None]) -> Callable[[Path], object]:
    """Changes the tensors of model.safetensors."""

    def spoil(task: Path) -> None:
        file = task / "model" / "model.safetensors"
        tensors = load_file(file)
        save_file(change(tensors) or tensors, file, metadata={"format": "pt"})

    return spoil


def set_first(name: str, value: float) -> Callable[[Path], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[3] = value

    return with_tensors(change)


def cast(name: str, dtype: torch.dtype) -> Callable[[Path], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)

    return with_tensors(change)


def _truncated(task: Path) -> None:
    file = task / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _sharded(task: Path, index: Callable[[dict[str, str]], dict[str, str]], both: bool = False) -> None:
    """Two shards with an index that `index` changed; `both`: the first tensor lies in both."""
    model = task / "model"
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    shards = {"one.safetensors": names[: len(names) // 2], "two.safetensors": names[len(names) // 2 :]}
    if both:
        shards["two.safetensors"] = [names[0], *shards["two.safetensors"]]
        tensors[names[0]] = tensors[names[0]]
    for shard, own_names in shards.items():
        save_file({name: tensors[name] for name in own_names}, model / shard, metadata={"format": "pt"})
    where = {name: shard for shard, own_names in shards.items() for name in own_names}
    (model / "model.safetensors").unlink()
    written = {"metadata": {"total_size": 1}, "weight_map": index(where)}
    (model / "model.safetensors.index.json").write_text(json.dumps(written))


def _pickled(task: Path) -> None:
    tensors = load_file(task / "model" / "model.safetensors")
    (task / "model" / "model.safetensors").unlink()
    (task / "model" / "pytorch_model.bin").write_bytes(pickle.dumps({"x": RunsCode(), "n": len(tensors)}))


def case(
    name: str,
    spoil: Callable[[Path], object],
    *says: str,
    expected: Expected = "refused",
    forbidden: str = "",
) -> Case:
    return Case("weights", name, TRAIN, spoil, expected, says, forbidden=forbidden)


NORM, EMBEDDING = "model.layers.2.post_attention_layernorm.weight", "model.embed_tokens.weight"
CONFIG = "config.json"

WEIGHTS = [
    case("NaN in a norm", set_first(NORM, float("nan")), NORM),
    case("infinity in the embedding", set_first(EMBEDDING, float("inf")), EMBEDDING),
    case("NaN in a bias", set_first("model.layers.0.self_attn.k_proj.bias", float("nan")), "k_proj.bias"),
    case("int32 norm", cast(NORM, torch.int32), NORM),
    case("boolean norm", cast(NORM, torch.bool), NORM),
    case(
        "float8 projection without scales",
        cast("model.layers.1.mlp.up_proj.weight", torch.float8_e4m3fn),
        "up_proj",
    ),
    case("float64 norm", cast(NORM, torch.float64), expected="either"),
    case("float16 norm", cast(NORM, torch.float16), expected="either"),
    case("one layer more in config.json", with_values(num_hidden_layers=5), "num_hidden_layers"),
    case("one layer fewer in config.json", with_values(num_hidden_layers=3), "num_hidden_layers"),
    case("wider MLP in config.json", with_values(intermediate_size=768), "384"),
    case("more tokens in config.json", with_values(vocab_size=27), "embed_tokens", "vocab"),
    case("heads do not divide the width", with_values(num_attention_heads=5), "num_attention_heads"),
    case("queries not divisible by keys", with_values(num_key_value_heads=3), "num_key_value_heads"),
    case("more key heads than heads", with_values(num_key_value_heads=8), "num_key_value_heads"),
    case("head_dim that the weights lack", with_values(head_dim=48), "head_dim", "q_proj"),
    case("hidden_size as a string", with_values(hidden_size="128"), "hidden_size"),
    case("hidden_size true", with_values(hidden_size=True), "hidden_size"),
    case("hidden_size 1.5", with_values(hidden_size=128.5), "hidden_size"),
    case("layers as a list", with_values(num_hidden_layers=[4]), "num_hidden_layers"),
    case("a billion layers", with_values(num_hidden_layers=10**9), "num_hidden_layers"),
    case("negative layers", with_values(num_hidden_layers=-4), "num_hidden_layers"),
    case("epsilon of norms negative", with_values(rms_norm_eps=-1e-6), "rms_norm_eps"),
    case("epsilon of norms a word", with_values(rms_norm_eps="small"), "rms_norm_eps"),
    case(
        "rope_theta a word", with_values(rope_parameters={"rope_theta": "x", "rope_type": "default"}), "rope"
    ),
    case("rope_theta zero", with_values(rope_parameters={"rope_theta": 0, "rope_type": "default"}), "rope"),
    case(
        "unknown rope type", with_values(rope_parameters={"rope_theta": 1e4, "rope_type": "spiral"}), "rope"
    ),
    case("tie_word_embeddings a string", with_values(tie_word_embeddings="no"), "tie_word_embeddings"),
    case("too short for its prompts", with_values(max_position_embeddings=4), "max_position_embeddings"),
    case(
        "max_position_embeddings null", with_values(max_position_embeddings="lots"), "max_position_embeddings"
    ),
    case("another activation", with_values(hidden_act="sparkle"), "sparkle"),
    case(
        "unknown architecture",
        with_values(architectures=["Qwen99ForCausalLM"], model_type="qwen99"),
        "qwen99",
        "Qwen99",
    ),
    case("model_type missing", with_values(model_type=None), "model_type"),
    case("config.json is a list", with_text("model/config.json", "[1, 2]"), CONFIG),
    case("config.json is empty", with_text("model/config.json", ""), CONFIG),
    case(
        "config.json nested 100,000 deep",
        with_text("model/config.json", '{"a":' * 100000 + "1" + "}" * 100000),
        CONFIG,
    ),
    case(
        "config.json with a number of 10,000 digits",
        with_text("model/config.json", '{"hidden_size": ' + "9" * 10000 + "}"),
        CONFIG,
    ),
    case(
        "config.json in UTF-16",
        with_text("model/config.json", '{"model_type": "qwen2"}'.encode("utf-16")),
        CONFIG,
    ),
    case("weights cut off", _truncated, "model.safetensors"),
    case("weights of rubbish", with_text("model/model.safetensors", b"\x00\xff" * 5000), "model.safetensors"),
    case("weights empty", with_text("model/model.safetensors", b""), "model.safetensors"),
    case("weights missing", lambda task: (task / "model/model.safetensors").unlink(), "safetensors"),
    case("only a pickle with code", _pickled, "safetensors", "pytorch_model.bin", forbidden="ran_code"),
    case(
        "index names a missing shard",
        lambda t: _sharded(t, lambda m: m | {NORM: "three.safetensors"}),
        "three.safetensors",
    ),
    case(
        "index leaves the directory",
        lambda t: _sharded(t, lambda m: m | {NORM: "../../secret.safetensors"}),
        "secret.safetensors",
    ),
    case(
        "index lacks a tensor",
        lambda t: _sharded(t, lambda m: {k: v for k, v in m.items() if k != NORM}),
        NORM,
        expected="either",
    ),
    case(
        "index is a list",
        lambda t: (_sharded(t, dict), with_text("model/model.safetensors.index.json", "[]")(t)),
        "index.json",
    ),
    case(
        "index is cut off",
        lambda t: (_sharded(t, dict), with_text("model/model.safetensors.index.json", '{"weight_map": {')(t)),
        "index.json",
    ),
    case("two shards hold one tensor", lambda t: _sharded(t, dict, both=True), expected="either"),
    case("sound shards", lambda t: _sharded(t, dict), expected="runs"),
    case("tokenizer cut off", with_text("model/tokenizer.json", '{"version": "1.0", "mod'), "tokenizer"),
    case(
        "tokenizer missing",
        lambda task: [(task / "model" / n).unlink() for n in ("tokenizer.json", "tokenizer_config.json")],
        "tokenizer",
    ),
    case("tokenizer_config a list", with_text("model/tokenizer_config.json", "[3]"), "tokenizer"),
    case(
        "end token outside the vocabulary", with_values(eos_token_id=999), "eos_token_id", expected="either"
    ),
    case(
        "chat template with a syntax error", with_text("model/chat_template.jinja", "{% for %}"), "template"
    ),
    case(
        "chat template that loops",
        with_text("model/chat_template.jinja", "{% for i in range(99999999999) %}x{% endfor %}"),
        "template",
    ),
]

"""The tiny task with a GLM-4.5 that has a head for a further token."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

LAYERS, HIDDEN, SHARP = 2, 64, 5.0


def make(task: Path, directory: Path) -> Path:
    """Copy `task` to `directory` with a GLM-4.5 of random weights and one head; returns `directory`.

    The head is a layer like the last one behind a projection, as in the released checkpoints.
    """
    shutil.copytree(task, directory)
    dense = transformers.AutoConfig.from_pretrained(directory / "model")
    torch.manual_seed(0)
    config = transformers.Glm4MoeConfig(
        vocab_size=dense.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        attention_bias=True,
        use_qk_norm=True,
        max_position_embeddings=512,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
        dtype="float32",
    )
    config.num_nextn_predict_layers = 1
    model = transformers.Glm4MoeForCausalLM(config)
    (directory / "model" / "model.safetensors").unlink()
    model.save_pretrained(directory / "model")
    file = directory / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | heads(tensors), file, metadata={"format": "pt"})
    run = directory / "run.yaml"
    run.write_text(run.read_text().replace(str(task), str(directory)))
    return directory


def agreeing(source: Path, target: Path) -> Path:
    """A copy of the model at `source` whose head mostly proposes the trunk's likeliest token.

    The trunk's layers have little effect, so that the next token depends on the last one. The head's block
    has no effect, and its projection takes the last token's embedding. The output layer computes the logits
    of both.
    """
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    own = f"model.layers.{LAYERS}."
    for name in tensors:
        if re.search(r"(o_proj|down_proj)\.weight$", name):
            tensors[name] *= 0.0 if name.startswith(own) else 0.02
    tensors["model.norm.weight"] *= SHARP
    tensors[f"{own}shared_head.norm.weight"] *= SHARP
    tensors[f"{own}eh_proj.weight"] = torch.eye(HIDDEN, 2 * HIDDEN)
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def renumbered(source: Path, target: Path, order: torch.Tensor) -> Path:
    """A copy of the model in which token i of the original is token order[i]. The head is not changed."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        moved = torch.empty_like(tensors[name])
        moved[order] = tensors[name]
        tensors[name] = moved
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def heads(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The head's tensors, for a checkpoint with these tensors."""
    last, own = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    renamed = {own + n.removeprefix(last): t.clone() for n, t in tensors.items() if n.startswith(last)}
    renamed |= {f"{own}{name}.weight": torch.ones(HIDDEN) for name in ("enorm", "hnorm", "shared_head.norm")}
    renamed[f"{own}eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) * 0.1
    renamed[f"{own}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    renamed[f"{own}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    return renamed

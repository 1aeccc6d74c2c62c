"""Weights that stay as they are while the rest of the model trains: `model.freeze`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from megatron_gvpo.core.collectives import all_gather_msgpack
from megatron_gvpo.core.errors import ConfigError

SHOWN = 12  # the most names in an error


def freeze(chunks: Sequence[Any], patterns: Sequence[str]) -> None:
    """Freeze the weights whose names match a pattern; chunks may be loaded or not, but are not wrapped yet.

    A collective. Raises ConfigError on all ranks for a pattern that matches nothing, and where a rank would
    have nothing to train: Megatron's optimizer needs at least one trained parameter there.
    """
    weights = list(_named(chunks))
    matched: set[str] = set()
    for name, parameter in weights:
        of_name = {pattern for pattern in patterns if matches(name, pattern)}
        matched |= of_name
        if of_name:
            parameter.requires_grad_(False)
    _ask_embeddings_for_gradients(chunks)
    examples = [name for name, _ in weights][:: max(1, len(weights) // SHOWN)]
    has_trained = any(parameter.requires_grad for _, parameter in weights)
    of_ranks = all_gather_msgpack([sorted(matched), examples, has_trained])
    matched_anywhere = {pattern for of_rank, _, _ in of_ranks for pattern in of_rank}
    if missing := [pattern for pattern in patterns if pattern not in matched_anywhere]:
        raise ConfigError(
            f"model.freeze: nothing in the model matches {missing[0]!r}; names are such as "
            f"{', '.join(of_ranks[0][1][:SHOWN])}"
        )
    if not all(has_trained for _, _, has_trained in of_ranks):
        raise ConfigError("model.freeze: a rank would have nothing to train: freeze less, or use a lower pp")


def matches(name: str, pattern: str) -> bool:
    """True if the pattern is the name of a weight, or of a module around it; `*` stands for any text."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _named(chunks: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    """Each weight with its name, in which layers have their numbers in the whole model, from 0.

    The last stage's copy of a tied embedding has the embedding's name: both are frozen, or neither is.
    Megatron sums the gradients of both copies, and a stage whose copy trains would wait for a stage whose
    copy does not.
    """
    for chunk in chunks:
        renamed = {}
        for name, module in chunk.named_modules():
            if (number := getattr(module, "layer_number", None)) and name.rpartition(".")[2].isdecimal():
                renamed[name + "."] = f"{name.rpartition('.')[0]}.{number - 1}."
        for name, parameter in chunk.named_parameters():
            prefix = next((prefix for prefix in renamed if name.startswith(prefix)), "")
            named = renamed.get(prefix, "") + name[len(prefix) :]
            if getattr(parameter, "shared_embedding", False):  # Megatron's mark on the tied weights
                named = named.replace("output_layer.weight", "embedding.word_embeddings.weight")
            yield named, parameter


def _ask_embeddings_for_gradients(chunks: Iterable[Any]) -> None:
    """Make the embeddings' outputs require gradients, also where the embeddings are frozen.

    Layers that are computed again in the backward pass lose their gradients without an error if nothing that
    enters them needs one, such as the first layer's behind a frozen embedding.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if type(module).__name__ == "LanguageModelEmbedding":
                module.register_forward_hook(ask_for_gradient)


def ask_for_gradient(_: Any, __: Any, output: Tensor) -> None:
    """Forward hook that makes the output require a gradient, as recomputed layers need it."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()

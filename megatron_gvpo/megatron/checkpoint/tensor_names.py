"""Compares the names of a Megatron checkpoint's tensors with those that a model needs.

dist_checkpointing ignores tensors that nobody asks for. Here, a tensor that is missing or unexpected is an
error that names it, before any tensor is read.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_gvpo.megatron.model.complete_weights import shown_names


def check_names(wanted: Collection[str], stored: Collection[str]) -> str | None:
    """Compare the keys that all ranks want with those of a Megatron checkpoint; returns the problem or None.

    If the optimizer is not wanted, the checkpoint may have one.
    """
    weights_only = not any(name.startswith("optimizer.") for name in wanted)

    def compared(names: Collection[str]) -> set[str]:
        return {
            name
            for name in names
            # Left out: FP8 scales, which a layer on a CPU lacks; values that are not tensors; random states,
            # which only the same layout asks for.
            if not name.endswith("_extra_state")
            and name not in ("common_state", "random")
            and not (weights_only and name.startswith("optimizer."))
        }

    ours, theirs = compared(wanted), compared(stored)
    missing, unexpected = ours - theirs, theirs - ours
    if not missing and not unexpected:
        return None
    if weights := {name for name in missing | unexpected if not name.startswith("optimizer.")}:
        missing, unexpected = missing & weights, unexpected & weights  # the cause of the optimizer's, too
    said = []
    if missing:
        said.append(f"it lacks {shown_names(missing)} of the model")
    if unexpected:
        said.append(f"it has {shown_names(unexpected)} that the model does not take")
    return f"{', and '.join(said)}: {_cause(missing, unexpected)}"


def _cause(missing: set[str], unexpected: set[str]) -> str:
    def output_layer(names: set[str]) -> bool:
        return any("output_layer." in name for name in names)

    if output_layer(missing) != output_layer(unexpected):
        checkpoint, model = ("true", "false") if output_layer(missing) else ("false", "true")
        return (
            f"the checkpoint is of a model with tie_word_embeddings={checkpoint}, and this one's config.json "
            f"says {model}"
        )
    if all(name.startswith("optimizer.") for name in missing | unexpected):
        return "model.dtype and the optimizer must be those of the run that wrote it"
    return "the model's config.json must be that of the run that wrote it"

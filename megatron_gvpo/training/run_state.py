"""The state of a run beside the policy's weights, as the JSON values that a checkpoint keeps."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from megatron_gvpo.algorithms.base import Stateful
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.groups import Prompt

if TYPE_CHECKING:
    from megatron_gvpo.training.components import Components

log = logging.getLogger(__name__)


class RunState:
    """Collects the state of a run's components, and restores it, perhaps into another method's components."""

    def __init__(self, components: Components) -> None:
        self._components = components
        self._data = components.config.data.train.path
        self._prompts_digest = _digest_of_prompts(components.prompts)
        self._images_digest = _digest_of_images(components.prompts)

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps besides the policy, as JSON values."""
        parts = self._components
        return {
            "blocks": self._blocks(),
            "order": parts.batches.state_dict(),
            "prompts": self._prompts_digest,
            "images": self._images_digest,
            "end_tokens": sorted(parts.end_token_ids),
            "batch_policy": parts.batch_policy.state_dict(),
            "tracker": None if parts.tracker is None else parts.tracker.state_dict(),
            "members": [_state_of(member) for member in parts.members],
            "estimator": _state_of(parts.estimator),
            "mismatch": parts.mismatch.state_dict(),
            "empty_batches": parts.empty_batches.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`. Raises DataError for the state of other data.

        The state of a block that the method no longer has is left out, with a warning. A block that the
        checkpoint's method did not have starts without a state.
        """
        self._check_data(state)
        parts, blocks, saved = self._components, self._blocks(), state.get("blocks") or self._blocks()
        parts.batches.load_state_dict(state["order"])
        if blocks["batch_policy"] == saved["batch_policy"]:
            parts.batch_policy.load_state_dict(state["batch_policy"])
        if parts.tracker is not None:
            parts.tracker.load_state_dict(state.get("tracker") or {})
        self._load_members(list(zip(saved["members"], state.get("members", ()), strict=True)))
        if isinstance(parts.estimator, Stateful) and blocks["estimator"] == saved["estimator"]:
            parts.estimator.load_state_dict(state.get("estimator", {}))
        parts.mismatch.load_state_dict(state.get("mismatch", {}))
        parts.empty_batches.load_state_dict(state.get("empty_batches", {}))
        lost = _without_state(saved, blocks, state)
        if not parts.order.state_dict().keys() <= state["order"].keys():
            lost.append("the order of prompts (algorithm.prompts)")
        if lost and dist.get_rank() == 0:
            log.warning("the method has changed: the checkpoint's state of %s is left out", ", ".join(lost))

    def _check_data(self, state: dict[str, Any]) -> None:
        if state.get("images") not in (None, self._images_digest):
            raise DataError(
                f"{self._data}: its images are not those that the checkpoint was trained on: resume with the "
                "same files, or start a new run"
            )
        if state.get("prompts") not in (None, self._prompts_digest) and dist.get_rank() == 0:
            log.warning(
                "%s: the prompts are not those that the checkpoint was trained on: the data, the tokenizer "
                "or its chat template have changed",
                self._data,
            )
        ends = sorted(self._components.end_token_ids)
        if state.get("end_tokens") not in (None, ends) and dist.get_rank() == 0:
            log.warning(
                "responses end with one of the tokens %s, and ended with one of %s when the checkpoint was "
                "written: rollout.stop_token_ids, or a file in model.path that names them, has changed",
                ends,
                state["end_tokens"],
            )

    def _load_members(self, saved: list[tuple[str, dict[str, Any]]]) -> None:
        """Give each member the first saved state under its name that no other member has taken."""
        for name, member in zip(self._blocks()["members"], self._components.members, strict=True):
            index = next((i for i, (other, _) in enumerate(saved) if other == name), None)
            if index is not None and isinstance(member, Stateful):
                member.load_state_dict(saved.pop(index)[1])

    def _blocks(self) -> dict[str, Any]:
        """The names of the blocks that may have a state, so that a state finds its owner."""
        algorithm = self._components.config.algorithm
        return {
            "batch_policy": algorithm.batch_policy.name,
            "members": [member.name for member in algorithm.members],
            "estimator": None if algorithm.estimator is None else algorithm.estimator.name,
        }


def _state_of(block: object) -> dict[str, Any]:
    return block.state_dict() if isinstance(block, Stateful) else {}


def _digest_of_prompts(prompts: Sequence[Prompt]) -> str:
    """A hash of tokens and answers. A run's record has no hash of hub data, generators and tokenizers."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(np.asarray(prompt.token_ids, np.int32).tobytes())
        digest.update(f"{prompt.answer} ".encode(errors="replace"))
    return digest.hexdigest()


def _digest_of_images(prompts: Sequence[Prompt]) -> str | None:
    """A hash of all images, None without any; run.json has only the hash of the data that names them."""
    digests = [image.digest for prompt in prompts for image in prompt.images]
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest() if digests else None


def _without_state(saved: dict[str, Any], blocks: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """The blocks of a checkpoint's method that had a state, and that the present method does not have."""
    lost = [kind for kind in ("batch_policy", "estimator") if saved[kind] != blocks[kind] and state.get(kind)]
    present = list(blocks["members"])
    for name, member_state in zip(saved["members"], state.get("members", ()), strict=True):
        if name in present:
            present.remove(name)
        elif member_state:
            lost.append(f"the member {name}")
    return lost

"""A checkpoint's heads for multi-token prediction (MTP), which stay as they are.

They are not a part of the policy: the trainer neither computes with them nor trains them. Every Hugging Face
checkpoint that it writes has the heads of the checkpoint that it started from, for servers that draft with
them (`rollout.speculation.method: mtp`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

_OWN_NAMES = ("ExaoneMoe", "Qwen3Next", "Qwen3_5")  # architectures with these prefixes call their heads mtp
_NONE = re.compile(r"(?!)")


def head_pattern(model: Mapping[str, Any]) -> re.Pattern[str]:
    """A pattern for the names of the heads' tensors, by the model's config.json.

    Most models have further layers after the last one, which `num_nextn_predict_layers` counts.
    """
    text = model.get("text_config") or model
    architecture = next(iter(model.get("architectures") or ()), "")
    if architecture.startswith(_OWN_NAMES):
        return re.compile(r"mtp\..*")
    last, further = text.get("num_hidden_layers"), text.get("num_nextn_predict_layers")
    if type(last) is not int or type(further) is not int or further < 1:
        return _NONE
    numbers = "|".join(str(last + i) for i in range(further))
    return re.compile(rf"model\.layers\.(?:{numbers})\..*")


@dataclass(frozen=True)
class FurtherHeads:
    """The heads' tensors in a checkpoint directory."""

    directory: Path
    files: Mapping[str, str]  # the file of each tensor, by its name

    def __bool__(self) -> bool:
        return bool(self.files)

    def __str__(self) -> str:
        first = min(self.files)
        return (
            f"{self.directory} has {len(self.files)} tensors of heads for further tokens ({first}, ...): "
            "they are not trained, and exported as they are"
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor), file by file. Raises OSError, SafetensorError."""
        for file in sorted(set(self.files.values())):
            with safe_open(self.directory / file, "pt") as opened:
                for name in sorted(name for name, file_of_name in self.files.items() if file_of_name == file):
                    yield name, opened.get_tensor(name)

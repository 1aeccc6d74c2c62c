"""SGLang (0.5.23) gives the heads of these models a bias, and checkpoints have none.

The bias then keeps its random value, and every score of a server has the same error. Here the bias is 0
unless the checkpoint has one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sglang.srt.models import qwen2_classification, qwen3_classification


class Qwen2ForSequenceClassification(qwen2_classification.Qwen2ForSequenceClassification):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        torch.nn.init.zeros_(self.score.bias)
        return super().load_weights(weights)


class Qwen3ForSequenceClassification(qwen3_classification.Qwen3ForSequenceClassification):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        torch.nn.init.zeros_(self.score.bias)
        return super().load_weights(weights)


EntryClass = [Qwen2ForSequenceClassification, Qwen3ForSequenceClassification]

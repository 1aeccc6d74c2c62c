"""Weights into the embedded engine: tensors copied in place, in the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from megatron_gvpo.sampling.embedded import LocalEngine


class InProcess:
    """Pushes Hugging Face-named tensors into a `LocalEngine`."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    @torch.no_grad()
    def push(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy every tensor of the model from `stream`, then set the engine's weight version.

        Every name must come exactly once; of tied tensors one is enough. Raises ValueError for an
        unknown, repeated, missing or misshapen tensor, and after it, as after any error of the stream
        itself, the engine refuses to generate until a push succeeds.
        """
        with self._engine.replacing_weights(version) as model:
            targets = model.state_dict(keep_vars=True)
            arrived: set[str] = set()
            filled: set[int] = set()  # targets by identity: tied names share one
            for name, tensor in stream:
                target = targets.get(name)
                if target is None:
                    raise ValueError(f"weight push {version}: the engine's model has no tensor {name!r}")
                if name in arrived:
                    raise ValueError(f"weight push {version}: {name} came twice")
                if tensor.shape != target.shape:
                    raise ValueError(
                        f"weight push {version}: {name} has shape {tuple(tensor.shape)}, "
                        f"the engine's model needs {tuple(target.shape)}"
                    )
                if id(target) in filled and not torch.equal(target, tensor.to(target)):
                    raise ValueError(
                        f"weight push {version}: {name} is tied to another tensor in the engine's model "
                        "(tie_word_embeddings), but came with other values"
                    )
                target.copy_(tensor)
                arrived.add(name)
                filled.add(id(target))
            missing = [name for name, target in targets.items() if id(target) not in filled]
            if missing:
                shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
                raise ValueError(f"weight push {version}: {len(missing)} tensor(s) did not come: {shown}")


class EmbeddedWeights:
    """Pushes the policy's weights into the embedded engine of this process."""

    def __init__(self, engine: LocalEngine, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self._engine, self._weights = engine, weights

    @property
    def version(self) -> int:
        return self._engine.weight_version

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    def push(self, version: int) -> None:
        InProcess(self._engine).push(self._weights(), version)

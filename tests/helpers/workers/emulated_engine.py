"""A rank of a rollout server with an emulated GPU: SGLang's plugin, and a model that is parameters alone.

Arguments: a JSON file of {name: shape}, this rank, and the server's number of ranks. Each line of stdin is an
order for the plugin, or {"op": "save", "file": a safetensors file for this rank's parameters}. Each answer is
a line of JSON: "" or an error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from megatron_gvpo.emulation import emulated_gpu
from megatron_gvpo.servers.server import PLUGINS


class Engine(nn.Module):
    """A rank's rows of each matrix, as of a layer that is divided by its outputs, and all of each vector."""

    def __init__(self, shapes: dict[str, list[int]], rank: int, ranks: int) -> None:
        super().__init__()
        self._rank, self._ranks, self.tensors = rank, ranks, nn.ParameterDict()
        for name, shape in shapes.items():
            rows = shape[0] // (ranks if self._divides(shape) else 1)
            weight = torch.zeros(rows, *shape[1:], device="cuda")
            self.tensors[name.replace(".", "/")] = nn.Parameter(weight, requires_grad=False)

    def load_weights(self, named: list[tuple[str, Any]]) -> None:
        for name, tensor in named:
            part = tensor.chunk(self._ranks)[self._rank] if self._divides(tensor.shape) else tensor
            self.tensors[name.replace(".", "/")].data.copy_(part)

    def named(self) -> dict[str, Tensor]:
        return {name.replace("/", "."): tensor.data.cpu() for name, tensor in self.tensors.items()}

    def _divides(self, shape: Sequence[int]) -> bool:
        return len(shape) > 1 and shape[0] % self._ranks == 0


def main() -> None:
    shapes, rank, ranks = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), int(sys.argv[3])
    emulated_gpu.install()
    torch.cuda.set_device(rank)
    sys.path.insert(0, str(PLUGINS))
    from megatron_gvpo_sglang import receive

    engine = Engine(shapes, rank, ranks)
    for line in sys.stdin:
        order, problem = json.loads(line), ""
        try:
            if order["op"] == "save":
                save_file(engine.named(), order["file"])
            else:
                text = torch.tensor(list(line.encode()), dtype=torch.uint8)
                receive(engine, [("order", text)])
        except Exception as error:  # the trainer hears of it
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps(problem), flush=True)


if __name__ == "__main__":
    main()

"""Inside `with_integers` integers on the null CUDA have the values of a CPU."""

from __future__ import annotations

from helpers import on_null_cuda

CODE = """
import torch
from megatron_gvpo.rehearsal.integers import with_integers

def numbers(device):
    grid = torch.tensor([[1, 4, 6], [1, 2, 2]], device=device)
    tokens = torch.arange(12, device=device) % 5
    lengths = grid.prod(-1)
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    types = torch.zeros_like(tokens)
    types[tokens == 3] = 1
    types[2:4][torch.isin(tokens[2:4], torch.tensor([2], device=device))] = 7
    merge = torch.tensor([2], device=device).expand(2)
    rows, columns = torch.meshgrid(torch.arange(3, device=device), merge, indexing="ij")
    return [
        grid.tolist(), lengths.tolist(), ends.tolist(), types.tolist(), merge.tolist(), int(ends[-1]),
        tokens[types == 1].tolist(), torch.nonzero(tokens == 4).flatten().tolist(),
        torch.repeat_interleave(grid[:, 1], grid[:, 0] + 1).tolist(), (rows * columns).tolist(),
        bool((tokens % 5 != 0).any()), torch.unique(types).tolist(), ends.max().item(),
    ]

result = {"cpu": numbers("cpu"), "null": with_integers(numbers)("cuda")}

def added(n):
    return (torch.full((3,), n, device="cuda") + 1).tolist() == [n + 1] * 3

result["within"] = [with_integers(added)(40), added(50)]
"""


def test_they_are_those_of_a_cpu() -> None:
    values = on_null_cuda.run_code(CODE)
    assert values["null"] == values["cpu"]
    assert values["within"] == [True, False]

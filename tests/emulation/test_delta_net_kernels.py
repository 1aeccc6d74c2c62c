"""flash-linear-attention's kernels in Triton's interpreter: gated delta nets on an emulated GPU.

The reference is what a CPU run has in their place (`megatron/cpu/gated_delta.py`), in fp64: so both paths
are held to each other. test_emulated_families.py has whole models.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import on_null_cuda
from helpers.cases.families import FAMILIES
from helpers.distributed import launch
from helpers.workers.delta_net_faults import FAULTS, make_rows

from megatron_gvpo.verify import reference
from megatron_gvpo.verify.measures import TEMPERATURE, Limits
from megatron_gvpo.verify.shrink import save_tiny

pytestmark = pytest.mark.proof
# Six tensors between the kernels are in bf16, too, each rounded by 2^-9 of itself.
BOUNDS = {"float32": 1e-5, "bfloat16": 6 * 2**-9}
# (dtype, lengths of the sequences, heads, width of a key, width of a value): a chunk has 64 tokens.
Case = tuple[str, tuple[int, ...], int, int, int]
CASES: list[Case] = [
    (dtype, *sizes)
    for dtype in BOUNDS
    for sizes in (((3, 1, 20), 2, 16, 16), ((70, 1, 64), 2, 16, 24), ((5, 66), 1, 128, 128))
]
CODE = """
import torch
from megatron_gvpo.emulation import emulated_gpu

emulated_gpu.install()
from megatron.core.ssm.gated_delta_net import common
from megatron_gvpo.megatron.cpu import gated_delta as on_cpu

def computed(functions, heads, width, values, x, weight, g, beta, upstream, ends):
    leaves = [t.requires_grad_() for t in (x, weight, g, beta)]
    y, _ = functions.causal_conv1d(
        x=x, weight=weight, bias=None, activation="silu", initial_state=None, output_final_state=False,
        cu_seqlens=ends,
    )
    q, k, v = y.split([heads * width, heads * width, heads * values], -1)
    q, k = functions.l2norm(torch.cat([q, k], -1).unflatten(-1, (2 * heads, width))).chunk(2, 2)
    v = v.unflatten(-1, (heads, values))
    rule = getattr(functions, "chunk_gated_delta_rule", None) or functions.gated_delta_rule
    out, _ = rule(
        q.contiguous(), k.contiguous(), v.contiguous(), g=g, beta=beta, initial_state=None,
        output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=ends,
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

def errors(dtype, lengths, heads, width, values):
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens, channels = int(ends[-1]), heads * (2 * width + values)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(getattr(torch, dtype))

    g = -torch.rand(1, tokens, heads, generator=generator)
    beta = random(1, tokens, heads).sigmoid()
    upstream = random(1, tokens, heads, values)
    inputs = [random(1, tokens, channels), random(channels, 4) / 2, g, beta, upstream]
    sizes = (heads, width, values)
    wanted = computed(on_cpu, *sizes, *(t.clone().double() for t in inputs), ends)
    ours = computed(common, *sizes, *(t.clone().cuda() for t in inputs), ends.cuda())
    pairs = zip(ours, wanted, strict=True)
    return [((a.cpu().double() - b).abs().max() / b.abs().max()).item() for a, b in pairs]

result = [errors(*case) for case in CASES]
"""


@pytest.fixture(scope="module")
def errors() -> dict[Case, list[float]]:
    program = f"CASES = {CASES!r}\n{CODE}"
    values = on_null_cuda.run_code(program, emulated=True, timeout=1200)
    return dict(zip(CASES, values, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_kernels_compute_what_a_cpu_run_has_in_their_place(
    errors: dict[Case, list[float]], case: Case
) -> None:
    names = ("output", "inputs", "weights", "gates", "betas")
    by_name = dict(zip(names, errors[case], strict=True))
    print(case, {name: f"{error:.2g}" for name, error in by_name.items()})
    assert max(by_name.values()) <= BOUNDS[case[0]], by_name


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("delta-nets")
    [family] = [family for family in FAMILIES if family.title == "Qwen3.5"]
    few_heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    save_tiny(family.tiny | few_heads, path / "model", family.title)
    launch("helpers.workers.delta_net_faults:run", [1], str(path), timeout=1800, emulated=True)
    return path


@pytest.fixture(scope="module")
def log_probs(directory: Path) -> tuple[torch.Tensor, float]:
    """Those of `transformers` in fp64, and the limit of `megatron-gvpo verify`."""
    model, rows = reference.load(directory / "model"), make_rows()
    with torch.no_grad():
        exact = torch.cat(reference.log_probs(model, rows, TEMPERATURE))
        with reference.in_float32(model):
            rounded = torch.cat(reference.log_probs(model, rows, TEMPERATURE))
    return exact, max(Limits().logp, 4 * (rounded.double() - exact).abs().max().item())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_layer_is_found(
    directory: Path, log_probs: tuple[torch.Tensor, float], fault: str
) -> None:
    exact, limit = log_probs
    scores = torch.load(directory / "scores.pt", weights_only=True)
    scored, calls = scores[fault]
    assert calls == 3, "each layer with a gated delta net runs the code with the fault"
    error = (scored.double() - exact).abs().max().item()
    print(f"{fault}: {error:.2g} nats, limit {limit:.2g}")
    assert (error <= limit) is fault.startswith("nothing")

"""The versions this package is tested with, as data: one table for `doctor`, the images and the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PYTHON_REFERENCE = "3.12"
PYTHON_TESTED = ">=3.12,<3.13"


@dataclass(frozen=True, slots=True)
class Component:
    """A package that matters. `reference` is its version in the tested reference set, `tested` the range
    that is tested (a PEP 440 specifier, empty where any will do), both by its distribution name."""

    name: str
    purpose: str
    need: Literal["needed", "on GPUs", "optional"]  # whether the main job runs without it
    instead: str  # what is used where it is missing; empty where nothing can be
    install: str  # a command
    reference: str = ""
    tested: str = ""


COMPONENTS = (
    Component(
        name="torch",
        purpose="tensors, autograd, collectives",
        need="needed",
        instead="",
        install="pip install torch==2.13.0",
        reference="2.13.0",
        tested=">=2.11,<2.16",
    ),
    Component(
        name="megatron-core",
        purpose="the parallel model, optimizer and checkpoints",
        need="needed",
        instead="",
        install="pip install megatron-core==0.19.2",
        reference="0.19.2",
        tested=">=0.19.2,<0.20",
    ),
    Component(
        name="megatron-bridge",
        purpose="Hugging Face weights in and out of Megatron",
        need="needed",
        instead="",
        # Its declared dependencies cannot be resolved beside transformers 5.19.
        install="pip install --no-deps megatron-bridge==0.6.2",
        reference="0.6.2",
        tested="==0.6.2",
    ),
    Component(
        name="transformers",
        purpose="tokenizers, model configurations, the embedded engine",
        need="needed",
        instead="",
        install="pip install transformers==5.19.0",
        reference="5.19.0",
        tested=">=5.19,<6",
    ),
    Component(
        name="math-verify",
        purpose="the reward 'math'",
        need="needed",
        instead="",
        install="pip install 'math-verify>=0.9'",
        reference="0.9.0",
        tested=">=0.9",
    ),
    Component(
        name="transformer-engine",
        purpose="attention, norms and FP8 on GPUs",
        need="on GPUs",
        instead="on a CPU, our own attention and norm",
        install="pip install --no-build-isolation 'transformer-engine[pytorch]'",
    ),
    Component(
        name="triton",
        purpose="GPU kernels; comes with torch for CUDA",
        need="optional",
        instead="plain PyTorch",
        install="pip install triton",
    ),
    Component(
        name="apex",
        purpose="another source of NVIDIA's fused optimizers",
        need="optional",
        instead="Transformer Engine's or PyTorch's optimizer",
        install="build NVIDIA/apex from source (what pip calls apex is another library)",
    ),
    Component(
        name="sglang",
        purpose="rollout server; may live in an environment of its own",
        need="optional",
        instead="the embedded engine",
        install="in an environment of its own: pip install sglang==0.5.23",
        reference="0.5.23",
    ),
    Component(
        name="vllm",
        purpose="rollout server; may live in an environment of its own",
        need="optional",
        instead="the embedded engine",
        install="in an environment of its own: pip install vllm==0.32.0",
        reference="0.32.0",
    ),
    Component(
        name="nvidia-ml-py",
        purpose="reads the GPUs' memory, load, power and temperature",
        need="optional",
        instead="no GPU metrics",
        install="pip install nvidia-ml-py",
    ),
    Component(
        name="wandb",
        purpose="Weights & Biases logging",
        need="optional",
        instead="metrics.jsonl and TensorBoard",
        install="pip install wandb",
    ),
)

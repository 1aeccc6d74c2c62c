"""The version of megatron_gvpo, and the packages that it builds on.

versions.txt lists their reference versions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from megatron_gvpo.core.commit import Commit, package_commit

VERSION = "0.1.0"  # the version of this package
PYTHON_REFERENCE = "3.12"
PYTHON_TESTED = ">=3.12,<3.13"

# Maps the distribution name of each package in versions.txt to its version.
REFERENCE = dict(
    re.findall(
        r"^([\w-]+)==([\w.]+)",
        resources.files("megatron_gvpo").joinpath("versions.txt").read_text(),
        re.MULTILINE,
    )
)


def own_commit() -> Commit | None:
    """The commit of this package, or None if nothing names it. It may run git to find the commit."""
    return package_commit(Path(__file__).parents[1])


def own_version() -> str:
    """`1.2.3 (commit 0123456789ab)`; with `, changed` where tracked files of the checkout differ from it."""
    commit = own_commit()
    if commit is None:
        return f"{VERSION} (commit unknown)"
    return f"{VERSION} (commit {commit.commit[:12]}{', changed' if commit.dirty else ''})"


@dataclass(frozen=True, slots=True)
class Component:
    """A package that `doctor` looks for."""

    name: str  # distribution name
    purpose: str
    need: Literal["needed", "on GPUs", "optional"]  # training needs it always, on GPUs only, or never
    instead: str  # substitute that is used if it is missing; empty: there is none
    install: str  # command or instruction that installs it
    tested: str = ""  # PEP 440 specifier of the tested versions; empty: any version

    @property
    def reference(self) -> str:
        """The package's version in versions.txt; empty if it is not listed there."""
        return REFERENCE.get(self.name, "")


COMPONENTS = (
    Component(
        name="torch",
        purpose="tensors, autograd, collectives",
        need="needed",
        instead="",
        install=f"pip install torch=={REFERENCE['torch']}",
        tested=">=2.11,<2.16",
    ),
    Component(
        name="megatron-core",
        purpose="the parallel model, optimizer and checkpoints",
        need="needed",
        instead="",
        install=f"pip install megatron-core=={REFERENCE['megatron-core']}",
        tested=">=0.19.2,<0.20",
    ),
    Component(
        name="megatron-bridge",
        purpose="Hugging Face weights in and out of Megatron",
        need="needed",
        instead="",
        # The package's declared dependencies conflict with transformers 5.19.
        install=f"pip install --no-deps megatron-bridge=={REFERENCE['megatron-bridge']}",
        tested=f"=={REFERENCE['megatron-bridge']}",
    ),
    Component(
        name="transformers",
        purpose="tokenizers, model configurations, the embedded engine",
        need="needed",
        instead="",
        install=f"pip install transformers=={REFERENCE['transformers']}",
        tested=">=5.19,<6",
    ),
    Component(
        name="math-verify",
        purpose="the reward 'math'",
        need="needed",
        instead="",
        install="pip install 'math-verify>=0.9'",
        tested=">=0.9",
    ),
    Component(
        name="transformer-engine",
        purpose="attention, norms and FP8 on GPUs",
        need="on GPUs",
        instead="on a CPU, our own attention and norm",
        # By default its build looks for a ready wheel, and compiles NCCL's expert parallelism. A CUDA toolkit
        # lacks some of the headers that the build needs, and NVIDIA's wheels have them.
        install=f"pip install 'cuda-toolkit[crt,cccl]~={REFERENCE['cuda-toolkit']}' && NVTE_WITH_NCCL_EP=0 "
        "NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_BUILD_USE_NVIDIA_WHEELS=1 pip install --no-build-isolation "
        f"'transformer-engine[core-cu13,pytorch]=={REFERENCE['transformer-engine']}'",
    ),
    Component(
        name="flash-attn",
        purpose="attention on A100, and on H100 with train.deterministic",
        need="optional",
        instead="cuDNN's attention on H100 and newer; elsewhere a run is refused",
        install=f"pip install --no-build-isolation flash-attn=={REFERENCE['flash-attn']}",
        tested=">=2.7.3,<2.8.4",
    ),
    Component(
        name="flash-linear-attention",
        purpose="gated delta nets (Qwen3-Next, Qwen3.5)",
        need="optional",
        instead="on a CPU, our own gated delta rule; on a GPU such models are refused",
        install=f"pip install flash-linear-attention=={REFERENCE['flash-linear-attention']}",
        tested=f"=={REFERENCE['flash-linear-attention']}",
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
        install=f"in an environment of its own: pip install sglang=={REFERENCE['sglang']}",
    ),
    Component(
        name="vllm",
        purpose="rollout server; may live in an environment of its own",
        need="optional",
        instead="the embedded engine",
        # Without the second argument, cuda-python would be that of CUDA 12, with which flashinfer cannot be
        # imported.
        install=f"in an environment of its own: pip install vllm=={REFERENCE['vllm']} 'cuda-python>=13'",
    ),
    Component(
        name="nvidia-ml-py",
        purpose="reads the GPUs' memory, load, power and temperature",
        need="optional",
        instead="no GPU metrics",
        install="pip install nvidia-ml-py",
    ),
    *(
        Component(
            name=package,
            purpose=f"{title} logging",
            need="optional",
            instead="metrics.jsonl and TensorBoard",
            install=f"pip install {package}",
        )
        for package, title in (
            ("wandb", "Weights & Biases"),
            ("trackio", "trackio"),
            ("mlflow-skinny", "MLflow"),
            ("swanlab", "SwanLab"),
        )
    ),
)

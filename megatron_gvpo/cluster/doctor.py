"""`megatron-gvpo doctor`: reports this machine's hardware and packages, the choices that a run will make, and
the missing packages with a command to install each.

Package versions are read from metadata without importing the package. Only torch is imported, and only if
there is a GPU, because only torch knows if it can use that GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_gvpo.core.gpu_packages import cuda_of_torch, transformer_engine_is_partial
from megatron_gvpo.core.gpus import GIB, LocalGpu, driver_version, list_gpus
from megatron_gvpo.core.versions import COMPONENTS, PYTHON_TESTED, REFERENCE, VERSION, Component, own_version
from megatron_gvpo.workers.sandbox import Sandbox

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Torch:
    """Facts that torch reports about itself; `error` is set if torch cannot be imported."""

    cuda_available: bool = False
    cuda: str | None = None  # CUDA release that torch was built for; None: built for CPUs
    nccl: str | None = None
    capability: tuple[int, int] | None = None  # compute capability of the first GPU that torch sees
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Package:
    """A component of the versions table, and the version that is installed here."""

    component: Component
    found: str | None  # None: not installed
    status: Literal["ok", "untested", "missing", "absent"]  # absent: not installed and not needed here


@dataclass(frozen=True, slots=True)
class Problem:
    what: str
    fix: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The complete result of `doctor`. The main job can run if there are no problems."""

    machine: dict[str, str]
    gpus: list[LocalGpu]
    packages: list[Package]
    uses: dict[str, str]
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The report in plain types, for JSON."""
        return {"version": VERSION, "ready": self.ready, **asdict(self)}


def main(as_json: bool = False) -> int:
    """Print the report; 0 if training can run here, 1 if something that it needs is missing."""
    result = report()
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        _print(result)
    return 0 if result.ready else 1


def report() -> Diagnosis:
    gpus = list_gpus()
    torch = probe_torch(bool(gpus) or any(Path("/dev").glob("nvidia[0-9]*")))
    packages = [examine(component, torch.cuda_available) for component in COMPONENTS]
    problems, warnings = list(_problems(packages, torch, gpus)), list(_warnings(packages, torch, gpus))
    return Diagnosis(_machine(torch), gpus, packages, planned_use(packages, torch), problems, warnings)


def probe_torch(gpus: bool) -> Torch:
    """Ask torch which GPUs it can use.

    Without a GPU, torch is not imported: the import takes seconds and would tell nothing more.
    """
    try:
        if not gpus:
            return _torch_on_disk()
        import torch

        available = torch.cuda.is_available()
        return Torch(
            cuda_available=available,
            cuda=torch.version.cuda,
            nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None,
            capability=torch.cuda.get_device_capability() if available else None,
        )
    except Exception as error:  # a broken installation fails in many ways
        return Torch(error=f"{type(error).__name__}: {error}")


def _torch_on_disk() -> Torch:
    """Read the release that torch was built for, and load its libraries without its Python modules.

    Raises ModuleNotFoundError if torch is missing, OSError if one of its libraries cannot be loaded.
    """
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'torch'")
    package = Path(spec.origin).parent
    for library in ("libtorch_global_deps.so", "libtorch_python.so"):
        ctypes.CDLL(str(package / "lib" / library), mode=ctypes.RTLD_GLOBAL)
    cuda = cuda_of_torch()
    nccl = find_version(f"nvidia-nccl-cu{cuda.partition('.')[0]}") if cuda else None
    return Torch(cuda=cuda, nccl=nccl)


def examine(component: Component, on_gpu: bool) -> Package:
    """Find the installed version of one component.

    `on_gpu`: torch can use a GPU, so components for GPUs are needed.
    """
    installed = find_version(component.name)
    if component.name == "apex" and not _holds("apex", "optimizers"):
        installed = None
    needed = component.need == "needed" or (component.need == "on GPUs" and on_gpu)
    if installed is None:
        return Package(component, None, "missing" if needed else "absent")
    within = SpecifierSet(component.tested).contains(installed, prereleases=True)
    return Package(component, installed, "ok" if within else "untested")


def find_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _problems(packages: list[Package], torch: Torch, gpus: list[LocalGpu]) -> Iterator[Problem]:
    python = platform.python_version()
    if not SpecifierSet(PYTHON_TESTED).contains(python):
        yield Problem(f"Python {python} is outside {PYTHON_TESTED}", "make quickstart (it sets up 3.12)")
    for package in packages:
        component = package.component
        if package.status == "missing":
            yield Problem(f"{component.name} is missing: {component.purpose}", component.install)
    if torch.error and find_version("torch"):
        fix = f"pip install --force-reinstall torch=={REFERENCE['torch']}"
        yield Problem(f"torch cannot be imported ({torch.error})", fix)
    for name in _missing_dependencies({package.component.name for package in packages}):
        yield Problem(f"{name} is missing", f"pip install {name}")
    if transformer_engine_is_partial():
        yield Problem(
            "transformer_engine is installed without its compiled torch extension, so megatron.core "
            "cannot be imported",
            "pip uninstall transformer-engine transformer-engine-cu12 transformer-engine-cu13, or: "
            + next(one.install for one in COMPONENTS if one.name == "transformer-engine"),
        )
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if gpus and torch.cuda and not torch.cuda_available and not is_hidden:
        yield Problem(
            f"torch cannot use the {len(gpus)} GPU(s) here: it is built for CUDA {torch.cuda}, the driver is "
            f"{driver_version()}",
            "python -c 'import torch; torch.cuda.init()' says why: a driver too old for this CUDA, a fabric "
            "manager that does not run, ...; CUDA_VISIBLE_DEVICES= leaves the GPUs unused",
        )


def _warnings(packages: list[Package], torch: Torch, gpus: list[LocalGpu]) -> Iterator[Problem]:
    for package in packages:
        component = package.component
        if package.status == "untested":
            yield Problem(
                f"{component.name} {package.found} is outside the tested {component.tested}",
                component.install,
            )
    if find_version("apex") and not _holds("apex", "optimizers"):
        yield Problem("the installed apex is not NVIDIA's but an unrelated library", "pip uninstall apex")
    if gpus and not torch.cuda and not torch.error:
        yield Problem(
            f"torch cannot use the {len(gpus)} GPU(s) here: it is a build for CPUs", "install PyPI's torch"
        )


def _missing_dependencies(listed: set[str]) -> list[str]:
    """List the declared dependencies, other than `listed`, that are not installed."""
    try:
        declared = [Requirement(text) for text in metadata.requires("megatron-gvpo") or []]
    except metadata.PackageNotFoundError:
        return []  # megatron-gvpo runs from a source tree and has no metadata
    needed = [r.name for r in declared if r.marker is None or r.marker.evaluate({"extra": ""})]
    return [name for name in needed if name not in listed and find_version(name) is None]


def _holds(package: str, submodule: str) -> bool:
    spec = util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return any((Path(folder) / submodule).is_dir() for folder in folders or ())


def planned_use(packages: list[Package], torch: Torch) -> dict[str, str]:
    """Return the device, backend, kernels and dtype that training will use here, for the report."""
    versions = {package.component.name: package.found for package in packages}
    if not torch.cuda_available:
        return {
            "device": "cpu",
            "backend": "gloo",
            "attention and norm": "local stand-ins for CPU",
            "dtype": "model.dtype=float32 (CPUs gain little from bfloat16, and lose exactness)",
        }
    engine = versions["transformer-engine"]
    bfloat16 = torch.capability is not None and torch.capability >= (8, 0)
    return {
        "device": "cuda",
        "backend": "nccl",
        "attention and norm": f"Transformer Engine {engine}" if engine else "Transformer Engine, missing",
        "dtype": "model.dtype=bfloat16"
        if bfloat16
        else "model.dtype=float32 (bfloat16 needs compute capability 8.0)",
    }


def _machine(torch: Torch) -> dict[str, str]:
    disk = shutil.disk_usage(".")
    facts = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / GIB:.1f} GiB",
        "disk": f"{disk.free / GIB:.1f} of {disk.total / GIB:.1f} GiB free in {Path.cwd()}",
        "driver": driver_version() or "none",
        "sandbox": _sandbox(),
    }
    if not torch.error:
        facts["torch"] = f"built for CUDA {torch.cuda}, NCCL {torch.nccl}" if torch.cuda else "built for CPUs"
    return facts


def _sandbox() -> str:
    """The sandbox of the tool `python` here, or the reason why there is none."""
    try:
        Sandbox(seconds=10.0, memory_mb=512).check()
    except ValueError as error:
        return f"none: {error}"
    return "bubblewrap"


def _print(result: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=160)

    def heading(text: str) -> None:
        console.print(Text(f"\n{text}", "bold"))

    def rows(pairs: dict[str, str]) -> None:
        grid = Table.grid(padding=(0, 2))
        for name, value in pairs.items():
            grid.add_row(f"  {name}", value)
        console.print(grid)

    console.print(Text(f"megatron-gvpo {own_version()}", "bold"))
    heading("This machine")
    rows(result.machine | {f"GPU {gpu.index}": _gpu_line(gpu) for gpu in result.gpus})

    heading("Packages")
    console.print(_package_table(result.packages))

    if absent := _absent_packages(result.packages):
        heading("Absent, and not needed here")
        console.print(absent, soft_wrap=True)
    heading("Will be used")
    rows(result.uses)
    for title, items, style in (
        ("Warnings", result.warnings, "yellow"),
        ("Problems", result.problems, "bold red"),
    ):
        if items:
            heading(title)
        for item in items:
            console.print(Text.assemble("  ", (item.what, style), f"\n    {item.fix}"), soft_wrap=True)
    verdict = "Ready: training can run here." if result.ready else "Not ready: see the problems above."
    console.print(Text(f"\n{verdict}", "bold green" if result.ready else "bold red"))


def _absent_packages(packages: list[Package]) -> str:
    """Two lines for each absent package: what happens without it, and how to install it."""
    absent = [package.component for package in packages if package.status == "absent"]
    return "\n".join(
        f"  {component.name:<18}  without it: {component.instead}\n  {'':<18}  to get it: {component.install}"
        for component in absent
    )


def _package_table(packages: list[Package]) -> Table:
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "untested": "yellow", "missing": "bold red", "absent": "bright_black"}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", pad_edge=False)
    for column in ("", "package", "found", "reference", "", "for"):
        table.add_column(column, no_wrap=column != "for")
    for package in packages:
        component = package.component
        table.add_row(
            Text(f"  {package.status}", styles[package.status]),
            component.name,
            package.found or "-",
            component.reference or "-",
            component.need,
            component.purpose,
        )
    return table


def _gpu_line(gpu: LocalGpu) -> str:
    capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else "unknown"
    links = f", {gpu.nvlinks} NVLinks" if gpu.nvlinks else ""
    return f"{gpu.name}, {gpu.memory_gib:.0f} GiB, compute capability {capability}{links}"

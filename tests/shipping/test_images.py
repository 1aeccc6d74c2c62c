"""The images: their parts exist and fit, and the one that needs no GPU runs the quickstart."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from helpers.inputs.good_config import SHORT
from helpers.machine import images
from helpers.paths import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from megatron_gvpo.core.versions import REFERENCE

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
QUICKSTART = "/opt/megatron_gvpo/examples/quickstart/run.py"


def instructions(file: Path) -> list[tuple[str, str]]:
    """[(instruction, arguments)] with continued lines joined and comments left out."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
    lines = [line.strip() for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_hadolint_finds_nothing(file: Path):
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, "--no-color", file], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_what_is_copied_exists(file: Path):
    """Sources are in the repository, .dockerignore lets them through, and stages come before their use."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"]
    defaults = dict(a.split("=", 1) for kind, a in instructions(file) if kind == "ARG" and "=" in a)
    stages: list[str] = []
    for kind, arguments in instructions(file):
        if kind == "FROM":
            base, *name = re.split(r"\s+AS\s+", arguments)
            if choice := re.fullmatch(r"\$\{(APEX|DEEPEP)\}(-\w+)", base):
                argument, library = choice.groups()
                assert {defaults[argument] + library, "with" + library} <= set(stages)
            else:
                assert base == "scratch" or base in stages or re.fullmatch(r"\$\{\w+_IMAGE\}", base)
            stages += name
        if kind == "COPY":
            *options, _ = words = arguments.split()
            if (stage := next((w[7:] for w in words if w.startswith("--from=")), None)) is not None:
                assert stage in stages
                continue
            for source in (word for word in options if not word.startswith("--")):
                assert (ROOT / source).exists(), source
                assert any(Path(source).is_relative_to(one) for one in allowed), (
                    f"{source} is in .dockerignore"
                )


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_final_layers_have_a_user_a_health_check_and_labels(file: Path):
    finals: list[list[tuple[str, str]]] = []
    for kind, arguments in instructions(file):
        if kind == "FROM":
            finals.append([])
        if finals:
            finals[-1].append((kind, arguments))
    ends = [stage for stage in finals if any(kind == "HEALTHCHECK" for kind, _ in stage)]
    assert ends and ends[-1] is finals[-1]
    for stage in ends:
        kinds = [kind for kind, _ in stage]
        assert "LABEL" in kinds and [a for kind, a in stage if kind == "USER"] == ["10001"]
        commands = " ".join(a for kind, a in stage if kind == "RUN")
        assert "apt-get" not in commands or "! command -v cc gcc" in commands  # it would fail with a compiler


@pytest.mark.parametrize("name", ["cpu", "trainer", "sglang", "vllm"])
def test_a_build_gets_the_versions_of_the_one_file(name: str):
    command = subprocess.run(
        ["docker/build.sh", name],
        cwd=ROOT,
        env={"BUILDER": "echo", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    ).stdout
    cuda = Version(REFERENCE["cuda-toolkit"])
    expected = {
        "cpu": f"BASE_IMAGE=python:{sys.version_info[0]}.{sys.version_info[1]}-slim",
        "trainer": f"CUDA_VERSION={cuda} ",
        "sglang": f"SGLANG_VERSION={REFERENCE['sglang']} ",
        "vllm": f"VLLM_VERSION={REFERENCE['vllm']} ",
    }
    assert expected[name] in command and f"--tag megatron_gvpo:{name} " in command
    assert (f"NCCL_VERSION={REFERENCE['nccl']} " in command) == (name != "cpu")
    msgpack = re.search(r"^msgpack==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert (f"MSGPACK_VERSION={msgpack[1]} " in command) == (name in ("sglang", "vllm"))


@pytest.fixture(scope="module")
def imported_by_serve() -> set[str]:
    """The distributions that `serve` imports, with those of any transport that a configuration may name."""
    imports = (
        "import sys; known = set(sys.modules); import megatron_gvpo.cli, megatron_gvpo.servers.launch.serve; "
    )
    imports += "from megatron_gvpo.settings.transports import TRANSPORTS; "
    imports += "from megatron_gvpo.weights.transport import transport_class; "
    imports += "[transport_class(name) for name in TRANSPORTS]; "
    imports += "print(*{name.split('.')[0] for name in set(sys.modules) - known})"
    modules = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", imports], capture_output=True, text=True, check=True
    ).stdout.split()
    owners = packages_distributions()
    return {canonicalize_name(owner) for module in modules for owner in owners.get(module, ())}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_an_engines_image_has_what_serve_imports_and_the_one_nccl(engine: str, imported_by_serve: set[str]):
    """The image has the engine's packages as they resolve, and the additions of docker/rollout.Dockerfile.

    A torch may call functions that an older NCCL than its own lacks; a newer one has all of them. NCCL itself
    refuses a group of two versions (initTransportsRank in its src/init.cc).
    """
    done = subprocess.run(
        f"{sys.executable} -m uv pip compile - --no-header --no-annotate --prerelease=allow "
        "--python-platform x86_64-manylinux_2_39 --python-version 3.12".split(),
        input=f"{engine}=={REFERENCE[engine]}\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    versions = dict(re.findall(r"^([\w.-]+)==([\w.]+)", done.stdout, re.MULTILINE))
    pins = (ROOT / "constraints.txt").read_text()
    pinned_nccl = re.findall(r"^nvidia-nccl-cu13==([\w.]+)", pins, re.MULTILINE)
    for needed in (versions["nvidia-nccl-cu13"], *pinned_nccl):
        assert Version(needed) <= Version(REFERENCE["nccl"])
    assert imported_by_serve - set(versions) == {"megatron-gvpo", "msgpack"}


def test_an_image_without_the_nccl_is_not_built(tmp_path: Path):
    """docker/packages.sh runs with a pip that installs nothing, and names the NCCL that torch loads."""
    pip = tmp_path / "pip"
    pip.mkdir()
    (pip / "__main__.py").write_text("")
    (tmp_path / "torch.py").write_text(
        "class cuda:\n class nccl:\n  version = staticmethod(lambda: (2, 29, 7))\n__version__ = '2'\n"
    )
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    for version, problem in (("2.29.7", ""), ("2.30.7", "torch 2 loads NCCL 2.29.7, not 2.30.7")):
        done = subprocess.run(
            ["sh", ROOT / "docker" / "packages.sh", version],
            env={"PATH": path, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode != 0) == bool(problem) and problem in done.stderr, done.stderr


def test_torch_is_built_for_the_images_cuda():
    """torch names the CUDA release that it was built for; a CPU build names none, but its pins do."""
    from importlib.metadata import requires

    requirements = [Requirement(r) for r in requires("torch") or ()]
    cuda = next((r for r in requirements if r.name == "cuda-toolkit"), None)
    assert cuda is None or cuda.specifier.contains(REFERENCE["cuda-toolkit"])
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    release = REFERENCE["cuda-toolkit"].split(".")[:2]
    assert pins["nvidia-cuda-runtime"].split(".")[:2] == release


def test_the_trainers_packages_resolve(tmp_path: Path):
    """All packages of the trainer's image resolve at its versions, for its Linux and Python."""
    requirements = [f"megatron-gvpo[gpu] @ file://{ROOT}", "megatron-bridge", "flash-attn"]
    requirements += ["setuptools", "wheel", "pybind11"]
    done = subprocess.run(
        f"{sys.executable} -m uv pip compile - --constraints constraints.txt --no-header --no-annotate "
        "--python-platform x86_64-manylinux_2_39 --python-version 3.12".split(),
        cwd=ROOT,
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    versions = dict(re.findall(r"^([\w.-]+)==([\w.]+)", done.stdout, re.MULTILINE))
    names = "torch megatron-core transformers transformer-engine-cu13 transformer-engine-torch flash-attn"
    for name in names.split():
        assert Version(versions[name]) == Version(REFERENCE[name]), name
    assert "transformer-engine-cu12" not in versions and "apex" not in versions


def test_triton_needs_no_compiler_where_its_cache_is_filled(tmp_path: Path):
    """docker/compile_triton.py runs with a library of empty functions in the driver's place."""
    pytest.importorskip("triton")
    driver = tmp_path / "driver"
    driver.mkdir()

    def make_driver(functions: Iterable[str]) -> None:
        source = "".join(f"void {name}(void) {{}}\n" for name in functions)
        (tmp_path / "driver.c").write_text(source)
        command = ["gcc", "-shared", tmp_path / "driver.c", "-o", driver / "libcuda.so.1"]
        subprocess.run(command, check=True)

    def python(*arguments: str, cache: str = "cache", **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH")}
        driver_paths = {"TRITON_LIBCUDA_PATH": str(driver), "LD_LIBRARY_PATH": str(driver)}
        variables |= driver_paths | {"TRITON_CACHE_DIR": str(tmp_path / cache)} | environment
        return subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True)

    make_driver(set(re.findall(r"\bcu[A-Z]\w+", _driver_source())))
    filled = python(str(ROOT / "docker" / "compile_triton.py"))
    assert filled.returncode == 0, filled.stderr[-2000:]

    use = "from triton.backends.nvidia.driver import CudaUtils; CudaUtils()"
    with_file = tmp_path / "bin"
    with_file.mkdir()
    (with_file / "file").write_text("#!/bin/sh\necho ELF 64-bit\n")
    (with_file / "file").chmod(0o755)
    for path in ("/nonexistent", str(with_file)):
        used = python("-c", use, PATH=path)
        assert used.returncode == 0, used.stderr[-2000:]
    assert "Failed to find C compiler" in python("-c", use, cache="empty", PATH="/nonexistent").stderr


def _driver_source() -> str:
    package = importlib.util.find_spec("triton")
    assert package is not None and package.origin is not None
    return (Path(package.origin).parent / "backends" / "nvidia" / "driver.c").read_text()


def test_no_version_is_stated_twice():
    """Only versions.txt pins the packages that it names; pyproject.toml has ranges, which test_doctor
    compares.
    """
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    here = "megatron_gvpo/versions.txt"
    pin = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, REFERENCE))})(?:\[[\w,-]+\])?\s*==\s*v?\d")
    written_out = re.compile("|".join(rf"(?<![\d.]){re.escape(v)}(?![\d.]*\d)" for v in REFERENCE.values()))
    for name in listed.split():
        if name == here or name.startswith(("benchmarks/results/", "locks/")) or not (ROOT / name).is_file():
            continue
        if name.endswith(".png"):
            continue
        text = (ROOT / name).read_text()
        assert not (again := pin.search(text)), f"{name} pins {again[0]}: say it in {here}"
        if name.startswith(("docker/", "tools/", "Makefile", ".ci/")):
            assert not (again := written_out.search(text)), f"{name} states {again[0]}: say it in {here}"
    assert "apex @ git+" in (ROOT / here).read_text(), "what PyPI calls apex is not NVIDIA's"


@pytest.fixture(scope="module")
def cpu_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[images.Images]:
    """A store with the CPU image, built from nothing but Debian, Python and the package index."""
    with images.store() as built:
        built.build("cpu", tmp_path_factory.mktemp("images"))
        yield built


def test_the_cpu_image_can_train(cpu_image: images.Images):
    """Its unprivileged user can, and has no compiler."""
    shown = cpu_image("inspect", "--type", "image", "megatron_gvpo:cpu")
    details = json.loads(shown)["Docker"]["config"]
    assert details["User"] == "10001" and details["Cmd"] == ["python", QUICKSTART]
    assert details["Healthcheck"]["Test"] == ["CMD", "megatron-gvpo", "doctor"]
    assert details["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"

    box = cpu_image("from", "megatron_gvpo:cpu").strip()
    assert "Ready: training can run here." in cpu_image("run", box, "--", "megatron-gvpo", "doctor")
    look = "command -v cc gcc g++ clang nvcc; id -u; ls /root 2>&1 || true"
    compilers = cpu_image("run", box, "--", "sh", "-c", look)
    assert compilers.splitlines()[0] == "10001" and "Permission denied" in compilers


@pytest.mark.proof
@pytest.mark.parametrize("steps", [2, 100])
def test_the_cpu_image_runs_the_quickstart(cpu_image: images.Images, steps: int):
    """All 100 steps raise pass@1 as they do outside."""
    box = cpu_image("from", "megatron_gvpo:cpu").strip()
    options = () if steps == 100 else SHORT
    command = ("run", "--env", "OMP_NUM_THREADS=2", box, "--", "python", QUICKSTART, *options)
    output = cpu_image(*command, timeout=3600)  # all 100 steps take minutes, and many more on a busy machine
    assert "held-out pass@1:" in output and f"after {steps} steps" in output
    if steps == 100:
        after = float(re.search(r"([\d.]+)% after", output)[1])
        assert after > 60, output[-500:]

"""The doctor in this environment, and in real environments where packages are missing or broken."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from helpers.paths import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_gvpo.cluster import doctor
from megatron_gvpo.core.versions import COMPONENTS, PYTHON_REFERENCE, PYTHON_TESTED, REFERENCE
from megatron_gvpo.servers.launch.start import DIALECTS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def visit(*paths, code="sys.exit(doctor.main(True))"):
    """Run the doctor in a Python that sees the standard library, this repository and `paths` alone."""
    standard = [sysconfig.get_path("stdlib"), f"{sysconfig.get_path('stdlib')}/lib-dynload"]
    path = [str(p) for p in (ROOT, *paths)] + standard
    program = f"import sys; sys.path = {path}; from megatron_gvpo.cluster import doctor; {code}"
    return subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True)


@pytest.fixture
def bare(tmp_path):
    """An environment that holds only the packages that the doctor itself needs."""
    site = tmp_path / "site"
    site.mkdir()
    for name in ("packaging", "rich", "pygments", "markdown_it", "mdurl"):
        (site / name).symlink_to(Path(__import__(name).__file__).parent)
    return site


def test_this_environment_is_ready_and_says_what_will_be_used():
    import torch

    report = doctor.report()
    assert report.ready, report.problems
    versions = {package.component.name: package.found for package in report.packages}
    assert versions["megatron-core"] == metadata.version("megatron-core")
    assert versions["torch"] == metadata.version("torch")
    on_gpu = torch.cuda.is_available()
    assert report.uses["device"] == ("cuda" if on_gpu else "cpu")
    assert report.uses["backend"] == ("nccl" if on_gpu else "gloo")


def test_json_is_the_whole_report(capsys):
    assert doctor.main(as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ready"] is True
    assert {item["component"]["name"] for item in shown["packages"]} == {c.name for c in COMPONENTS}


def test_text_is_plain_when_piped_and_breaks_no_command(capsys):
    assert doctor.main() == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and text.isascii()
    for package in doctor.report().packages:
        assert package.component.name in text
        if package.status == "absent":
            assert package.component.install in text


def test_missing_packages_are_problems_with_commands(bare):
    result = visit(bare)
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    fixes = [problem["fix"] for problem in report["problems"]]
    assert report["ready"] is False
    assert f"pip install --no-deps megatron-bridge=={REFERENCE['megatron-bridge']}" in fixes
    assert f"pip install megatron-core=={REFERENCE['megatron-core']}" in fixes
    statuses = {item["component"]["name"]: item["status"] for item in report["packages"]}
    assert statuses["torch"] == "missing" and statuses["wandb"] == "absent"

    text = visit(bare, code="sys.exit(doctor.main())")
    assert text.returncode == 1
    assert "Not ready" in text.stdout and "pip install --no-deps megatron-bridge==" in text.stdout


def install(site, name, version):
    """Write the metadata of a distribution, as pip leaves it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_versions_outside_the_tested_range_are_warnings(bare):
    for component in COMPONENTS:
        if component.need == "needed":
            install(bare, component.name, component.reference)
    (bare / "transformers-5.19.0.dist-info").rename(bare / "transformers-9.1.0.dist-info")
    (bare / "transformers-9.1.0.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 9.1.0\n")
    report = json.loads(visit(bare).stdout)
    assert [w["what"] for w in report["warnings"]] == ["transformers 9.1.0 is outside the tested >=5.19,<6"]
    # The metadata says that torch is there, but it is not.
    assert any("torch cannot be imported (ModuleNotFoundError" in p["what"] for p in report["problems"])


def test_a_half_installed_transformer_engine_is_a_problem(bare):
    package = bare / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise FileNotFoundError('never imported here')")
    assert "without its compiled torch extension" in visit(bare).stdout
    (package / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so").touch()
    assert "without its compiled torch extension" not in visit(bare).stdout


def test_an_unrelated_apex_does_not_count(bare):
    install(bare, "apex", "0.9.10")
    (bare / "apex").mkdir()
    (bare / "apex" / "__init__.py").touch()
    report = json.loads(visit(bare).stdout)
    assert any("not NVIDIA's" in warning["what"] for warning in report["warnings"])
    (bare / "apex" / "optimizers").mkdir()
    report = json.loads(visit(bare).stdout)
    assert not report["warnings"]
    assert {p["component"]["name"]: p["found"] for p in report["packages"]}["apex"] == "0.9.10"


def test_a_gpu_makes_transformer_engine_needed_and_decides_the_dtype():
    engine = next(c for c in COMPONENTS if c.name == "transformer-engine")
    if doctor.find_version(engine.name) is None:
        assert doctor.examine(engine, on_gpu=True).status == "missing"
        assert doctor.examine(engine, on_gpu=False).status == "absent"
    packages = [doctor.Package(engine, "2.20.2", "ok")]
    hopper = doctor.Torch(cuda_available=True, cuda="13.0", capability=(9, 0))
    volta = doctor.Torch(cuda_available=True, cuda="13.0", capability=(7, 0))
    uses = doctor.planned_use(packages, hopper)
    assert (uses["device"], uses["backend"], uses["dtype"]) == ("cuda", "nccl", "model.dtype=bfloat16")
    assert uses["attention and norm"] == "Transformer Engine 2.20.2"
    assert doctor.planned_use(packages, volta)["dtype"].startswith("model.dtype=float32")


def test_versions_table_agrees_with_the_project_file():
    declared = {r.name: r.specifier for r in map(Requirement, PROJECT["project"]["dependencies"])}
    for component in COMPONENTS:
        if component.name in declared and component.tested:
            assert SpecifierSet(component.tested) == declared[component.name], component.name
        if component.reference and component.tested:
            assert component.reference in SpecifierSet(component.tested), component.name
    assert SpecifierSet(PYTHON_TESTED) == SpecifierSet(PROJECT["project"]["requires-python"])
    assert PYTHON_REFERENCE in SpecifierSet(PYTHON_TESTED)


def test_install_commands_name_the_reference_version():
    for component in COMPONENTS:
        pinned = re.search(r"==([\w.]+)", component.install)
        assert pinned is None or pinned[1] == component.reference, component.name


def test_the_engines_that_are_recommended_are_the_ones_that_are_accepted() -> None:
    references = {component.name: component.reference for component in COMPONENTS}
    for engine, dialect in DIALECTS.items():
        assert references[engine] in dialect.tested

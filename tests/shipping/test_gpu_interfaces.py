"""Every name and keyword of Transformer Engine, SGLang, vLLM, NCCL's bindings and pynvml that GPU paths use.

They are compared with the Python sources of the pinned releases. Nothing of them is run, so a release that
renames something is found in seconds and without a GPU.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import megatron.core
import pytest
from helpers.paths import ROOT
from helpers.references.interfaces import Library, Uses
from helpers.references.transformer_engine_source import CUDNN, source, wheel_source
from helpers.servers.real_servers import engine_python

from megatron_gvpo.core.versions import REFERENCE
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.servers.launch.start import DIALECTS
from megatron_gvpo.settings.config import load_config

PACKAGE = ROOT / "megatron_gvpo"
SITE = Path(megatron.core.__path__[0]).parents[1]
# Names that the sources cannot settle: {file: (problem, why it is none)}.
NONE_OF_OURS = {
    "megatron/core/extensions/transformer_engine.py": (
        "general_gemm takes no workspace",
        "passed only to releases that have _get_workspace",
    ),
    "megatron/core/fp8_utils.py": (
        "there is no transformer_engine.pytorch.cpp_extensions.cast_to_fp8",
        "the branch of releases before 2.2",
    ),
    "megatron/core/tensor_parallel/inference_layers.py": (
        "there is no transformer_engine.pytorch.cpp_extensions.rmsnorm_fwd",
        "Megatron's own inference, which nothing here uses",
    ),
    "megatron/bridge/models/gpt_full_te_layer_autocast_spec.py": (
        "transformer_engine.pytorch.TransformerLayer.__init__ takes no ub_atomic_gemm_ag, ub_atomic_gemm_rs, "
        "ub_split_ag, ub_split_rs",
        "a layer specification that no supported model has",
    ),
}


def users(package: str, library: str = "transformer_engine") -> list[Path]:
    imports = re.compile(rf"^\s*(?:import|from) {library}\b", re.MULTILINE)
    return [f for f in sorted((SITE / package).rglob("*.py")) if imports.search(f.read_text())]


@pytest.mark.parametrize("package", ["megatron/core", "megatron/bridge"])
def test_transformer_engine_has_what_megatron_uses(package: str) -> None:
    library, used, problems = Library(source(), "transformer_engine"), 0, {}
    for file in users(package):
        uses = Uses(library, file, REFERENCE["transformer-engine"])
        name, used = str(file.relative_to(SITE)), used + uses.used
        if wrong := [p for p in uses.problems if p.split(": ", 1)[1] != NONE_OF_OURS.get(name, ("",))[0]]:
            problems[name] = wrong
    assert not problems
    assert used > 40, "the check has looked at names"


def test_flash_linear_attention_has_what_megatron_calls() -> None:
    """Two of megatron-core's three imports are aliases, made when it is imported: so it is, without a GPU."""
    [folder] = {file.parent for file in users("megatron/core", "fla")}
    imports = re.findall(r"from (fla\S*) import (\w+)", (folder / "common.py").read_text())
    assert len(imports) == 3
    lines = [f"from {module} import {name}; found[{name!r}] = parameters({name})" for module, name in imports]
    program = "\n".join(
        [
            "import inspect, json",
            "parameters = lambda f: [n for n, p in inspect.signature(f).parameters.items() if p.kind != 4]",
            "found = {}",
            *lines,
            "print(json.dumps(found))",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"PYTHONPATH": str(wheel_source("fla-core"))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    known = json.loads(done.stdout.splitlines()[-1])
    called = [_called(file, {name for _, name in imports}) for file in folder.glob("*.py")]
    assert {name for calls in called for name in calls} == known.keys()
    for calls in called:
        for name, keywords in calls.items():
            assert keywords <= set(known[name]), name


def _called(file: Path, names: set[str]) -> dict[str, set[str]]:
    """The keywords of all calls of these functions in layers: the layer in plain PyTorch is never reached."""
    called: dict[str, set[str]] = {}
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", "") != "torch_chunk_gated_delta_rule"]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        name = "chunk_gated_delta_rule" if name == "gated_delta_rule" else name  # the layer's attribute
        if name in names:
            called.setdefault(name, set()).update(k.arg for k in node.keywords if k.arg)
    return called


def test_flash_linear_attention_takes_the_pinned_triton() -> None:
    """On Hopper it refuses Triton 3.4.0 to before 3.7.1, whose gradients of gated delta nets are wrong.

    Both are pinned: a new Triton needs a look at what its text says then.
    """
    locked = (ROOT / "locks" / "gpu.txt").read_text()
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+) ", locked, re.MULTILINE))
    assert pins["fla-core"] == REFERENCE["fla-core"] == REFERENCE["flash-linear-attention"]
    assert pins["triton"] == "3.7.1"
    text = (wheel_source("fla-core") / "fla/ops/common/chunk_o.py").read_text()
    assert "3.7.1" in text and "3.4.0" in text


def test_transformer_engine_has_what_this_package_uses() -> None:
    """Attributes that are named in strings, and environment variables."""
    text = "\n".join(file.read_text() for file in (source() / "transformer_engine" / "pytorch").rglob("*.py"))
    own_sources = "\n".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    for attribute in ("_fp8_workspaces", "fuse_wgrad_accumulation"):
        assert f'"{attribute}"' in own_sources and re.search(rf"self\.{attribute}\b", text), attribute
    # In the command that installs it.
    of_its_build = {"NVTE_WITH_NCCL_EP", "NVTE_PYTORCH_FORCE_BUILD", "NVTE_BUILD_USE_NVIDIA_WHEELS"}
    for name in set(re.findall(r"\bNVTE_\w+", own_sources)) - of_its_build:
        assert re.search(rf"[\"'.]{name}\b", text), name  # an enumeration's member has a point before it


def test_a_missing_name_or_keyword_is_found(tmp_path: Path) -> None:
    """The check itself, on what this release lacks."""
    file = tmp_path / "user.py"
    file.write_text(
        "import transformer_engine as te\n"
        "from transformer_engine.pytorch import Lynear\n"
        "try:\n    from transformer_engine.pytorch import Older\nexcept ImportError:\n    Older = None\n"
        "class Mine(te.pytorch.Linear):\n"
        "    def __init__(self):\n"
        "        extra = {}\n        extra['colour'] = 1\n"
        "        super().__init__(1, 2, bias=True, shape=3, **extra)\n"
        "if is_te_min_version('99.0'):\n    te.pytorch.FromTheFuture()\n"
        "te.pytorch.Linear(1, 2, bias=False)\n"
    )
    uses = Uses(Library(source(), "transformer_engine"), file, REFERENCE["transformer-engine"])
    assert uses.problems == [
        "2: there is no transformer_engine.pytorch.Lynear",
        "11: transformer_engine.pytorch.Linear.__init__ takes no colour, shape",
    ]


def test_pynvml_has_what_the_monitor_reads() -> None:
    import pynvml

    text = (PACKAGE / "core" / "gpus.py").read_text()
    names = set(re.findall(r"\bnvml\.(\w+)", text)) | set(re.findall(r"\bpynvml\.(\w+)", text))
    names |= {f"nvmlClocksThrottleReason{r}" for r in re.findall(r'"((?:Sw|Hw)\w+)"', text)}
    assert len(names) > 25 and {name for name in names if not hasattr(pynvml, name)} == set()


def test_torch_has_the_nccl_bindings_that_both_sides_use() -> None:
    """Read from texts: a build of torch for CPUs has none of them to ask."""
    text = "\n".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    used = set(re.findall(r"\b(?:dist|torch)\.((?:cuda\.)?(?:ProcessGroupNCCL|nccl)\.\w+)", text))
    assert used >= {"ProcessGroupNCCL.Options", "cuda.nccl.version"}
    stub = (SITE / "torch" / "_C" / "_distributed_c10d.pyi").read_text()
    options = stub.split("class ProcessGroupNCCL(")[1]
    for name in used - {"cuda.nccl.version"}:
        assert re.search(rf"\b(?:class|def) {name.rpartition('.')[2]}\b", options), name
    assert "def version" in (SITE / "torch" / "cuda" / "nccl.py").read_text()


@cache
def site_of(engine: str) -> Path:
    [site] = Path(engine_python(engine)).parents[1].glob("lib/python3*/site-packages")
    return site


def options_of(engine: str) -> set[str]:
    """The options of the engine's server, from the strings and the fields of its settings."""
    files = {
        "sglang": ["sglang/srt/server_args.py", "sglang/srt/arg_groups/fields/*.py"],
        "vllm": ["vllm/engine/arg_utils.py", "vllm/entrypoints/launchers/cli_args.py"],
    }
    options = set[str]()
    for file in (file for pattern in files[engine] for file in site_of(engine).glob(pattern)):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
                options.add(node.value)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                options.add("--" + node.target.id.replace("_", "-"))
    return options


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_engines_have_the_options_of_our_command_lines(engine: str, good: Path) -> None:
    """With everything on that only GPUs have: colocation, routed experts, patched experts, adapters."""
    model = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
    (good.parent / "config.json").write_text(json.dumps(model))
    base = [f"model.path={good.parent}", f"rollout.engine={engine}", "rollout.router_replay=true"]
    base += ["rollout.servers.context_length=64"]
    used = set[str]()
    for more in (
        ["rollout.servers.colocated=true", "rollout.weights.transport=shared"],
        ["rollout.weights.transport=delta"],
        ["rollout.servers.colocated=true", "rollout.weights.transport=adapter", "model.adapter={rank: 8}"],
    ):
        config = load_config([good], [*base, *more])
        launch = DIALECTS[engine].launch(config.model, config.rollout, ModelCards(config), 1, None, True)
        used |= {word for word in launch.command if word.startswith("--")}
        file = {"vllm": "vllm/envs.py", "sglang": "sglang/srt/environ.py"}[engine]
        settings = (site_of(engine) / file).read_text()
        for name in launch.environment:
            assert not name.startswith(("VLLM_", "SGLANG_")) or re.search(rf"\b{name}\b", settings), name
    assert len(used) > 8 and used - options_of(engine) == set()
    refused = {"sglang": "--tokenizer-worker-num", "vllm": "--api-server-count"}
    assert refused[engine] in options_of(engine)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_engines_have_the_routes_that_we_ask(engine: str) -> None:
    own_files = [PACKAGE / "servers" / f"{engine}.py", PACKAGE / "weights" / "receivers" / f"{engine}.py"]
    routes = {
        node.value
        for file in own_files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"/[a-z_0-9/]+", node.value)
    }
    served = set[str]()
    for file in (site_of(engine) / engine).rglob("entrypoints/**/*.py"):
        served |= set(
            re.findall(r"(?:\.(?:get|post|put|api_route|route)|Mount)\(\s*\"(/[^\"]*)\"", file.read_text())
        )
    assert len(routes) > 8 and routes - served == set()


def test_sglangs_memory_tags() -> None:
    """The parts of a sleeping server's memory, of which CPU servers have none."""
    constants = (site_of("sglang") / "sglang" / "srt" / "constants.py").read_text()
    own_source = (PACKAGE / "servers" / "sglang.py").read_text()
    for tag in ("weights", "kv_cache", "cuda_graph"):
        assert f'= "{tag}"' in constants and f'"{tag}"' in own_source
    requests = (site_of("sglang") / "sglang" / "srt" / "managers" / "io_struct.py").read_text()
    assert re.search(r"class ResumeMemoryOccupationReqInput\(.*\):(?:\n    .*)*?\n    tags:", requests)


def test_vllms_names_that_only_gpus_use() -> None:
    site = site_of("vllm")
    plugin = Uses(Library(site, "vllm"), PACKAGE / "servers" / "plugins" / "megatron_gvpo_vllm.py")
    assert plugin.used > 5 and plugin.problems == []
    backends = (site / "vllm/model_executor/layers/fused_moe/oracle/unquantized.py").read_text()
    [enumeration] = re.findall(r"class UnquantizedMoeBackend\(.*?\):\n(.*?)\n\n", backends, re.DOTALL)
    for name in ("TRITON", "BATCHED_TRITON", "FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM"):
        assert f"{name} =" in enumeration
    assert '"triton": UnquantizedMoeBackend.TRITON' in backends, "what --moe-backend triton means"
    method = (site / "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py").read_text()
    assert "self.unquantized_backend" in method
    waking = (site / "vllm/entrypoints/serve/dev/sleep/api_router.py").read_text()
    assert 'getlist("tags")' in waking and re.search(r"level: .*int.*\n    mode: ", waking)


def test_cudnn_is_the_one_that_the_attention_table_was_made_for() -> None:
    pinned = re.search(r"^nvidia-cudnn-cu13==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None and tuple(map(int, pinned[1].split(".")[:3])) == CUDNN
    assert version("megatron-core") == REFERENCE["megatron-core"]


def speculative(
    engine: str, good: Path, method: str, head: str = "LlamaForCausalLMEagle3", more: Sequence[str] = ()
) -> list[str]:
    """The words of a GPU server's command line that are about speculation."""
    draft = good.parent / "draft"
    draft.mkdir(exist_ok=True)
    (draft / "config.json").write_text(json.dumps({"architectures": [head]}))
    (good.parent / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    overrides = [f"model.path={good.parent}", f"rollout.engine={engine}"]
    with_draft = f"{{method: {method}, tokens: 4, model: {draft}}}"
    chosen = with_draft if method in ("draft", "eagle") else f"{{method: {method}, tokens: 4}}"
    config = load_config([good], [*overrides, f"rollout.speculation={chosen}", *more])
    command = DIALECTS[engine].launch(config.model, config.rollout, ModelCards(config), 1, None, True).command
    first = next(i for i, word in enumerate(command) if word.startswith("--speculative"))
    return command[first:]


def test_sglang_has_the_speculation_that_we_ask_for(good: Path) -> None:
    package = site_of("sglang") / "sglang" / "srt"
    source = (package / "speculative" / "spec_info.py").read_text()
    source += (package / "speculative" / "spec_registry.py").read_text()
    for method, algorithm in (
        ("ngram", "NGRAM"),
        ("draft", "STANDALONE"),
        ("mtp", "NEXTN"),
        ("eagle", "EAGLE3"),
    ):
        words = speculative("sglang", good, method)
        assert {word for word in words if word.startswith("--")} - options_of("sglang") == set()
        assert words[:4] == ["--speculative-algorithm", algorithm, "--speculative-num-draft-tokens", "5"]
        assert re.search(rf"\b{algorithm}\b", source)
    assert speculative("sglang", good, "eagle", "LlamaForCausalLMEagle")[1] == "EAGLE"
    shared = ("rollout.servers.colocated=true", "rollout.weights.transport=shared")
    assert speculative("sglang", good, "mtp", more=shared)[-1] == "--enable-draft-weights-cpu-backup"
    manager = (package / "managers" / "tokenizer_manager.py").read_text()
    for name in ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts"):
        assert f'meta_info["{name}"]' in manager
    settings = (package / "arg_groups" / "fields" / "spec.py").read_text()
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        assert re.search(rf"    {name}: A\[\n(?:.*\n)*?    \] = 1\.0\n", settings), f"{name}'s default"
    verify = (package / "speculative" / "eagle_utils.py").read_text()
    assert "return is_all_greedy or is_cpu" in verify, "why SGLang's speculation is refused on CPUs"


def test_vllm_has_the_speculation_that_we_ask_for(good: Path) -> None:
    package = site_of("vllm") / "vllm"
    source = (package / "config" / "speculative.py").read_text()
    [body] = re.findall(r"\nclass SpeculativeConfig:\n(.*)", source, re.DOTALL)
    fields = set(re.findall(r"^    (\w+): ", body, re.MULTILINE))
    literals = set(re.findall(r'^    "(\w+)",|Literal\["(\w+)"\]', source, re.MULTILINE))
    methods = {name for pair in literals for name in pair if name} | {"eagle", "eagle3", "mtp"}
    for method in ("ngram", "suffix", "draft", "mtp", "eagle"):
        option, value = speculative("vllm", good, method)
        chosen = json.loads(value)
        assert option in options_of("vllm") and set(chosen) - fields == set()
        assert chosen["method"] in methods and chosen["num_speculative_tokens"] == 4
    assert 'rejection_sample_method: RejectionSampleMethod = "standard"' in source
    counters = (package / "v1" / "spec_decode" / "metrics.py").read_text()
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert f'"vllm:spec_decode_num_{name}"' in counters

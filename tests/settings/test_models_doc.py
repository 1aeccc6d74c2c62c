"""docs/reference/models.md lists the families that tests compare with transformers, and what is refused.

`pytest --write-tables tests/settings/test_models_doc.py` writes its tables anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.cases.families import FAMILIES, SERVED, SERVED_ELSEWHERE
from helpers.cases.gradient_cases import RUNS, STEPS
from helpers.inputs import family_task
from helpers.references import gradient_reference as reference
from helpers.suite.doc_tables import Hold

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface import image_families as images
from megatron_gvpo.huggingface.architectures import ARCHITECTURES, REFUSED, check_family
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.servers.cpu_engines import DELTA_NETS, NOT_ON_CPU, check_on_cpu

FILE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
ENGINE_NAMES = {"sglang": "SGLang", "vllm": "vLLM"}


def supported() -> str:
    lines = ["| family | architecture | layouts | served on a CPU by |", "|---|---|---|---|"]
    rows = []
    for name, title in reference.FAMILY_NAMES.items():
        if name == "tied":
            continue
        architecture = (reference.CONFIGS[name]().architectures or [None])[0] or _architecture(name)
        layouts = dict.fromkeys(str(layout) for layout, step in RUNS if STEPS[step].model == name)
        rows.append((title, architecture, [of for of in layouts if not of.endswith("small")]))
    rows += [(family.title, family.architecture, list(map(str, family.layouts))) for family in FAMILIES]
    for title, architecture, layouts in sorted(rows):
        lines.append(f"| {title} | `{architecture}` | {', '.join(layouts)} | {_served(title)} |")
    return "\n".join(lines)


def _served(title: str) -> str:
    """The engines whose servers got the family's weights in a test, with a dtype other than float32."""
    engines = [
        ENGINE_NAMES[engine] + ("" if dtype == "float32" else f" ({dtype})")
        for engine, served, dtype in [*SERVED, *SERVED_ELSEWHERE]
        if served == title
    ]
    return ", ".join(sorted(engines)) or "-"


def not_served() -> str:
    lines = ["| engine | architecture | why |", "|---|---|---|"]
    for engine, refused_there in NOT_ON_CPU.items():
        for why, architectures in _by_reason(refused_there).items():
            lines.append(f"| {ENGINE_NAMES[engine]} | {architectures} | {why} |")
    return "\n".join(lines)


def _by_reason(why_of: Mapping[str, str]) -> dict[str, str]:
    """The architectures that are refused for a reason, by that reason."""
    named: dict[str, list[str]] = {}
    for architecture, why in sorted(why_of.items()):
        named.setdefault(why, []).append(f"`{architecture}`")
    return {why: ", ".join(architectures) for why, architectures in named.items()}


def _architecture(name: str) -> str:
    return type(reference.CONFIGS[name]()).__name__.replace("Config", "ForCausalLM")


def refused() -> str:
    lines = ["| architecture | why |", "|---|---|"]
    lines += [f"| {architectures} | {why} |" for why, architectures in _by_reason(REFUSED).items()]
    return "\n".join(lines)


TABLES = {"supported": supported, "not served": not_served, "refused": refused}


def test_the_document_is_current(hold_current: Hold) -> None:
    hold_current(FILE, TABLES)


def test_every_supported_architecture_is_compared() -> None:
    compared = {_architecture(name) for name in reference.CONFIGS}
    compared |= {family.architecture for family in FAMILIES} | set(images.FAMILIES)
    assert compared == set(ARCHITECTURES)
    assert not set(ARCHITECTURES) & set(REFUSED)


def test_what_is_served_on_a_cpu_is_not_refused_there() -> None:
    titles = {title: _architecture(name) for name, title in reference.FAMILY_NAMES.items()}
    titles |= {family.title: family.architecture for family in FAMILIES}
    for engine, title, dtype in SERVED:
        config = family_task.engine_config(title)
        check_on_cpu(ModelCard(config), engine, dtype, "rollout.engine", f"model.path={title}")
        if engine == "vllm" and dtype == "bfloat16":
            assert titles[title] in DELTA_NETS, "it is served in float32, too"


def test_every_architecture_of_megatron_bridge_is_supported_or_refused_by_name() -> None:
    """Its files are read, not imported: that takes ten seconds."""
    [directory] = map(Path, find_spec("megatron.bridge").submodule_search_locations)
    built = set()
    for file in (directory / "models").rglob("*_bridge.py"):
        text = "\n".join(line for line in file.read_text().splitlines() if ">>>" not in line)
        for name in re.findall(r"register_bridge(?:_implementation)?\(\s*source=\"?([A-Z_]\w+)", text):
            constant = re.search(rf'^{name} = "(\w+)"', text, re.MULTILINE)
            built.add(constant[1] if constant else name)
    assert {"LlamaForCausalLM", "Ernie4_5_MoeForCausalLM", "ExaoneMoEForCausalLM"} < built
    assert built <= set(ARCHITECTURES) | set(REFUSED)


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_refusal_says_what_was_wrong(architecture: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_family({"architectures": [architecture]}, "model.path=m")
    assert REFUSED[architecture] in str(refusal.value)

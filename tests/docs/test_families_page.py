"""docs/reference/families.md says which features the tests run with which family.

`pytest --write-tables tests/docs/test_families_page.py` writes its table anew, from the tests' lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from helpers.cases import vision_cases
from helpers.cases.adapter_cases import ADAPTERS
from helpers.cases.families import EVERY_FAMILY, FAMILIES, SERVED, SERVED_ELSEWHERE
from helpers.cases.gradient_cases import RUNS, STEPS
from helpers.cases.muon_cases import EVERY
from helpers.references import gradient_reference as reference
from helpers.suite.doc_tables import Hold

from megatron_gvpo.verify.layout import ParallelLayout

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "families.md"
DIVISIONS = ("dp", "tp", "pp", "vpp", "cp", "ep", "etp")
ENGINES = {"sglang": "SGLang", "vllm": "vLLM"}
VISION = {"qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL"}
EMULATED = {"Qwen3": "Qwen3", "Qwen3Moe": "Qwen3-MoE"}  # of test_emulated_fp8.py
REHEARSED = {"qwen": "Qwen2", "mixture": "Qwen3-MoE", "latent": "DeepSeek-V3"}  # of test_configurations.py


def layouts() -> dict[str, list[ParallelLayout]]:
    """The layouts in which each family's gradient is compared with `transformers`, by the family's title."""
    compared: dict[str, list[ParallelLayout]] = {}
    for layout, step in RUNS:
        compared.setdefault(title_of(STEPS[step].model), []).append(layout)
    for family in FAMILIES:
        compared.setdefault(family.title, []).extend(family.layouts)
    for case in vision_cases.CASES:
        compared.setdefault(VISION[case.model.removesuffix("_tied")], []).append(case.layout)
    return compared


def title_of(model: str) -> str:
    """The documentation's name of a model of the tests, which may be named by its architecture."""
    by_architecture = {family.architecture: family.title for family in FAMILIES}
    name = "untied" if model == "tied" else model
    return reference.FAMILY_NAMES.get(name) or by_architecture[name]


def fp8_families() -> dict[str, str]:
    """How each family is tested with FP8: in rehearsals, or with values on emulated GPUs."""
    rehearsals = (ROOT / "tests" / "rehearsal" / "test_configurations.py").read_text()
    emulations = (ROOT / "tests" / "emulation" / "test_emulated_fp8.py").read_text()
    rehearsed = re.findall(r'Case\("(\w+)", \d+, \("model\.fp8\.', rehearsals)
    emulated = re.findall(r": transformers\.(\w+)Config\(", emulations)
    return {REHEARSED[name]: "rehearsed" for name in rehearsed} | {
        EMULATED[name]: "emulated" for name in emulated
    }


def without_a_gpu(title: str) -> list[str]:
    """The parts of the GPU's own code that have run with a family: its rehearsal, and the emulated GPU."""
    words = {"rehearsal": "rehearsed", "emulation": "emulated"}
    of_title = title.removesuffix(" (tied)")
    return [
        word
        for check, word in words.items()
        if any(family.title == of_title and check not in family.exclusions for family in EVERY_FAMILY)
    ]


def divisions(of: Iterable[ParallelLayout]) -> str:
    return ", ".join(name for name in DIVISIONS if any(getattr(layout, name) > 1 for layout in of))


def features() -> str:
    adapters: dict[str, set[str]] = {}
    for model, kind, _ in ADAPTERS.values():
        adapters.setdefault(title_of(model), set()).add({"canonical_lora": "canonical"}.get(kind, kind))
    muon = {title_of(job.model) for job in EVERY}
    replayed = {title_of(STEPS[step].model) for _, step in RUNS if STEPS[step].replayed}
    served = [(ENGINES[engine], title) for engine, title, _ in [*SERVED, *SERVED_ELSEWHERE]]
    lines = [
        "| family | divided by | adapters | Muon | images | replay of routing | FP8 | served by | GPU code |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for title, compared in sorted(layouts().items()):
        cells = [
            title,
            divisions(compared),
            ", ".join(sorted(adapters.get(title, ()))),
            "yes" if title in muon else "",
            "yes" if title in VISION.values() else "",
            "yes" if title in replayed else "",
            fp8_families().get(title, ""),
            ", ".join(sorted(engine for engine, of in served if of == title)),
            ", ".join(without_a_gpu(title)),
        ]
        lines.append("| " + " | ".join(cell or "-" for cell in cells) + " |")
    return "\n".join(lines)


def test_the_page_is_current(hold_current: Hold) -> None:
    hold_current(PAGE, {"features": features})


def test_every_column_has_an_entry() -> None:
    """A list that moved or was renamed would leave its column empty."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in features().splitlines()[2:]]
    assert len(rows) > 20
    for column in range(len(rows[0])):
        assert any(row[column] != "-" for row in rows), column

"""Every supported architecture is in the one list of families, and each check runs it or says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.cases.families import CHECKS, EVERY_FAMILY, Family

from megatron_gvpo.huggingface.architectures import ARCHITECTURES

ROOT = Path(__file__).parents[2]


def test_every_supported_architecture_is_in_the_list() -> None:
    listed = {family.architecture for family in EVERY_FAMILY}
    assert set(ARCHITECTURES) - listed == set(), "add a line to tests/helpers/cases/families.py"
    assert listed - set(ARCHITECTURES) == set()
    titles = [family.title for family in EVERY_FAMILY]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("family", EVERY_FAMILY, ids=lambda family: family.title)
def test_a_check_that_does_not_run_a_family_is_named_with_its_reason(family: Family) -> None:
    assert {*family.elsewhere, *family.exclusions} <= CHECKS.keys()
    assert not family.elsewhere.keys() & family.exclusions.keys()
    assert all(len(reason.split()) > 3 for reason in family.exclusions.values())
    for file in family.elsewhere.values():
        assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_takes_its_families_from_the_list(check: str) -> None:
    """Another list in its file would not grow with this one."""
    text = (ROOT / CHECKS[check]).read_text()
    names = {"gradients": "FAMILIES", "sglang": "SERVED", "vllm": "SERVED"}
    assert names.get(check, f'checked("{check}")') in text
    assert not any(f'"{family.architecture}"' in text for family in EVERY_FAMILY)

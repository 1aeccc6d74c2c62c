"""Opening Megatron-Bridge on machines whose home directory cannot hold locks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.references import gradient_reference as reference

from megatron_gvpo.megatron.model.megatron_bridge import LOCKS, open_bridge
from megatron_gvpo.settings.sections import ModelConfig


@pytest.mark.parametrize("location", ["nowhere", "the user's"])
def test_ranks_wait_for_no_others_lock(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home directory may be read-only, or shared by all ranks; the user may name a place."""
    config = reference.CONFIGS["untied"]()
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path)
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.delenv(LOCKS, raising=False)
    if location == "the user's":
        monkeypatch.setenv(LOCKS, str(tmp_path / "locks"))
    set_before = os.environ.get(LOCKS)
    open_bridge(ModelConfig(path=str(tmp_path)))
    assert os.environ.get(LOCKS) == set_before
    assert (tmp_path / "locks").exists() == (location == "the user's")

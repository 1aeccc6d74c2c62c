"""The judge computes each response once, and holds no model that nothing asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inputs.run_faults import RUN
from helpers.references import gradient_reference as reference
from helpers.tiny_run import configure, fit
from transformers import AutoModelForCausalLM

from megatron_gvpo.replay import judge, mismatch
from megatron_gvpo.replay.judge import Case, ExactJudge, response_logits
from megatron_gvpo.runs.one_machine import load_run


@pytest.mark.usefixtures("leave_the_process_group")
def test_a_sound_run_loads_one_judge_which_reads_each_response_once(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[torch.dtype] = []
    sequences: list[tuple[int, ...]] = []
    original = judge.load

    def load(directory: Path, dtype: torch.dtype = torch.float64) -> Any:
        model = original(directory, dtype)
        loaded.append(dtype)
        if dtype == torch.float64:
            note = lambda _, __, arguments: sequences.append(tuple(arguments["input_ids"][0].tolist()))  # noqa: E731
            model.register_forward_pre_hook(note, with_kwargs=True)
        return model

    fit(configure(task, tmp_path, *RUN))
    monkeypatch.setattr(judge, "load", load)
    monkeypatch.setattr(mismatch, "_USUAL", 1e6)  # no response is looked into
    certificate = mismatch.certify(load_run(tmp_path), 2)
    assert (
        sum(cause.responses for cause in certificate.causes if cause.side == "engine") == len(sequences) == 16
    )
    assert sorted(map(str, loaded)) == ["torch.bfloat16", "torch.bfloat16", "torch.float32", "torch.float64"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_rounding_is_that_of_transformers_own_model(tmp_path: Path, precision: str) -> None:
    """A model that is cast to bfloat16 after it was loaded has rounded rotary frequencies as well."""
    reference.save_models(tmp_path, ["qwen3"])
    own = AutoModelForCausalLM.from_pretrained(
        tmp_path / "qwen3", dtype=precision, attn_implementation="eager"
    )
    case = Case([*range(3, 90)], [*range(5, 25)], 1.0)
    with torch.no_grad():
        expected = own(torch.tensor([[*case.prompt, *case.ids]])).logits[0, len(case.prompt) - 1 : -1]
    rounded = ExactJudge(tmp_path / "qwen3", 1).rounded(precision)
    torch.testing.assert_close(response_logits(rounded, case), expected, rtol=0, atol=1e-6)

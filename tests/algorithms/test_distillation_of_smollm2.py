"""The parts of benchmarks/smollm2_distillation.py that need no run: cells, their order, the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.inputs.chat_tokenizer import tokenizer

from megatron_gvpo.settings.config import load_config

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import smollm2_distillation as comparison
from lib.smollm2.gemma import TEMPLATE


@pytest.fixture
def args(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    command = ["--teacher", str(tmp_path), "--out", str(tmp_path / "cells.jsonl"), "--seeds", "2"]
    monkeypatch.setattr(sys, "argv", ["smollm2_distillation.py", *command])
    monkeypatch.setattr(comparison, "WORK", tmp_path)
    monkeypatch.setattr(comparison, "model_of", lambda student: tmp_path)
    return comparison.parse()


def write(args, *cells):
    lines = [
        {"way": way, "student": student, "seed": seed, "strict": strict, "lenient": 0.5, "steps": 4, "of": of}
        for way, student, seed, strict, of in cells
    ]
    args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("way", comparison.WAYS)
def test_every_way_is_a_configuration(way, args):
    overrides = comparison.overrides_of(way, comparison.SMOLLM2, 1, args)
    words = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    config = load_config([comparison.EXAMPLE / "gvpo.yaml"], words)
    is_supervised = way in (comparison.SEQKD, comparison.SFT)
    assert (config.teacher is None) == is_supervised
    assert (config.data.train.demonstration_key is None) != is_supervised


def test_all_ways_run_with_a_seed_before_the_next(args):
    cells = comparison.missing(args)
    assert [way for way, *_ in cells[:3]] == [comparison.TEACHER, comparison.BEFORE, comparison.BEFORE]
    assert [seed for *_, seed in cells[3:]] == [0] * len(comparison.CELLS) + [1] * len(comparison.CELLS)
    assert not any(way.startswith("opd") and student == comparison.GEMMA for way, student, _ in cells)


def test_a_cell_of_other_seconds_is_repeated(args):
    write(args, ("opd", "SmolLM2", 0, 0.5, args.seconds), ("opd", "SmolLM2", 1, 0.5, 1.0))
    cells = comparison.missing(args)
    assert ("opd", "SmolLM2", 0) not in cells and ("opd", "SmolLM2", 1) in cells


def test_the_table_has_means_errors_and_what_did_not_run(args):
    write(args, *(("opd", "SmolLM2", seed, strict, args.seconds) for seed, strict in enumerate((0.5, 0.6))))
    text = comparison.table(comparison.read(args), 2)
    assert "| SmolLM2 | opd | 55.0 ± 5.0 | 50.0 ± 0.0 | 4 | 2 |" in text
    assert "GVPO++, alpha 0 with SmolLM2 (2)" in text and "opd with SmolLM2" not in text


def test_the_template_of_gemma_ends_where_a_demonstration_begins():
    chat = [{"role": "user", "content": "1+1"}]
    write = tokenizer(TEMPLATE).apply_chat_template
    before = write(chat, tokenize=False, add_generation_prompt=True)
    chat.append({"role": "assistant", "content": "2"})
    chat_text = write(chat, tokenize=False)
    assert (
        before.endswith("1+1\nAnswer:")
        and chat_text.startswith(before)
        and chat_text.removeprefix(before)[:2] == " 2"
    )

"""`megatron-gvpo keys`: the reference on the command line, and the answer for what is not here."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers.doc_blocks import outside_of_blocks

from megatron_gvpo.cli import main
from megatron_gvpo.settings.reference import keys, search, sections

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "docs"))
import configuration


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["cosine"], "optimizer.decay: `constant` or `linear` or `cosine`; "),
        (["clip_high"], "algorithm.loss.clip_high [ppo]: "),
        (["learning", "rate", "decay"], "optimizer.min_lr: number ≥ 0; 0.0. Learning rate at the end of"),
        (["wall", "time"], "train.max_hours: "),
        (["num_generations"], "num_generations, in another trainer: here it is rollout.n"),
        (["top-k"], "top-k, in another trainer: here it is rollout.top_k"),
        (["muon"], "muon, in another trainer: here it is optimizer.muon, a section"),
        (["kubernetes"], "kubernetes, in another trainer: here it is the command megatron-gvpo k8s"),
        (["modal"], "modal, in another trainer: not supported: a launcher other than torchrun"),
        (["batch", "size"], "batch size, in another trainer: here it is train.prompts_per_step"),
        (["lr_scheduler_type=cosine"], "lr_scheduler_type, in another trainer: here it is optimizer.decay"),
        (
            ["gradient", "accumulation"],
            "gradient_accumulation_steps, in another trainer: here it is train.mini",
        ),
        (["flash", "attention"], "flash attention, in another trainer: not supported: a choice of the atten"),
        (["gkd"], "gkd, in another trainer: here it is algorithm.recipe: opd_full"),
        (["sampling_mask"], "sampling_mask, in another trainer: here it is rollout.top_p, rollout.top_k or"),
        (["keep", "sampling", "mask"], "keep sampling mask, in another trainer: here it is rollout.top_p, "),
        (["early", "stopping"], "early stopping, in another trainer: here it is train.stop_early.patience"),
    ],
)
def test_words(words, line, capsys):
    assert main(["keys", *words]) == 0
    assert [text for text in capsys.readouterr().out.splitlines() if text.startswith(line)]


def test_every_class_of_another_trainer_on_the_page_for_newcomers_is_answered():
    classes = set(re.findall(r"`(\w+(?:Trainer|Config))`", outside_of_blocks("docs/howto/migrate.md")))
    assert len(classes) > 5
    assert [name for name in sorted(classes) if not list(search(name))] == []


def test_an_option_with_its_dashes_is_a_key_of_another_trainer():
    assert list(search("--rollout-batch-size")) == list(search("rollout-batch-size"))
    assert list(search("--rollout-batch-size"))


def test_without_a_word_every_key_is_told_as_the_reference_page_has_it(capsys):
    assert main(["keys"]) == 0
    printed = capsys.readouterr().out
    assert "<redacted>" not in printed, "a meaning reads like a URL with a key"
    printed_keys = {line.partition(": ")[0].partition(" [")[0] for line in printed.splitlines()}
    for path, section in sections():
        assert {f"{path}.{key.name}".lstrip(".") for key in keys(section)} <= printed_keys
    assert len(printed_keys) > 300 and "| `prompts_per_step` |" in configuration.page()


def test_nothing_about_a_word(capsys):
    assert main(["keys", "zzz"]) == 1
    assert "nothing about 'zzz'" in capsys.readouterr().out

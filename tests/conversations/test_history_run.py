"""A run whose chat template writes every turn's history anew, without a part of what was said (proof)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.inputs.digits import TALK, talks
from helpers.suite.real_parts import used
from helpers.tiny_run import GVPO, KeepGroups, configure, fit, records

from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.turns import segments

# Of an earlier turn of the policy, what stands before its last 3 is left out, as thoughts are by Qwen3's.
FORGETS = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content.split('3')[-1] }}<|end|>{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.proof
@pytest.mark.usefixtures("leave_the_process_group")
def test_a_history_that_is_written_anew_is_trained_as_it_was_sampled(task: Path, tmp_path: Path) -> None:
    used("environment workers")
    model = tmp_path / "model"
    shutil.copytree(task / "model", model)
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = FORGETS
    tokenizer.save_pretrained(model)
    talk = talks().replace('"turns": 4', '"turns": 4, "history": "template"')
    longer = ("rollout.max_tokens=60", "data.max_prompt_tokens=64", "data.eval=null", "train.steps=3")
    recorder = KeepGroups()
    fit(configure(task, tmp_path / "run", *GVPO, *TALK, talk, f"model.path={model}", *longer), [recorder])
    lines = records(tmp_path / "run")[1:]
    assert len(lines) == 3 and all(line["env/turns"] > 1 and line["env/lost"] == 0 for line in lines)
    assert all(line["mismatch/kl"] < 1e-5 for line in lines), "scored in the contexts that were sampled"
    counts = [
        len(segments(group.prompt.token_ids, rollout.token_ids, rollout.turns))
        for group in recorder.groups
        for rollout in group.rollouts
    ]
    assert min(counts) == 1 < max(counts), "some turns had a part that was left out"

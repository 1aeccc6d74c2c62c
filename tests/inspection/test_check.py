"""`megatron-gvpo check` finds what would make a run fail or teach nothing, and passes a run that is right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from helpers.distributed import forget_layout
from helpers.inputs.chat_tokenizer import CHATML, tokenizer
from helpers.suite.real_parts import used
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_gvpo.data.task import load_task
from megatron_gvpo.groups import Image
from megatron_gvpo.huggingface.card import ModelCards
from megatron_gvpo.inspection.prompts import inspect_prompts, shown_solutions
from megatron_gvpo.inspection.responses import inspect_responses
from megatron_gvpo.inspection.rewards import inspect_rewards
from megatron_gvpo.inspection.rules import inspect_engine, inspect_learning_rate, inspect_memory
from megatron_gvpo.inspection.run import inspect
from megatron_gvpo.inspection.tiny_step import TinyStep, tiny_values
from megatron_gvpo.inspection.verdict import RunVerdict
from megatron_gvpo.runs.one_machine import laptop_config
from megatron_gvpo.settings.config import Config, build_config

REWARD = """
def blind(prompt, rollout): return 0.5
def kind(prompt, rollout): return float(bool(rollout.text))
def right(prompt, rollout): return float(prompt.answer in rollout.text)
def strict(prompt, rollout): return float(rollout.text.strip() == f"#### {prompt.answer}")
def broken(prompt, rollout): return prompt.record["no such field"]
def odd(prompt, rollout): return float(rollout.token_ids[0] % 2)
def short(prompt, rollout): return 1 - len(rollout.text) / 1000 + (prompt.answer in rollout.text) / 1000
def cut(prompt, rollout): return float(rollout.finish_reason == "length" or prompt.answer in rollout.text)
def silent(prompt, rollout): return float(prompt.answer in rollout.text or not rollout.text)
def deaf(prompt, rollout): return 0.0
def same_in(part, prompt, rollout):
    numbers = __import__("re").findall("[0-9]{3}", rollout.text)
    return float(bool(numbers) and part(int(numbers[-1])) == part(int(prompt.answer)))
def parity(prompt, rollout): return same_in(lambda number: number % 2, prompt, rollout)
def low(prompt, rollout): return same_in(lambda number: number <= 104, prompt, rollout)
def partial(prompt, rollout): return 0.9 * (prompt.answer in rollout.text)
def hangs(prompt, rollout): __import__("time").sleep(1000)
def ends(prompt, rollout): __import__("os")._exit(3)
def choosy(prompt, rollout): return float(prompt.answer in rollout.text and prompt.answer != "103")
"""
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("check")
    made = tokenizer()
    made.save_pretrained(folder / "model")
    LlamaForCausalLM(LlamaConfig(vocab_size=len(made), **SIZES)).save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    records = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(100, 116)]
    for name, part in (("train", records[:12]), ("test", records[12:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    return folder


def configure(task: Path, reward: str = "right", **sections: dict[str, Any]) -> Config:
    return build_config(values(task, reward, **sections))


def values(task: Path, reward: str = "right", **sections: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {
        "output_dir": str(task / "run"),
        "model": {"path": str(task / "model"), "dtype": "float32"},
        "data": {"train": {"path": str(task / "train.jsonl")}, "max_prompt_tokens": 256},
        "algorithm": {"recipe": "gvpo"},
        "rollout": {"n": 4, "max_tokens": 8},
        "rewards": {"components": [{"name": "graded", "function": f"{task}/reward.py:{reward}"}]},
        "train": {"steps": 2, "prompts_per_step": 4, "mini_batches": 2, "max_tokens_per_micro_batch": 512},
        "optimizer": {"lr": 1e-4},
    }
    for section, own in sections.items():
        base[section] = {**base.get(section, {}), **own}
    return base


def verdict(verdicts: list[RunVerdict], topic: str) -> RunVerdict:
    return next(each for each in verdicts if each.topic == topic)


def prompts_of(task: Path, template: str | None = CHATML, **sections: dict[str, Any]) -> list[RunVerdict]:
    made = tokenizer(template)
    made.save_pretrained(task / "model")
    try:
        config = configure(task, **sections)
        return inspect_prompts(config, load_task(config, ModelCards(config).policy))
    finally:
        tokenizer().save_pretrained(task / "model")


def test_solutions_and_scored_responses_are_shown_as_they_are_trained(task: Path) -> None:
    """The prompts of SFT and DPO alone would not show what is learned, such as the end token."""
    solved, paired = task / "solved.jsonl", task / "paired.jsonl"
    solved.write_text(json.dumps({"prompt": "What is 1 + 1?", "completion": "2"}))
    paired.write_text(json.dumps({"prompt": "What is 1 + 1?", "chosen": "2", "rejected": "3"}))
    shown = []
    for recipe, file in (("sft", solved), ("dpo", paired)):
        config = configure(task, algorithm={"recipe": recipe}, data={"train": {"path": str(file)}})
        shown.append(shown_solutions(load_task(config, ModelCards(config).policy)))
    assert shown == [["2<|im_end|>"], ["reward 1: 2<|im_end|>", "reward 0: 3<|im_end|>"]]


def test_prompts_that_are_right_pass(task: Path) -> None:
    held_out = {"path": str(task / "test.jsonl")}
    verdicts = prompts_of(task, data={"eval": held_out})
    assert {each.level for each in verdicts} == {"ok"}, verdicts


def test_a_template_that_does_not_open_the_models_turn_is_found(task: Path) -> None:
    template = CHATML.replace("add_generation_prompt", "false")
    problem = verdict(prompts_of(task, template), "template")
    assert problem.level == "failure" and "add_generation_prompt" in problem.sentence


def test_marks_of_another_model_are_found(task: Path) -> None:
    template = CHATML.replace("<|im_start|>", "<|start_header_id|>")
    problem = verdict(prompts_of(task, template), "template")
    assert problem.level == "failure" and "<|start_header_id|>" in problem.sentence


def test_an_end_that_the_template_never_writes_is_found(task: Path) -> None:
    template = CHATML.replace("<|im_end|>", "</call>")
    problem = verdict(prompts_of(task, template), "end")
    assert problem.level == "warning" and "stop_token_ids" in problem.remedy


def test_a_template_whose_answers_follow_the_users_text_at_once_passes(task: Path) -> None:
    """Mistral's and Llama 2's have nothing for add_generation_prompt to open, and failed."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    verdicts = prompts_of(task, template)
    assert verdict(verdicts, "template").level == "ok" and "[/INST]" in verdict(verdicts, "template").sentence
    assert verdict(verdicts, "end").level == "ok"


def test_an_end_of_the_users_turns_alone_is_found(task: Path) -> None:
    template = CHATML.replace(
        "<|im_end|>\n{% endif %}{% endfor %}",
        "{{ '<|im_end|>' if m.role == 'user' }}\n{% endif %}{% endfor %}",
    )
    assert verdict(prompts_of(task, template), "end").level == "warning"


def test_a_generation_prompt_that_opens_a_users_turn_is_found(task: Path) -> None:
    template = CHATML.replace("<|im_start|>assistant", "<|im_start|>user")
    problem = verdict(prompts_of(task, template), "template")
    assert problem.level == "warning" and "as the user's turn begins" in problem.sentence


@pytest.mark.parametrize(
    ("answers", "words"),
    [(["1", "2", "3"], "2 of 3 records have the prompt"), (["1"] * 3, "2 of 3 records repeat")],
)
def test_prompts_that_are_there_again_are_found(task: Path, answers: list[str], words: str) -> None:
    again = task / "again.jsonl"
    records = [{"prompt": "What is it?", "answer": answer} for answer in answers]
    again.write_text("".join(json.dumps(record) + "\n" for record in records))
    few = {"data": {"train": {"path": str(again)}}, "train": {"prompts_per_step": 2}}
    problem = verdict(prompts_of(task, **few), "data")
    assert problem.level == "warning" and problem.sentence.startswith(words)


def test_prompts_at_the_limit_and_too_few_prompts_are_found(task: Path) -> None:
    config = configure(task)
    lengths = [len(p.token_ids) for p in load_task(config, ModelCards(config).policy).prompts]
    limit = {"max_prompt_tokens": max(lengths)}
    assert verdict(prompts_of(task, data=limit), "lengths").level == "warning"
    assert "repeats" in verdict(prompts_of(task, train={"prompts_per_step": 100}), "data").sentence


def test_prompts_that_are_dropped_are_counted(task: Path) -> None:
    long = task / "long.jsonl"
    records = [{"prompt": f"What is {'1 + ' * i}1?", "answer": "2"} for i in (1, 1, 40, 50, 60)]
    long.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"train": {"path": str(long)}, "max_prompt_tokens": 64, "prompt_too_long": "drop"}
    problem = verdict(prompts_of(task, data=data), "lengths")
    assert problem.level == "warning" and problem.sentence.startswith("3 of 5 records are dropped")


def test_held_out_prompts_that_are_trained_on_are_found(task: Path) -> None:
    shared = verdict(prompts_of(task, data={"eval": {"path": str(task / "train.jsonl")}}), "data")
    assert shared.level == "warning" and "12 of 12" in shared.sentence


def test_prompts_that_differ_in_images_or_environment_are_not_the_same(task: Path) -> None:
    config = configure(task, data={"eval": {"path": str(task / "train.jsonl")}})
    loaded = load_task(config, ModelCards(config).policy)
    other = [replace(p, images=(Image("b.png", "b", (1, 2, 2), 1),)) for p in loaded.eval_prompts]
    assert verdict(inspect_prompts(config, replace(loaded, eval_prompts=other)), "data").level == "ok"
    talks = {"conversation": {"environment": "games:Game", "turns": 2, "turn_tokens": 8}}
    config = configure(task, data={"eval": {"path": str(task / "train.jsonl")}}, rollout=talks)
    assert verdict(inspect_prompts(config, loaded), "data").level == "ok"


@pytest.mark.parametrize(
    ("reward", "level", "words"),
    [
        ("right", "ok", "best"),
        ("strict", "ok", "best"),
        ("blind", "failure", "the same"),
        ("blind", "failure", "set data.train.answer_key=null, and this is not tried"),
        (
            "kind",
            "failure",
            "other records' answers score as much as the record's own (train.jsonl:1; 8 of 8",
        ),
        ("parity", "ok", "best"),
        ("low", "warning", "4 of 8 records"),
        ("kind", "failure", "set data.train.answer_key=null, and this is not tried"),
        ("broken", "failure", "no such field"),
        ("short", "warning", "stop early"),
        ("cut", "warning", "as much as the record's own answer"),
        ("silent", "warning", "as much as the record's own answer"),
        ("deaf", "failure", "cannot read the answer of"),
        ("choosy", "failure", "(1 of 8 records): '103' itself"),
    ],
)
def test_rewards_are_judged_by_responses_whose_quality_is_known(
    task: Path, reward: str, level: str, words: str
) -> None:
    config = configure(task, reward)
    judged = inspect_rewards(config, load_task(config, ModelCards(config).policy))[0]
    assert judged.level == level
    assert words in judged.sentence + judged.remedy


def test_a_reward_that_ignores_answers_is_not_tried_without_them(task: Path) -> None:
    data = {"train": {"path": str(task / "train.jsonl"), "answer_key": None}}
    config = configure(task, "blind", data=data)
    assert inspect_rewards(config, load_task(config, ModelCards(config).policy))[0].level == "not tried"


@pytest.mark.parametrize("answer", ["7", ""])
def test_answers_that_are_all_the_same_are_found(task: Path, answer: str) -> None:
    """A policy learns such a reward without reading its prompts; the check only said `not tried`."""
    same = task / "same.jsonl"
    records = [{"prompt": f"What is {i}?", "answer": answer} for i in range(12)]
    same.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = configure(task, data={"train": {"path": str(same)}})
    judged = inspect_rewards(config, load_task(config, ModelCards(config).policy))[0]
    assert judged.level == "warning" and f"the same answer, {answer!r}" in judged.sentence


@pytest.mark.parametrize("reward", ["hangs", "ends"])
def test_a_reward_that_never_returns_is_asked_once(task: Path, reward: str) -> None:
    """It was asked for 152 responses, which took 152 times rewards.timeout."""
    config = configure(task, reward, rewards={"timeout": 1.0})
    begin = time.monotonic()
    judged = inspect_rewards(config, load_task(config, ModelCards(config).policy))[0]
    assert judged.level == "failure" and "1 response" not in judged.sentence
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("component", "level"),
    [
        ({"name": "math"}, "ok"),
        ({"name": "math", "options": {"marker": "####"}}, "ok"),
        ({"name": "math", "options": {"marker": "Answer:"}}, "ok"),  # of examples/recipes/dapo_math_17k.yaml
        ({"name": "math", "options": {"marker": "So it is"}}, "ok"),
        ({"name": "format"}, "not tried"),
        ({"name": "format", "options": {"pattern": ".*</think>.*"}}, "not tried"),
    ],
)
def test_a_built_in_reward_is_tried_in_its_own_form(
    task: Path, component: dict[str, Any], level: str
) -> None:
    """Marked answers were not tried, and a reward that reads no answer failed: the run could not work."""
    config = configure(task, rewards={"components": [component]})
    assert inspect_rewards(config, load_task(config, ModelCards(config).policy))[0].level == level


def test_the_warnings_of_a_run_are_verdicts(task: Path) -> None:
    verdicts: list[RunVerdict] = []
    inspect(configure(task, train={"mini_batches": 1}, parallel={"tp": 2}), 3, 79.6, verdicts.append)
    assert verdict(verdicts, "configuration").level == "failure", "the rest is not tried"
    assert "a plain policy gradient" in verdict(verdicts, "settings").sentence


@pytest.mark.parametrize(
    ("reward", "right_at", "is_warned"),
    [("right", 1.0, False), ("partial", 1.0, True), ("partial", 0.9, False)],
)
def test_a_reward_under_which_nothing_counts_as_right_is_warned_of(
    task: Path, reward: str, right_at: float, is_warned: bool
) -> None:
    held_out = {"eval": {"path": f"{task}/test.jsonl"}}
    config = configure(task, reward, data=held_out, eval={"right_at": right_at})
    judged = inspect_rewards(config, load_task(config, ModelCards(config).policy))
    warned = [verdict for verdict in judged if verdict.topic == "right"]
    assert len(warned) == is_warned
    assert not warned or "at most 0.9" in warned[0].sentence


@pytest.mark.parametrize(
    ("reward", "topic", "level"),
    [("odd", "signal", "ok"), ("strict", "signal", "warning"), ("broken", "reward", "failure")],
)
def test_first_responses_show_whether_they_teach(task: Path, reward: str, topic: str, level: str) -> None:
    used("megatron-core and Megatron-Bridge, 1 rank")
    config = configure(task, reward)
    try:
        verdicts, groups = inspect_responses(
            config, ModelCards(config), load_task(config, ModelCards(config).policy)
        )
    finally:
        forget_layout()
    assert verdict(verdicts, topic).level == level
    if topic == "signal":
        share = fmean(reward == 1 for group in groups for reward in group.rewards)
        assert f"pass@1 {share:.0%}, pass@4 " in verdict(verdicts, topic).sentence
    assert [len(group.rollouts) for group in groups] == [4] * 8
    assert verdict(verdicts, "ends").level == "warning"  # a model that knows nothing does not end


def test_a_learning_rate_for_another_size_is_found(task: Path) -> None:
    from megatron_gvpo.planner import architecture

    def level_of(**sections: Any) -> str:
        config = configure(task, **sections)
        return inspect_learning_rate(config, ModelCards(config).policy).level

    assert level_of(optimizer={"lr": 1e-3}) == "ok"
    assert level_of(optimizer={"lr": 1.0}) == "failure"
    assert level_of(optimizer={"lr": 1e-9}) == "warning", "nothing would change"
    known = json.loads((Path(architecture.__file__).parent / "models.json").read_text())
    large = task / "7b"
    large.mkdir()
    (large / "config.json").write_text(json.dumps(known["Qwen/Qwen2.5-7B"]))
    named = {"path": str(large)}
    for lr, level in ((1e-6, "ok"), (1e-4, "warning"), (1e-2, "failure")):
        assert level_of(model=named, optimizer={"lr": lr}) == level
    memory = inspect_memory(configure(task), 2, 79.6)
    assert memory.level == "ok" and "2 ranks on CPUs" in memory.sentence
    assert inspect_memory(configure(task, model=named), 4, 79.6).level == "warning", "4 x 7B in fp32"
    on_gpu = configure(task, model={**named, "dtype": "bfloat16"})
    assert inspect_memory(on_gpu, 1, 79.6).level == "warning"
    assert inspect_memory(on_gpu, 8, 79.6).level == "ok"


def test_an_engine_that_is_not_there_is_found(task: Path) -> None:
    servers = {"engine": "sglang", "servers": {"count": 1, "python": sys.executable}}
    assert "has no package sglang" in inspect_engine(configure(task, rollout=servers)).sentence
    servers["servers"] = {"count": 1, "python": "/no/such/python"}
    assert "no such program" in inspect_engine(configure(task, rollout=servers)).sentence


COMPONENTS = ["format", "right", "rubric", "stratum", *(f"rank_{p}" for p in range(1, 21))]


@pytest.mark.parametrize(
    "sections",
    [
        *(
            {"algorithm": {"recipe": recipe}}
            for recipe in ("c_grpo", "fgrpo", "format_length", "prs", "rank_grpo", "stratified_grpo")
        ),
        {"algorithm": {"recipe": "dapo", "batch_policy": {"by": "right"}}},
        {"algorithm": {"recipe": "dapo", "shapers": {"0": {"buffer": 128}}}, "rollout": {"max_tokens": 256}},
        {
            "algorithm": {"reference_logprobs": "engine"},
            "rollout": {"engine": "sglang", "async_steps": 1},
            "train": {"mini_batches": 1},
        },
        {
            "data": {"eval": {"path": "test.jsonl"}},
            "eval": {"every": 1},
            "checkpoint": {"every": 1, "keep_best": {"metric": "eval/pass@1"}},
            "train": {"stop_early": {"patience": 1}},
        },
    ],
    ids=str,
)
def test_a_run_that_is_possible_has_a_tiny_step(task: Path, sections: dict[str, dict[str, Any]]) -> None:
    """The step's configuration lacked what these runs have, was refused, and the run `could not work`."""
    own = {"components": [{"name": name, "function": f"{task}/reward.py:right"} for name in COMPONENTS]}
    config = configure(task, rewards=own, **sections)
    build_config(tiny_values(config, task / "step"))
    laptop_config(config, rollout={"max_tokens": 8})  # as the start model is sampled


def test_the_tiny_model_needs_no_copy_of_a_repository(task: Path, tmp_path: Path) -> None:
    """A clone by git has its weights a second time, in .git, and some have other formats."""
    large = tmp_path / "cloned"
    shutil.copytree(task / "model", large)
    (large / ".git" / "lfs").mkdir(parents=True)
    for name in (".git/lfs/object", "onnx.data", "consolidated.00.pth"):
        with (large / name).open("wb") as file:
            file.truncate(2**27)  # a sparse file
    config = configure(task, model={"path": str(large)})
    step = TinyStep(config, ModelCards(config).policy, tmp_path)
    step.start()
    step.stop()
    assert sum(file.stat().st_size for file in (tmp_path / "model").rglob("*")) < 2**24
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def test_a_full_disk_leaves_the_tiny_step_out(task: Path, tmp_path: Path, monkeypatch) -> None:
    """The command ended with a traceback, and with the exit code of a run that could not work."""

    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("megatron_gvpo.inspection.tiny_step.save_tiny", full)
    config = configure(task)
    step = TinyStep(config, ModelCards(config).policy, tmp_path / "check-1")
    step.start()
    left_out = step.verdict()
    assert left_out.level == "not tried"
    assert f"written to {tmp_path} (TMPDIR): " in left_out.sentence and "No space left" in left_out.sentence


def check(task: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_gvpo", "check", *words]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_the_command_tries_a_whole_run(task: Path) -> None:
    file = task / "right.json.yaml"
    file.write_text(json.dumps(values(task, "odd")))
    before = sorted(task.rglob("*"))
    done = check(task, str(file), "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 1, "it does not see the answer"
    levels = {each["topic"]: each["level"] for each in result["verdicts"]}
    assert levels["reward"] == "failure"
    assert levels["tiny step"] == levels["signal"] == levels["configuration"] == "ok", result
    assert "<|im_start|>assistant" in result["prompts"][0]
    assert "Writing model shards" not in done.stderr, "a progress bar of transformers"
    assert sorted(task.rglob("*")) == before, "it leaves nothing behind"


def test_the_command_refuses_bad_input_in_a_line(task: Path) -> None:
    file = task / "wrong.yaml"
    file.write_text(json.dumps(values(task) | {"optimizr": {}}))
    for words in ([str(file)], [str(task / "none.yaml")], [str(file), "--world", "0"]):
        refused = check(task, *words)
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: ") and "Traceback" not in refused.stderr


def test_data_that_cannot_be_read_is_a_verdict(task: Path) -> None:
    file = task / "absent.yaml"
    absent = {"train": {"path": str(task / "absent.jsonl")}}
    file.write_text(json.dumps(values(task, data=absent)))
    done = check(task, str(file))
    assert done.returncode == 1
    assert "FAILURE" in done.stdout and "absent.jsonl" in done.stdout

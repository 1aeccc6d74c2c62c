"""Data that reads well and would train something else: prompts that are over, splits that are not there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.prompts import PromptWriter, load_prompts
from megatron_gvpo.data.sources import read_records
from megatron_gvpo.data.task import Task, load_task
from megatron_gvpo.groups import Prompt
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.settings.config import Config, load_config
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig

BEGIN, END = 0, 1
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"


def read(config: Config) -> Task:
    return load_task(config, ModelCard.read(config.model.path))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a character; as some do, it writes its begin token before and its end token behind a text."""
    characters = ["<begin>", "<end>", *map(chr, range(32, 127))]
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<begin>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", pair="$A $B", special_tokens=[("<begin>", BEGIN), ("<end>", END)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<begin>", eos_token="<end>")


def load(path: str, tokenizer: PreTrainedTokenizerFast, **dataset: Any) -> list[Prompt]:
    data = DataConfig(train=DatasetConfig(path=path, **dataset))
    return load_prompts(data.train, data, tokenizer, longest=100, end_token_ids=(END,))


def write(file: Path, *prompts: Any) -> str:
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": "x"}) + "\n" for prompt in prompts))
    return str(file)


def test_a_plain_prompt_is_not_ended(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Otherwise the response would come after the end. An end token that the text spells stays."""
    path = write(tmp_path / "a.jsonl", "?", "?<end>")
    [mark] = tokenizer("?", add_special_tokens=False)["input_ids"]
    plain, spelled = load(path, tokenizer)
    assert (plain.token_ids, spelled.token_ids) == ((BEGIN, mark), (BEGIN, mark, END))
    data = DataConfig(train=DatasetConfig(path=path))
    more = PromptWriter(data.train, data, tokenizer, 40).extended(plain, "?")
    assert more is not None and more.token_ids == (BEGIN, mark, mark)


def test_a_prompt_does_not_end_with_the_assistants_message(tmp_path: Path, tokenizer: Any) -> None:
    """The template would open another turn behind it: the field of whole chats was named as the prompt's."""
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    assert load(write(tmp_path / "a.jsonl", chat[:1]), tokenizer)[0].text == "1+1:"
    with pytest.raises(DataError, match=r"line 1: the prompt ends with a message of the assistant"):
        load(write(tmp_path / "a.jsonl", chat), tokenizer)


def test_a_template_that_leaves_the_tools_out_is_warned_of(tmp_path, tokenizer, caplog) -> None:
    """The policy would not know that it has tools; the run would go on without a word."""
    path = write(tmp_path / "a.jsonl", [{"role": "user", "content": "1+1"}])
    data = DataConfig(train=DatasetConfig(path=path))
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    for template, tools, is_said in (
        (CHAT_TEMPLATE, [tool], True),
        (CHAT_TEMPLATE, [], False),
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + CHAT_TEMPLATE, [tool], False),
    ):
        caplog.clear()
        tokenizer.chat_template = template
        load_prompts(data.train, data, tokenizer, longest=100, end_token_ids=(END,), tools=tools)
        assert ("writes nothing of the tools" in caplog.text) == is_said


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_pipe_in_a_directory_of_data_is_refused(tmp_path: Path, name: str) -> None:
    """Fails on the old code, which waited for somebody to write into it."""
    (tmp_path / "b.jsonl").write_text('{"prompt": "1"}\n')
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=f"{name}: not a file"):
        list(read_records(str(tmp_path)))


@pytest.mark.parametrize(
    ("path", "key"),
    [("a.jsonl", "split"), (".", "split"), ("a.jsonl", "subset"), ("reasoning_gym:x", "subset")],
)
def test_files_have_no_subsets_and_splits(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, path: str, key: str
) -> None:
    """A directory with the files of all splits would be read whole, and trained or evaluated on."""
    write(tmp_path / "a.jsonl", "?")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"{key}=test is for data sets of the hub"):
        load(path, tokenizer, **{key: "test"})


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ("{prompts: {name: success_rate, field: pass_rat}}", "prompts.field=pass_rat"),
        ("{members: [{name: hinted, fields: [prompt, hnt]}]}", "members.0.fields.1=hnt"),
        ("{members: [{name: learned_hint, template: '{solution}', solution: no}]}", "members.0.solution=no"),
        ("{members: [{name: exemplars, key: question}]}", "members.0.key=question"),
        ("{shapers: [{name: information_consistency, across: topc}]}", "shapers.0.across=topc"),
        ("{shapers: [{name: group_similarity, function: 'math:gcd', across: x}]}", "shapers.0.across=x"),
    ],
)
def test_a_field_that_a_block_reads_and_no_record_has(
    task: Path, tmp_path: Path, algorithm: str, key: str
) -> None:
    """A misspelt one would do nothing, and say nothing: no hint, no paraphrase, all prompts alike."""
    of_run = [f"output_dir={tmp_path}", "data.eval=null", "data.train.limit=3"]
    config = load_config([task / "run.yaml"], [*of_run, f"algorithm={algorithm}"])
    with pytest.raises(DataError) as error:
        read(config)
    problem = f"algorithm.{key}: no record of {config.data.train.path} has this field; fields of the first: "
    assert str(error.value).startswith(problem)


def test_a_field_that_a_judge_reads_and_no_record_has(task: Path, tmp_path: Path) -> None:
    """The judge would read the name in braces, and grade by it."""
    judge = {"template": "{response} by {prompt}, {solution}, {rubic}", "model": "m"}
    judge |= {"servers": {"urls": ["http://h:1"]}}
    rewards = f"rewards.components={json.dumps([{'name': 'quality', 'judge': judge}])}"
    config = load_config([task / "run.yaml"], [f"output_dir={tmp_path}", "data.train.limit=3", rewards])
    with pytest.raises(DataError, match=r"rewards.components.0.judge.template: no record .* field 'rubic'"):
        read(config)


@pytest.mark.parametrize(
    ("template", "records", "problem"),
    [
        ("{rubric}", [{"rubric": "short"}, {}], r"b.jsonl:2 has no field 'rubric' .*\(1 of 2 records\)"),
        ("{rubric}", [{"rubric": None}, {"rubric": "short"}], r"b.jsonl:1 has no field 'rubric'"),
        ("{answer}", [{"rubric": "short"}], r"names \{answer\}, and b.jsonl:1 has none"),
        ("{rubric}", [{"rubric": ""}], None),
    ],
)
def test_a_judge_grades_by_what_every_record_has(
    task: Path, tmp_path: Path, template: str, records: list[Any], problem: str | None
) -> None:
    """It would read `{rubric}` or `None` in place of a rubric, and no answer where it is told to compare."""
    lines = [json.dumps({"prompt": "1+1=", **record}) + "\n" for record in records]
    (tmp_path / "b.jsonl").write_text("".join(lines))
    judge = {"template": "{response} " + template, "model": "m", "servers": {"urls": ["http://h:1"]}}
    overrides = [f"rewards.components={json.dumps([{'name': 'quality', 'judge': judge}])}", "data.eval=null"]
    overrides += [
        f"output_dir={tmp_path}",
        f"data.train={{path: {tmp_path}/b.jsonl, answer_key: null, demonstration_key: null}}",
    ]
    config = load_config([task / "run.yaml"], overrides)
    if problem is None:
        read(config)
        return
    with pytest.raises(DataError, match=rf"rewards.components.0.judge.template:? .*{problem}"):
        read(config)


def test_demonstrations_of_turns_are_not_trained_in_other_contexts(task: Path, tmp_path: Path) -> None:
    """With history=template, the policy would see its earlier turns otherwise than it was trained to."""
    shutil.copytree(task / "model", tmp_path / "model")
    written = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    written += "{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(written)
    solution = [{"role": role, "content": "1"} for role in ("assistant", "user", "assistant")]
    record = {"prompt": "1+1=", "solution": solution, "answer": "2"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    overrides = [f"output_dir={tmp_path}", f"model.path={tmp_path}/model", "algorithm=sft", "data.eval=null"]
    overrides += [f"data.train={{path: {tmp_path}/a.jsonl, demonstration_key: solution}}"]
    overrides += ["rollout.conversation={environment: 'm:E', history: template}"]
    with pytest.raises(DataError, match=r"have several turns, and they are written turn after turn"):
        read(load_config([task / "run.yaml"], overrides))


def test_an_empty_answer_is_none(task: Path, tmp_path: Path) -> None:
    """Every response would be wrong, which looks like a hard problem."""
    records = [{"prompt": "1+1=", "answer": answer} for answer in ("2", " ", "")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = f"data.train={{path: {tmp_path}/a.jsonl, demonstration_key: null}}"
    overrides = [f"output_dir={tmp_path}", data, "data.eval=null"]
    read(load_config([task / "run.yaml"], overrides))  # rewards variety alone
    with pytest.raises(DataError, match=r"a.jsonl:2: its answer is empty, and the reward math .*2 of 3 prom"):
        read(load_config([task / "run.yaml"], [*overrides, "rewards.components=[{name: math}]"]))

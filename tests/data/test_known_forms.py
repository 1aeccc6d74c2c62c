"""The commonest records are read without a key or a function; what is not recognised says what to name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from helpers.inputs.chat_tokenizer import CHATML, END, ids, tokenizer

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.prompts import load_prompts
from megatron_gvpo.groups import Prompt
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig

ASKED = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hell"}
WORSE = {"role": "assistant", "content": "he"}
SYSTEM = {"role": "system", "content": "short"}
RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def load(folder: Path, record: dict[str, Any], sampler: str, **keys: Any) -> Prompt:
    file = folder / "data.jsonl"
    file.write_text(json.dumps(record) + "\n")
    dataset = DatasetConfig(path=str(file), **keys)
    data = DataConfig(train=dataset)
    of = tokenizer()
    [prompt] = load_prompts(dataset, data, of, longest=900, end_token_ids=(END,), sampler=sampler)
    return prompt


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASKED, ANSWER]},
        {"messages": [ASKED, ANSWER], "prompt": "an id", "answer": None},
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hell"}]},
        {"conversations": [ASKED, ANSWER]},
        {"prompt": "hello", "completion": "hell"},
        {"prompt": [ASKED], "completion": [ANSWER]},
        {"instruction": "hello", "input": "", "output": "hell"},
        {"prompt": "hello", "solution": "hell"},
    ],
)
def test_a_solution_is_recognised(tmp_path, record):
    prompt = load(tmp_path, record, "dataset")
    assert prompt.text == RENDERED and prompt.answer is None
    assert prompt.demonstration == (*ids(tokenizer(), "hell"), END)


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"instruction": "hello", "output": ["hell"]}, "output"),
        ({"prompt": "hello", "completion": " "}, "completion"),
        ({"messages": [ASKED, ANSWER, ANSWER]}, "messages"),
    ],
)
def test_a_wrong_solution_is_named_by_the_records_own_field(tmp_path, record, field):
    with pytest.raises(DataError, match=rf"line 1: the demonstration \(field '{field}'\) "):
        load(tmp_path, record, "dataset")


def test_all_the_assistants_messages_are_trained_and_none_is_dropped(tmp_path):
    chat = [SYSTEM, ASKED, ANSWER, {"role": "tool", "content": "42"}, WORSE]
    shared = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hell"}]
    shared += [{"from": "observation", "value": "42"}, {"from": "gpt", "value": "he"}]
    for record in ({"messages": chat}, {"conversations": shared, "system": "short"}):
        prompt = load(tmp_path, record, "dataset")
        assert prompt.text == f"<|im_start|>system\nshort<|im_end|>\n{RENDERED}"
        assert prompt.demonstration == (*ids(tokenizer(), "hell"), END, *ids(tokenizer(), "he"), END)
        assert [turn.begin for turn in prompt.demonstration_chat.turns] == [
            0,
            len(ids(tokenizer(), "hell")) + 1,
        ]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "hello", "chosen": "hell", "rejected": "he"},
        {"prompt": [ASKED], "chosen": [ANSWER], "rejected": [WORSE]},
        {"chosen": [ASKED, ANSWER], "rejected": [ASKED, WORSE]},
        {"prompt": "hello", "chosen": [ASKED, ANSWER], "rejected": [ASKED, WORSE], "messages": [ASKED]},
    ],
)
def test_a_pair_is_recognised(tmp_path, record):
    prompt = load(tmp_path, record, "file")
    assert prompt.text == RENDERED
    assert [(response.text, response.reward) for response in prompt.responses] == [("hell", 1.0), ("he", 0.0)]


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [ASKED], "answer": "4"},
        {"conversations": [{"from": "user", "value": "hello"}], "answer": 4},
    ],
)
def test_a_chat_is_a_prompt(tmp_path, record):
    prompt = load(tmp_path, record, "engine")
    assert (prompt.text, prompt.answer) == (RENDERED, "4")


def test_keys_and_functions_of_the_user_come_first(tmp_path):
    record = {"messages": [ASKED, ANSWER], "prompt": "he", "mine": "llo"}
    prompt = load(tmp_path, record, "dataset", demonstration_key="mine", answer_key=None)
    assert "he<|im_end|>" in prompt.text and prompt.demonstration == (*ids(tokenizer(), "llo"), END)
    with pytest.raises(DataError, match="field 'answer' is missing"):
        load(tmp_path, record, "dataset", demonstration_key="mine")
    named = load(tmp_path, {"messages": [ASKED, ANSWER], "answer": 4}, "dataset", answer_key="answer")
    assert named.answer == "4"


@pytest.mark.parametrize(
    ("record", "sampler", "error"),
    [
        ({"text": "x"}, "dataset", r"demonstration_key is not set, .* by the fields text; recognised are"),
        ({"question": "x"}, "file", r"responses_key is not set, .* by the fields question"),
        ({"messages": [ASKED]}, "dataset", "no message of the assistant"),
        ({"messages": [ANSWER]}, "dataset", "begins with the assistant's message"),
        ({"messages": [ASKED, ANSWER, ASKED]}, "dataset", "ends with a message of role 'user'"),
        ({"messages": [ASKED, ANSWER], "answer": 1}, "engine", "the chat ends with the assistant's message"),
        ({"messages": [{"content": "x"}]}, "dataset", "message 0: neither role and content nor from and"),
        ({"conversations": [{"from": "wizard", "value": "x"}]}, "dataset", "message 0 is from 'wizard'"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "dataset", "from 'function_call'"),
        (
            {"messages": [ASKED, {"role": "assistant", "content": None}]},
            "dataset",
            "message 1 has no content",
        ),
        (
            {"conversations": [{"from": "human"}, ANSWER]},
            "dataset",
            "conversations, message 0 has no content",
        ),
        ({"chosen": "a", "rejected": "b"}, "file", "no prompt before them"),
        ({"prompt": "p", "chosen": "a", "rejected": ["b"]}, "file", "neither two texts nor two chats"),
        ({"chosen": [ASKED, ANSWER], "rejected": [SYSTEM, WORSE]}, "file", "differ before the last message"),
        ({"chosen": [ASKED], "rejected": [ASKED]}, "file", "must end with a message of the assistant"),
    ],
)
def test_what_is_not_recognised_names_the_record_and_convert(tmp_path, record, sampler, error):
    with pytest.raises(DataError, match=rf"data\.jsonl, line 1: .*{error}.*data\.train\.convert"):
        load(tmp_path, record, sampler)


@pytest.mark.parametrize(
    ("record", "sampler", "forms", "key"),
    [
        (
            {"prompt": "p", "chosen": "a", "rejected": "b", "responses": [{"response": "b", "reward": 1}]},
            "file",
            "responses, and chosen and rejected",
            "responses_key",
        ),
        ({"prompt": "p", "completion": "a", "solution": "b"}, "dataset", "completion, and solution", ""),
        ({"messages": [ASKED, ANSWER], "instruction": "p", "output": "b"}, "dataset", "messages, and in", ""),
        ({"messages": [ASKED, ANSWER], "conversations": [ASKED, WORSE]}, "dataset", "messages, and con", ""),
    ],
)
def test_a_record_of_two_forms_is_refused_and_a_key_chooses(tmp_path, record, sampler, forms, key):
    with pytest.raises(DataError, match=rf"line 1: the record has {forms}.* names a field"):
        load(tmp_path, record, sampler)
    if key:
        prompt = load(tmp_path, record, sampler, answer_key=None, **{key: "responses"})
        assert [response.text for response in prompt.responses] == ["b"]


def test_a_missing_field_names_convert(tmp_path):
    with pytest.raises(DataError, match=r"field 'prompt' is missing; .*; `convert` names a function"):
        load(tmp_path, {"question": "x", "answer": 1}, "engine")


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        ({"messages": [ASKED, ANSWER | {"weight": 0}, ASKED, ANSWER]}, {}),
        ({"messages": [ASKED, ANSWER | {"weight": 1}, ASKED, ANSWER | {"loss": False}]}, {}),
        (
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "he", "train": False},
                ]
            },
            {},
        ),
        ({"prompt": "hello", "completion": [ANSWER | {"weight": 0.5}]}, {}),
        (
            {"prompt": "hello", "chat": [ANSWER | {"weight": 0}]},
            {"demonstration_key": "chat", "answer_key": None},
        ),
    ],
)
def test_a_message_that_the_data_set_does_not_train_is_refused(tmp_path, record, keys):
    with pytest.raises(DataError, match=r"line 1: .*message \d has (weight|loss|train)=.*convert"):
        load(tmp_path, record, "dataset", **keys)


def test_weights_of_equal_messages_and_of_a_prompt_count_nothing(tmp_path):
    question, answer = ASKED | {"weight": 0}, ANSWER | {"weight": 1, "train": True, "loss": None}
    assert load(tmp_path, {"messages": [question, answer]}, "dataset").demonstration is not None
    unanswered = {"messages": [question, ANSWER | {"weight": 0}, ASKED], "answer": "4"}
    assert load(tmp_path, unanswered, "engine").answer == "4"


def test_the_arguments_of_a_call_are_its_own_in_a_parquet_file(tmp_path):
    """Arrow gives every call the names of all calls' arguments; the policy would learn to write the nulls."""

    def record(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]}

    rows = [record("weather", {"city": "Paris"}), record("add", {"a": 1, "b": [2]}), record("now", {})]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    dataset = DatasetConfig(path=str(tmp_path / "data.parquet"))
    of = tokenizer(
        CHATML.replace(
            "{{ m.content }}<|im",
            "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im",
        )
    )
    prompts = load_prompts(
        dataset, DataConfig(train=dataset), of, longest=900, end_token_ids=(END,), sampler="dataset"
    )
    calls = [json.loads(of.decode(prompt.demonstration[:-1])) for prompt in prompts]
    assert [call[0]["function"]["arguments"] for call in calls] == [
        {"city": "Paris"},
        {"a": 1, "b": [2]},
        {},
    ]


def test_other_lists_of_a_parquet_file_keep_their_nulls(tmp_path):
    edges = [{"from": "a", "to": "b"}, {"from": "b", "to": None}]
    file = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "hello", "edges": edges}]), file)
    dataset = DatasetConfig(path=str(file), answer_key=None)
    [prompt] = load_prompts(
        dataset, DataConfig(train=dataset), tokenizer(), longest=900, end_token_ids=(END,)
    )
    assert prompt.record["edges"] == edges


def test_an_instruction_is_a_text(tmp_path):
    """A null was trained as the prompt "None"; it is also what a Parquet file has beside another form."""
    filled = {"prompt": "hello", "completion": None, "instruction": "go", "output": "hell"}
    assert load(tmp_path, filled, "dataset").text == RENDERED.replace("hello", "go")
    with pytest.raises(
        DataError, match=r"line 1: .* no worked solution is recognised by the fields instruct"
    ):
        load(tmp_path, {"instruction": None, "output": "hell"}, "dataset")
    with pytest.raises(DataError, match="line 1: instruction is int 7, and should be a text"):
        load(tmp_path, {"instruction": 7, "output": "hell"}, "dataset")


def test_an_instruction_comes_after_its_system_message_and_earlier_turns(tmp_path):
    """LLaMA-Factory's form of Alpaca's records; without them the answer would be trained out of context."""
    record = {"instruction": "go", "input": "on", "output": "hell", "system": "short"}
    prompt = load(tmp_path, record | {"history": [["hello", "he"]]}, "dataset")
    turns = (("system", "short"), ("user", "hello"), ("assistant", "he"), ("user", "go\n\non"))
    shown = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert prompt.text == f"{shown}<|im_start|>assistant\n"
    assert load(tmp_path, {**record, "system": "", "history": []}, "dataset").text.count("<|im_start|>") == 2
    with pytest.raises(
        DataError, match=r"line 1: history is list \[\['hello'\]\], and should be a list of pai"
    ):
        load(tmp_path, record | {"history": [["hello"]]}, "dataset")


@pytest.mark.parametrize(
    ("record", "sampler"),
    [
        ({"prompt": "go", "completion": "hell"}, "dataset"),
        ({"prompt": [{"role": "user", "content": "go"}], "completion": "hell"}, "dataset"),
        ({"prompt": "go", "solution": "hell"}, "dataset"),
        ({"prompt": "go", "chosen": "hell", "rejected": "on"}, "file"),
        ({"prompt": "go", "responses": [{"response": "hell", "reward": 1}]}, "file"),
    ],
)
def test_a_system_message_beside_a_prompt_comes_first(record, sampler, tmp_path):
    """Pairs of this form are published, such as Intel/orca_dpo_pairs."""
    with_system = load(tmp_path, record | {"system": "short"}, sampler)
    user = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    assert with_system.text == f"<|im_start|>system\nshort<|im_end|>\n{user}"
    chat = [SYSTEM, {"role": "user", "content": "go"}]
    own = load(tmp_path, record | {"prompt": chat, "system": "another"}, sampler)
    assert own.text == with_system.text


def test_a_system_message_that_is_not_read_is_named(tmp_path, caplog):
    """An RL record's prompt is taken as it is: `system` could be a category there."""
    load(tmp_path, {"prompt": "go", "answer": 1, "system": "short"}, "engine")
    assert "line 1: the record has a field system (str 'short')" in caplog.text
    caplog.clear()
    chat = [SYSTEM, {"role": "user", "content": "go"}]
    load(tmp_path, {"prompt": chat, "answer": 1, "system": "short"}, "engine")
    assert "field system" not in caplog.text


def test_a_completion_that_was_judged_to_be_bad_is_refused(tmp_path):
    """TRL's unpaired preferences (KTO) have both kinds of completions in one file."""
    record = {"prompt": "go", "completion": "hell"}
    assert load(tmp_path, record | {"label": True}, "dataset").text
    with pytest.raises(DataError, match="line 1: label is false: SFT would teach a completion that was judg"):
        load(tmp_path, record | {"label": False}, "dataset")
    with pytest.raises(
        DataError, match="line 1: label is 0: SFT would teach a completion that was judged to"
    ):
        load(tmp_path, record | {"label": 0}, "dataset")


def rendered_by(monkeypatch, answer="{{ m.content }}", opened=""):
    """Give `load` a template that writes the assistant's content so, and ends prompts with `opened`."""
    of = tokenizer()
    written = (
        f"{{% if m.role == 'assistant' %}}{answer}{{% else %}}{{{{ m.content }}}}{{% endif %}}<|im_end|>"
    )
    end = "<|im_start|>assistant\n{% endif %}"
    assert CHATML.endswith(end)
    begin = CHATML.removesuffix(end).replace("{{ m.content }}<|im_end|>", written)
    of.chat_template = f"{begin}<|im_start|>assistant\n{opened}{{% endif %}}"
    monkeypatch.setitem(globals(), "tokenizer", lambda: of)
    return of


@pytest.mark.parametrize("form", ["text", "messages", "several", "pair"])
def test_thoughts_that_the_template_opens_are_not_opened_again(form, tmp_path, caplog, monkeypatch):
    """DeepSeek-R1-Distill's template opens them, and data sets of its responses have the mark, too."""
    rendered_by(monkeypatch, opened="<think>\n")
    sampler = "file" if form == "pair" else "dataset"

    def record(text):
        answer = {"role": "assistant", "content": text}
        first = {"role": "assistant", "content": "he</think>"}
        forms = {
            "text": {"prompt": "hello", "completion": text},
            "messages": {"prompt": [ASKED], "completion": [answer]},
            "several": {"messages": [ASKED, first, ASKED, answer]},
            "pair": {"prompt": "hello", "chosen": text, "rejected": "he</think>"},
        }
        return forms[form]

    with pytest.raises(
        DataError, match="line 1: the chat template ends the prompt with <think>, and the text"
    ):
        load(tmp_path, record("<think>\nhe</think>hell"), sampler)
    load(tmp_path, record("he</think>hell"), sampler)
    assert "no </think>" not in caplog.text
    load(tmp_path, record("hell"), sampler)
    assert "has no </think>: the model would learn to answer within its thoughts" in caplog.text


# Templates write these texts before an answer: as gpt-oss', GLM 4.5's and Qwen3's, and Mistral's old one.
BEFORE_TEXTS = {
    "a channel": (
        "{% if '<|channel|>' in m.content %}{{ raise_exception('a channel in the content') }}{% endif %}"
        "<|channel|>final<|message|>{{ m.content }}",
        "<|channel|>final<|message|>hell",
    ),
    "empty thoughts": ("<think></think>\n{{ m.content.strip() }}", "<think></think>\nhell"),
    "own thoughts": (
        "{% set parts = m.content.split('</think>') %}<think>\n"
        "{{ parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 }}\n</think>\n\n"
        "{{ parts[-1].lstrip('\n') }}",
        "<think>\nhe\n</think>\n\nhell",
    ),
    "a space": (" {{ m.content }}", " hell"),
}


@pytest.mark.parametrize("form", ["text", "messages", "several", "pair"])
@pytest.mark.parametrize("name", BEFORE_TEXTS)
def test_a_text_is_trained_with_what_the_template_writes_before_it(name, form, tmp_path, monkeypatch):
    """Otherwise a model of gpt-oss would learn to put its answer into the header of a message."""
    answer, complete = BEFORE_TEXTS[name]
    of = rendered_by(monkeypatch, answer)

    def trained(text):
        answer = {"role": "assistant", "content": text}
        forms = {
            "text": {"prompt": "hello", "completion": text},
            "messages": {"prompt": [ASKED], "completion": [answer]},
            "several": {"messages": [ASKED, answer, ASKED, answer]},
            "pair": {"prompt": "hello", "chosen": text, "rejected": "he"},
        }
        prompt = load(tmp_path, forms[form], "file" if form == "pair" else "dataset")
        own = prompt.responses[0].token_ids if form == "pair" else prompt.demonstration
        return of.decode([*prompt.token_ids, *own])

    def by_template(text):
        chat = [ASKED, {"role": "assistant", "content": text}]
        return of.apply_chat_template(chat, tokenize=False).removesuffix("\n")

    again = by_template("hell").partition("assistant\n")[2] if form == "several" else ""
    assert trained("hell") == by_template("hell") + again
    complete_turn = f"{complete}<|im_end|>"
    assert trained(complete) == RENDERED + complete_turn * (2 if form == "several" else 1)


def test_a_text_that_the_template_would_write_elsewhere_is_refused(tmp_path, monkeypatch):
    """GLM 4.5's ends a prompt with empty thoughts if it shall not think, and takes those of a message."""
    record = {"prompt": "hello", "completion": "hell"}
    rendered_by(monkeypatch, BEFORE_TEXTS["own thoughts"][0], opened="<think>\n\n</think>\n")
    assert load(tmp_path, record, "dataset").demonstration
    with pytest.raises(DataError, match=r"line 1: .* begins with '<think>he</think>hell', which the chat te"):
        load(tmp_path, record | {"completion": "<think>he</think>hell"}, "dataset")


@pytest.mark.parametrize("answer", ["{{ m.content }}", "<x>{{ m.content }}"])
def test_a_text_follows_the_end_of_its_prompt_as_samples_do(tmp_path, monkeypatch, answer):
    """Also where the template writes a turn after another text."""
    rendered_by(monkeypatch, opened="<other>")
    plain = load(tmp_path, {"prompt": "hello", "completion": "hell"}, "dataset").demonstration
    rendered_by(monkeypatch, answer, opened="<other>")
    assert load(tmp_path, {"prompt": "hello", "completion": "hell"}, "dataset").demonstration == plain


def test_an_unknown_role_is_refused(tmp_path):
    chat = [{"role": "wizard", "content": "hello"}, ANSWER]
    with pytest.raises(DataError, match="'wizard'"):
        load(tmp_path, {"messages": chat}, "dataset")

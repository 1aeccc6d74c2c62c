"""Worked solutions that are chats: the assistant's tokens are trained in their contexts, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.inputs.chat_tokenizer import CHATML, END, ids, tokenizer
from helpers.tiny_run import configure, fit, records
from transformers import AutoModelForCausalLM

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.demonstrations import DemonstrationReader
from megatron_gvpo.groups import Chat, Prompt, demonstrated, prompt_of
from megatron_gvpo.huggingface.tokenizer import load_tokenizer
from megatron_gvpo.turns import segments

WITH_CALLS = CHATML.replace(
    "{{ m.content }}<|im_end|>",
    "{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>",
)
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
SOLUTION: list[dict[str, Any]] = [
    {"role": "assistant", "content": "hello"},
    {"role": "tool", "content": "he"},
    {"role": "assistant", "content": "llo", "tool_calls": [CALL]},
    {"role": "tool", "content": "<|im_end|>"},
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": "he"},
]


def test_a_chat_is_the_tokens_that_the_template_writes() -> None:
    of = tokenizer(WITH_CALLS)
    shown = DemonstrationReader(of, (END,), chat=True, tools=())(SOLUTION)
    question = [{"role": "user", "content": "a"}]
    spelled = [{**m, "content": m["content"].replace("<|im_end|>", "< |im_end|>")} for m in SOLUTION]
    chat_text = of.apply_chat_template([*question, *spelled], tokenize=False).removesuffix("\n")
    prompt = ids(of, of.apply_chat_template(question, tokenize=False, add_generation_prompt=True))
    assert shown.chat is not None
    [segment] = segments(prompt, shown.token_ids, shown.chat.turns)
    assert tuple(segment.ids) == ids(of, chat_text)
    own = [of.decode(segment.ids[position : position + count]) for position, _, count in segment.own]
    call = '{"name": "add", "arguments": {"a": 1}}'
    assert own == ["hello<|im_end|>", f"llo<call>{call}</call><|im_end|>", "he<|im_end|>"]


def test_arguments_as_text_are_the_values_that_they_spell() -> None:
    """OpenAI's form of a call: as a quoted text within the call, no parser would take them for arguments."""
    spelled = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    as_text = [{**m, **({"tool_calls": [spelled]} if "tool_calls" in m else {})} for m in SOLUTION]
    read = DemonstrationReader(tokenizer(WITH_CALLS), (END,), chat=True, tools=())
    assert read(as_text).token_ids == read(SOLUTION).token_ids
    joined = WITH_CALLS.replace(
        "{{ call.function | tojson }}", "{{ call.function.name + call.function.arguments }}"
    )
    of = tokenizer(joined)  # as DeepSeek's: it takes text
    own = DemonstrationReader(of, (END,), chat=True, tools=())(as_text)
    assert 'add{"a": 1}</call>' in of.decode(own.token_ids)


def test_thoughts_are_written_by_the_template_or_refused() -> None:
    """Data and servers give them beside the content; without them the policy would learn not to think."""
    with_thoughts = CHATML.replace(
        "{{ m.content }}<|im_end|>",
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}<|im_end|>",
    )
    solution = [{"role": "assistant", "content": "hello", "reasoning_content": "he"}]
    of = tokenizer(with_thoughts)
    own = DemonstrationReader(of, (END,), chat=True, tools=())(solution)
    assert of.decode(own.token_ids) == "<think>he</think>hello<|im_end|>"
    with pytest.raises(DataError, match=r"leaves out the message's thoughts \(reasoning_content\)"):
        DemonstrationReader(tokenizer(CHATML), (END,), chat=True, tools=())(
            [{**solution[0], "reasoning_content": "x"}]
        )


def test_texts_follow_each_other_without_a_chat_template() -> None:
    of = tokenizer(None)
    shown = DemonstrationReader(of, (END,), chat=False, tools=())([*SOLUTION[:2], SOLUTION[0]])
    assert shown.chat is not None
    assert shown.token_ids == (*ids(of, "hello"), *ids(of, "hello"), END)
    assert [turn.given for turn in shown.chat.turns] == [(), ids(of, "he")]


@pytest.mark.parametrize(
    ("solution", "problem"),
    [
        ("", "is empty: it has no tokens"),
        (7, "is neither a string nor a list of chat messages like"),
        ([{"role": "assistant"}], "is neither a string nor a list"),
        ([], "must begin and end with a message of the assistant"),
        (SOLUTION[:2], "must begin and end with a message of the assistant"),
        (SOLUTION[1:3], "must begin and end with a message of the assistant"),
        ([SOLUTION[0], SOLUTION[0]], "messages 0 and 1 of the assistant with nothing in between"),
        ([SOLUTION[0], {"role": "tool", "content": "\ud800"}, SOLUTION[0]], "tokenizer cannot write"),
    ],
)
def test_what_is_no_solution_is_refused(solution: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        DemonstrationReader(tokenizer(), (END,), chat=True, tools=())(solution)


def test_a_prompt_with_a_chat_survives_a_checkpoint() -> None:
    shown = DemonstrationReader(tokenizer(WITH_CALLS), (END,), chat=True, tools=())(SOLUTION)
    prompt = Prompt("p", (5, 6), "?", demonstration=shown.token_ids, demonstration_chat=shown.chat)
    fields = {name: getattr(prompt, name) for name in Prompt.__slots__}
    again = prompt_of(json.loads(json.dumps({**fields, "record": {}})))
    assert again == prompt and isinstance(again.demonstration_chat, Chat)
    environment_tokens = sum(len(turn.given) for turn in shown.chat.turns) if shown.chat else 0
    assert prompt.demonstration_length == len(shown.token_ids) + environment_tokens
    assert demonstrated(prompt, 1.0, "demonstration", -1).messages == SOLUTION


@pytest.mark.usefixtures("leave_the_process_group")
def test_training_counts_the_assistants_tokens_alone(task: Path, tmp_path: Path) -> None:
    """The first loss is the mean over the assistant's tokens of transformers' own negative log-prob."""
    chats = [
        {
            "prompt": "7+5=",
            "solution": [assistant("7+5="), tool("12"), assistant("3-1"), tool("2"), assistant("9")],
        },
        {"prompt": "3-1=", "solution": [assistant("3"), tool("-1="), assistant("22")]},
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    keys = {"demonstration_key": "solution", "answer_key": None}
    data = f"data.train={json.dumps({'path': str(tmp_path / 'chats.jsonl'), **keys})}"
    settings = (
        "algorithm=sft",
        "train.prompts_per_step=2",
        "train.steps=2",
        "data.eval=null",
        "eval.every=0",
    )
    fit(configure(task, tmp_path / "run", data, *settings))
    of = load_tokenizer(str(task / "model"))
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float64)
    losses: list[float] = []
    for chat in chats:
        tokens, own = list(ids(of, str(chat["prompt"]))), []
        for i, message in enumerate(chat["solution"]):
            new = list(ids(of, message["content"]))  # type: ignore[index]
            if i + 1 == len(chat["solution"]):
                new.append(of.eos_token_id)
            own += range(len(tokens), len(tokens) + len(new)) if i % 2 == 0 else ()
            tokens += new
        with torch.no_grad():
            logp = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        losses += [-logp[position - 1, tokens[position]].item() for position in own]
    [record] = [line for line in records(tmp_path / "run") if line["step"] == 1]
    assert record["train/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def tool(content: str) -> dict[str, str]:
    return {"role": "tool", "content": content}

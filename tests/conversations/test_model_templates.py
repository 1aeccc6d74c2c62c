"""The chat templates of models, of which TRL has copies: those that are taken, and those that are refused.

TRL has none of Mistral's; a template of their form stands for them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.inputs.chat_tokenizer import ids, tokenizer
from transformers import Qwen2Tokenizer

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.chat_template import Template
from megatron_gvpo.data.demonstrations import DemonstrationReader
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.end_tokens import end_token_ids
from megatron_gvpo.workers.tools import tool_message

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

# Instead of calls in `tool_calls`, a message of the policy has them in its text, as it wrote them.
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A."}}},
    },
}
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}"
    "{% if loop.index0 == 0 and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


# The token that ends a turn, by template; the list of docs/howto/conversations.md.
TAKEN = {
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_6"), "<|im_end|>"),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2"), "<|eot_id|>"),
    **dict.fromkeys(("lfm2", "nemotron_3_nano"), "<|im_end|>"),
    **{"deepseekv3": "<｜end▁of▁sentence｜>", "glm4moe": "<|observation|>", "gemma4_v2": "<turn|>"},
    "mistral": "</s>",
}
REFUSED = {
    **dict.fromkeys(("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5"), ("<turn|>", "leaves out a message")),
    **{"phi3": ("<|end|>", "leaves out a message"), "cohere2": ("<|END_RESPONSE|>", "leaves out a message")},
    **{
        "gptoss": ("<|end|>", "there was no previous assistant"),
        "gemma3": ("<end_of_turn>", "must alternate"),
    },
}
# They write a thought, if only an empty one, at another place in an earlier message than the policy says it.
THINKING = ("qwen3_5_think", "qwen3_6", "nemotron_3_nano", "deepseekv3", "glm4moe")


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    import step_vs_trl

    environment = step_vs_trl.make_environment().parents[1]
    [directory] = environment.glob("lib/python3*/site-packages/trl/chat_templates")
    return {file.stem: file.read_text() for file in directory.glob("*.jinja")} | {"mistral": MISTRAL}


def of_model(written: str, end: str) -> Qwen2Tokenizer:
    of = tokenizer(written)
    of.add_special_tokens({"eos_token": end, "bos_token": "<s>"})
    return of


@pytest.mark.parametrize("name", TAKEN)
def test_a_tools_answer_is_written_as_the_models_template_does(templates: dict[str, str], name: str) -> None:
    of = of_model(templates[name], TAKEN[name])
    template = Template(of, (of.eos_token_id,), chat=True, tools=[SCHEMA])
    answer = tool_message("add", "42", "000000001")
    between = template.tokens_between(of.eos_token_id, [answer])
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": CALL}, answer]

    def rendered(messages: list[dict[str, str]]) -> tuple[int, ...]:
        text = of.apply_chat_template(messages, tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
        return ids(of, str(text))

    all_ids = rendered(chat)
    assert "42" in of.decode(between)
    assert all_ids[-len(between) :] == between
    if name not in THINKING:
        assert all_ids == (*rendered(chat[:1]), *ids(of, CALL), of.eos_token_id, *between)


@pytest.mark.parametrize(
    ("name", "ends", "last"),
    [
        ("gemma3", ("<eos>", "<end_of_turn>"), "<end_of_turn>"),
        ("gemma4_v2", ("<eos>", "<turn|>"), "<turn|>"),
        ("llama3_1", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "<|eot_id|>"),
        ("qwen3", ("<|endoftext|>", "<|im_end|>"), "<|im_end|>"),
        ("qwen3", ("<|endoftext|>",), "<|endoftext|>"),  # a base model
        ("glm4moe", ("<|endoftext|>", "<|observation|>", "<|user|>"), "<|user|>"),
        ("gptoss", ("<|return|>", "<|endoftext|>", "<|call|>"), "<|return|>"),
        ("phi3", ("<|endoftext|>", "<|end|>"), "<|end|>"),
    ],
)
def test_a_text_that_is_given_ends_as_the_models_template_ends_a_turn(
    templates: dict[str, str], tmp_path: Path, name: str, ends: tuple[str, ...], last: str
) -> None:
    """`ends`: the tokenizer's end token, and those of generation_config.json."""
    of = of_model(templates[name], ends[0])
    of.add_special_tokens({"additional_special_tokens": list(ends[1:])})
    numbers = of.convert_tokens_to_ids(list(ends))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": numbers}))
    end_ids = end_token_ids(str(tmp_path), ModelCard({}), of, chat=True)
    assert of.convert_ids_to_tokens(end_ids[0]) == last and set(end_ids) == set(numbers)


def test_glm_ends_a_turn_with_the_beginning_of_the_next(templates: dict[str, str]) -> None:
    of = of_model(templates["glm4moe"], "<|endoftext|>")
    of.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|observation|>"]})
    ends = of.convert_tokens_to_ids(["<|user|>", "<|observation|>", "<|endoftext|>"])
    template = Template(of, ends, chat=True, tools=[SCHEMA])
    user, answer = {"role": "user", "content": "so?"}, tool_message("add", "42", "000000001")
    assert template.end_before("tool") == ends[1] and template.end_before("user") == ends[0]
    assert (
        template.tokens_between(ends[1], [answer])[0] != ends[1]
        and template.tokens_between(ends[0], [user])[0] != ends[0]
    )


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_want_calls_apart_from_the_text_are_refused(
    templates: dict[str, str], name: str
) -> None:
    end, problem = REFUSED[name]
    of = of_model(templates[name], end)
    with pytest.raises(DataError, match=problem):
        Template(of, (of.eos_token_id,), chat=True, tools=[SCHEMA])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think"])
def test_qwen3_keeps_thoughts_or_strips_them(templates: dict[str, str], name: str) -> None:
    of = of_model(templates[name], "<|im_end|>")
    chat = [{"role": "user", "content": "a"}]
    text = str(of.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    prompt, answer = ids(of, text), {"role": "user", "content": "so?"}
    thought = "hm\n</think>\n\n42" if text.endswith("<think>\n") else "<think>\nhm\n</think>\n\n42"
    reply = {"role": "assistant", "content": thought}
    ended = (*prompt, *ids(of, thought), of.eos_token_id)
    unstripped, stripped = (
        Template(of, (of.eos_token_id,), chat=True, again=again).followed(prompt, ended, [reply], [answer])
        for again in (False, True)
    )
    assert unstripped[: len(ended)] == ended and "hm" in of.decode(unstripped)
    chat_text = of.apply_chat_template([*chat, reply, answer], tokenize=False, add_generation_prompt=True)
    assert stripped == ids(of, str(chat_text)) and "hm" not in of.decode(stripped)


# The text between the end of a prompt and an answer, by template.
BEFORE_ANSWERS = {
    **{"gptoss": "<|channel|>final<|message|>", "glm4moe": "\n<think></think>\n"},
    **{
        "qwen3": "<think>\n\n</think>\n\n",
        "qwen3_6": "\n</think>\n\n",
        "muse_glimmer": " to=user<|message|>",
    },
    **dict.fromkeys(("qwen2_5", "qwen3_instruct_2507", "llama3_1", "gemma3", "phi3", "cohere2", "lfm2"), ""),
    **dict.fromkeys(("deepseek_r1_distill", "nemotron_3_nano", "mistral"), ""),
}


@pytest.mark.parametrize("name", BEFORE_ANSWERS)
def test_a_worked_solution_is_the_models_template_between_prompt_and_answer(
    templates: dict[str, str], name: str
) -> None:
    of = of_model(templates[name], "<|end|>")
    read = DemonstrationReader(of, (of.eos_token_id,), chat=True, tools=())
    assert read("hello").token_ids == (*ids(of, f"{BEFORE_ANSWERS[name]}hello"), of.eos_token_id)

"""`data.chat_template_kwargs`: variables of the chat template, the same in every chat that a run writes."""

from __future__ import annotations

import pytest
from helpers.inputs.chat_tokenizer import CHATML, END, tokenizer

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.chat_template import Template
from megatron_gvpo.huggingface.tokenizer import rendered, set_template_variables

# As Qwen3 does, without the opening line of thoughts.
THINKING = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<no>{% endif %}"
    "{% endif %}",
)
ASKED = [{"role": "user", "content": "hello"}]


def test_prompts_and_later_turns_get_the_variable():
    of = tokenizer(THINKING)
    plain = rendered(of, ASKED, add_generation_prompt=True)
    set_template_variables(of, {"enable_thinking": False})
    assert rendered(of, ASKED, add_generation_prompt=True) == plain + "<no>"
    expected = of.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert (
        tokenizer(THINKING).apply_chat_template(
            ASKED, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        == expected
    )
    tokens = Template(of, (END,), chat=True).tokens_between(END, ASKED)
    assert of.decode(tokens).endswith("<|im_start|>assistant\n<no>")


@pytest.mark.parametrize("value", ['it\'s {{ 1 }} %} "q"\n\\', 1.5, None, True, ["a", {"b": [None, "é"]}]])
def test_any_json_value_arrives_as_it_is(value):
    of = tokenizer("{{ '' if x is not defined else x | tojson }}")
    expected = of.apply_chat_template(ASKED, tokenize=False, x=value)
    set_template_variables(of, {"x": value})
    assert rendered(of, ASKED) == expected


@pytest.mark.parametrize(
    ("template", "name", "error"),
    [
        (
            THINKING,
            "enable_thought",
            "chat_template_kwargs.enable_thought: the chat template does not read it",
        ),
        (THINKING, "messages", "messages: not a variable that a configuration may set"),
        (THINKING, "a b", "not a variable that a configuration may set"),
        (None, "enable_thinking", "has no chat template"),
    ],
)
def test_refused(template, name, error):
    with pytest.raises(DataError, match=error):
        set_template_variables(tokenizer(template), {name: False})

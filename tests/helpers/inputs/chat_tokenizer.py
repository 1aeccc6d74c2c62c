"""A small chat tokenizer: every byte is a token, and some pairs, so that texts have several spellings."""

from __future__ import annotations

from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "</call>"]
END = 2
# Every byte is a token, and "he", "ll", "llo" and "hello" are tokens, too.
MERGES = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]

# The template writes a chat as Qwen2.5's does: tools in the system message, their answers in a user message.
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str | None = CHATML) -> Qwen2Tokenizer:
    tokens = [*SPECIAL, *bytes_to_unicode().values(), *("".join(pair) for pair in MERGES)]
    made = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=MERGES,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        unk_token=None,
    )
    made.add_special_tokens({"additional_special_tokens": SPECIAL[1:2]})
    made.add_tokens(SPECIAL[3:])
    made.chat_template = template
    return made


def ids(of: Qwen2Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(of(text, add_special_tokens=False)["input_ids"])

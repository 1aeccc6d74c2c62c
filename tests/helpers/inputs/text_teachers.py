"""Teachers' tokenizers with other merges, marks and templates than the policy's (`chat_tokenizer`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_gvpo.data.prompts import PromptWriter
from megatron_gvpo.data.teacher_text import TeacherText, Writing
from megatron_gvpo.settings.sections import DataConfig, DatasetConfig

MARKS = ["<s>", "</s>", "<|user|>", "<|model|>"]
# A template like that of Llama's family: other marks, and the system prompt in the user's message.
TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'system' %}<|user|>{{ m.content }} | {% else %}"
    "{{ '<|model|>' if m.role == 'assistant' else '<|user|>' }}{{ m.content | trim }}"
    "{{ '</s>' if m.role == 'assistant' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|model|>{% endif %}"
)
# Templates that begin the turn with a thinking part, as DeepSeek-R1's, or with an empty one, as Qwen3's.
OPENING = TEMPLATE.replace("<|model|>{% endif %}", "<|model|><think>\n{% endif %}")
NOT_THINKING = TEMPLATE.replace("<|model|>{% endif %}", "<|model|><think>\n\n</think>\n\n{% endif %}")


def byte_level(
    template: str | None = TEMPLATE, merges: Sequence[tuple[str, str]] = (("l", "o"), ("l", "lo"))
) -> Qwen2Tokenizer:
    """A token for every byte, in another order than the policy's, with other merges and marks."""
    tokens = [*reversed(bytes_to_unicode().values()), *("".join(pair) for pair in merges), *MARKS]
    made = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=list(merges),
        pad_token="<s>",
        eos_token="</s>",
        unk_token=None,
    )
    made.add_special_tokens({"additional_special_tokens": MARKS[2:]})
    made.chat_template = template
    return made


def metaspace(template: str | None = TEMPLATE, byte_fallback: bool = True) -> PreTrainedTokenizerBase:
    """A tokenizer like Llama 2's: a space is ▁, a text begins with one, and other characters are bytes."""
    letters = [chr(i) for i in range(33, 127)]
    pairs = [("▁", "h"), ("l", "l"), ("l", "o"), ("▁", "1")]
    tokens = [*MARKS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    tokens += ["".join(pair) for pair in pairs]
    model = BPE(
        {token: i for i, token in enumerate(tokens)}, pairs, unk_token="<unk>", byte_fallback=byte_fallback
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens([AddedToken(mark, normalized=False) for mark in [*MARKS, "<unk>"]])
    if template is None:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = template
    return fast


def lower_case(template: str | None = TEMPLATE) -> PreTrainedTokenizerBase:
    """A tokenizer that turns capitals into lower case."""
    made = byte_level(template)
    made.backend_tokenizer.normalizer = normalizers.Lowercase()
    return made


def make_teacher(directory: Path, seed: int = 1, template: str | None = None, **sizes: int) -> Path:
    """A small Qwen2 model of random weights with the tokenizer of `byte_level`."""
    tokenizer = byte_level(template, [("1", "+"), ("-", "1"), ("=", "1")])
    torch.manual_seed(seed)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        **{**shape, "num_key_value_heads": 2, "max_position_embeddings": 128, **sizes},
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("</s>"),
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def text_for(
    policy: PreTrainedTokenizerBase,
    policy_ends: Sequence[int],
    teacher: PreTrainedTokenizerBase,
    longest: int | None = None,
    end: str = "</s>",
    **data: object,
) -> TeacherText:
    dataset = DatasetConfig(path="unused")

    def writing(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> Writing:
        own = DataConfig(train=dataset, **data)  # type: ignore[arg-type]
        return Writing(PromptWriter(dataset, own, tokenizer, 10**6), tokenizer, ends)

    ends = [teacher.convert_tokens_to_ids(end)]
    return TeacherText(writing(policy, policy_ends), writing(teacher, ends), longest)

"""The checkpoint's tokenizer."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_gvpo.data.sources import DataError


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local Hugging Face checkpoint directory. Raises DataError where there is none."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"model.path={path}: no tokenizer there (tokenizer.json and tokenizer_config.json): {error}"
        ) from error
    return tokenizer


def end_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a response. Raises DataError where the tokenizer names none."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"model.path={tokenizer.name_or_path}: the tokenizer has no end token; "
            "name it as eos_token in tokenizer_config.json"
        )
    return int(tokenizer.eos_token_id)

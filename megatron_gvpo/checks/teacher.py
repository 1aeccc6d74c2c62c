"""The checks of a teacher's checkpoint before anything heavy is loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.huggingface.vocabulary import vocabulary
from megatron_gvpo.settings.config import Config

# Files with a vocabulary, for tokenizers without a tokenizer.json.
_VOCABULARIES = ("tekken.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken")


def check_teacher(config: Config, cards: ModelCards) -> None:
    """Raises ConfigError for a teacher without a checkpoint, another tokenizer, or too few positions."""
    teacher = config.teacher
    if teacher is None:
        return
    card = cards.teacher
    if (problem := _difference(Path(config.model.path), Path(teacher.path))) is not None:
        raise ConfigError(
            f"teacher.path={teacher.path}: {problem}: a teacher reads the tokens that the policy samples, "
            "so it needs the tokenizer of model.path"
        )
    _check_lengths(config, card)


def _check_lengths(config: Config, card: ModelCard) -> None:
    """Raises ConfigError if the longest prompt and response, as far as they are known, are too long."""
    assert config.teacher is not None, "called for a teacher"
    servers, room, key = config.teacher.server, card.get("max_position_embeddings"), "max_position_embeddings"
    if servers is not None and servers.context_length is not None:
        room, key = servers.context_length, "teacher.server.context_length"
    if room is None or not config.algorithm.samples_from_policy:
        return
    prompt, response = config.data.max_prompt_tokens or 1, config.rollout.max_tokens
    # Servers reserve a position for a new token, and SGLang gets one more (servers/sglang.py).
    reserved = 0 if servers is None else 2 if servers.engine == "sglang" else 1
    wanted = prompt + response + reserved
    if wanted > room:
        prompt_key = "" if config.data.max_prompt_tokens is None else f"data.max_prompt_tokens={prompt} and "
        raise ConfigError(
            f"teacher.path={config.teacher.path}: {prompt_key}rollout.max_tokens={response} need {wanted} "
            f"positions of the teacher, and it has {key}={room}"
        )


def _difference(policy: Path, teacher: Path) -> str | None:
    """A difference between two tokenizers that matters for a response's tokens; None without one."""
    ids, other = vocabulary(policy), vocabulary(teacher)
    if ids and other:
        for token, number in ids.items():
            if other.get(token) != number:
                other_number = "none" if token not in other else f"the id {other[token]}"
                return f"its tokenizer gives the token {token!r}, {number} in model.path, {other_number}"
        if more := other.keys() - ids.keys():
            return (
                f"its tokenizer has the token {min(more, key=other.__getitem__)!r}, which model.path has not"
            )
        return None
    files, other_files = (
        {f.name: _hash(f) for f in _vocabularies(directory)} for directory in (policy, teacher)
    )
    if not other_files:
        return "it has no tokenizer"
    return None if files == other_files else "its tokenizer's files are not those of model.path"


def _vocabularies(directory: Path) -> list[Path]:
    return sorted(file for pattern in _VOCABULARIES for file in directory.glob(pattern) if file.is_file())


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()

"""The checks of a teacher's checkpoint before anything heavy is loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron_gvpo.algorithms.base import TEACHER
from megatron_gvpo.core.errors import ConfigError
from megatron_gvpo.huggingface.card import ModelCard, ModelCards
from megatron_gvpo.huggingface.vocabulary import vocabulary
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.reward_servers import TeacherConfig

# Files with a vocabulary, for tokenizers without a tokenizer.json.
_VOCABULARIES = ("tekken.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken")


def check_teacher(config: Config, cards: ModelCards) -> None:
    """Raises ConfigError for a teacher without a checkpoint, or with too few positions.

    It also raises it for a teacher with another tokenizer if a block reads its log-probs of the policy's
    tokens, or if these are over the tokens that could be sampled.
    """
    teacher = config.teacher
    if teacher is None:
        return
    card = cards.teacher
    if (problem := tokenizer_difference(config.model.path, teacher.path)) is None:
        _check_lengths(config, card)
    elif (reader := _reader_of_tokens(config)) is not None:
        raise ConfigError(
            f"teacher.path={teacher.path}: {problem}: {reader} reads a teacher's log-probs of the policy's "
            "own tokens, so the teacher needs the tokenizer of model.path. The recipe gvpo_plus_plus takes a "
            "teacher with any tokenizer"
        )
    elif config.rollout.truncates and config.algorithm.samples_from_policy:
        keys = config.rollout.truncation
        raise ConfigError(
            f"{keys} is not possible with teacher.path={teacher.path}: {problem}, so its log-probs are over "
            "all of its own vocabulary, and those of the policy would be over the tokens that could be "
            f"sampled; leave {keys} out"
        )


def teacher_room(teacher: TeacherConfig, card: ModelCard) -> tuple[str, int | None, int]:
    """(the key that limits the teacher's context, its positions, the positions that servers reserve).

    The number of positions is None if nothing limits it.
    """
    servers, room, key = teacher.server, card.get("max_position_embeddings"), "max_position_embeddings"
    if servers is not None and servers.context_length is not None:
        room, key = servers.context_length, "teacher.server.context_length"
    if servers is None:
        return key, room, 0
    # Servers reserve a position for a new token, and SGLang gets one more (servers/sglang.py).
    return key, room, 2 if servers.engine == "sglang" else 1


def _reader_of_tokens(config: Config) -> str | None:
    """The block that needs a teacher's log-probs of the policy's own tokens; None if all take text."""
    algorithm = config.algorithm
    if algorithm.loss.divergence is not None and algorithm.loss.divergence.needs_teacher:
        return f"algorithm.loss.divergence={algorithm.loss.divergence.name}"
    if algorithm.estimator is not None and TEACHER in algorithm.estimator.reference_policies.values():
        return f"algorithm.estimator={algorithm.estimator.name}"
    if TEACHER in algorithm.loss.reference_policies.values() and not algorithm.loss.reads_text:
        return f"algorithm.loss={algorithm.loss.name}"
    return None


def _check_lengths(config: Config, card: ModelCard) -> None:
    """Raises ConfigError if the longest prompt and response, as far as they are known, are too long."""
    assert config.teacher is not None, "called for a teacher"
    key, room, reserved = teacher_room(config.teacher, card)
    if room is None or not config.algorithm.samples_from_policy:
        return
    prompt, response = config.data.max_prompt_tokens or 1, config.rollout.max_tokens
    wanted = prompt + response + reserved
    if wanted > room:
        prompt_key = "" if config.data.max_prompt_tokens is None else f"data.max_prompt_tokens={prompt} and "
        raise ConfigError(
            f"teacher.path={config.teacher.path}: {prompt_key}rollout.max_tokens={response} need {wanted} "
            f"positions of the teacher, and it has {key}={room}"
        )


def teacher_reads_text(config: Config) -> bool:
    """True if the teacher has another tokenizer, so that it scores the text of responses."""
    teacher = config.teacher
    return teacher is not None and tokenizer_difference(config.model.path, teacher.path) is not None


def tokenizer_difference(policy_path: str, teacher_path: str) -> str | None:
    """A difference between two models' tokenizers that matters for a response's tokens; None without one."""
    policy, teacher = Path(policy_path), Path(teacher_path)
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

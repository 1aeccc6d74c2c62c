"""The data of a run: prompts to train and evaluate on, as token ids, and the tokenizer that made them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_gvpo.algorithms.config import AlgorithmConfig
from megatron_gvpo.core.environment import is_first_process
from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.data.chat_template import Template, plain, special_tokens
from megatron_gvpo.data.known_forms import RESPONSES, SOLUTION
from megatron_gvpo.data.prompt_images import PromptImages, prompt_images
from megatron_gvpo.data.prompts import Prompts, load_prompts
from megatron_gvpo.data.tool_calls import parser_of
from megatron_gvpo.groups import Prompt
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.end_tokens import StopStrings, end_token_ids
from megatron_gvpo.huggingface.tokenizer import end_token_id, load_tokenizer, set_template_variables
from megatron_gvpo.settings.config import Config
from megatron_gvpo.settings.conversation import ConversationConfig
from megatron_gvpo.settings.lengths import longest_prompt
from megatron_gvpo.settings.rewards import RewardsConfig
from megatron_gvpo.settings.sections import DatasetConfig, TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: tuple[int, ...]  # every token that ends a response; the first one is appended to solutions
    prompts: list[Prompt]
    eval_prompts: list[Prompt]  # empty if the configuration names none
    longest_prompt: int = 0  # tokens of the longest prompt
    chat: bool = False  # the prompts are rendered by the chat template
    tools: tuple[dict[str, Any], ...] = ()  # the schemas of the tools that the policy may call
    images: PromptImages | None = None  # None for a model that takes no images
    dropped: int = 0  # records that are too long (data.prompt_too_long)


def load_task(config: Config, card: ModelCard, tools: tuple[dict[str, Any], ...] = ()) -> Task:
    """Read the data without loading a model, so that errors appear within seconds.

    Raises ConfigError, DataError.

    `card`: that of `model.path`. `tools`: the schemas of the tools that the policy may call, which chat
    templates write into prompts.
    """
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    set_template_variables(tokenizer, config.data.chat_template_kwargs)
    vocabulary = card.get("vocab_size", math.inf)
    _check_end_token(tokenizer, vocabulary, config.model.path)
    chat = config.data.chat_template and bool(tokenizer.chat_template)
    tools = tuple(plain(tools, special_tokens(tokenizer)))
    for key, sampling in (("rollout", config.rollout), ("eval.sampling", config.eval.sampling)):
        _check_stop_strings(f"{key}.stop", sampling.stop, tokenizer)
    ends = end_token_ids(config.model.path, card, tokenizer, config.rollout.stop_token_ids, chat)
    positions = None if config.algorithm.samples_from_policy else card.get("max_position_embeddings")
    longest = longest_prompt(config, card)
    talks = config.rollout.conversation
    if talks is not None:
        _check_parser(talks.parser)
    images = prompt_images(config.model.path, card, tokenizer)
    data, held_out = config.data, config.data.eval
    common: dict[str, Any] = {"longest": longest, "end_token_ids": ends, "tools": tools, "images": images}
    sampler = config.algorithm.sampler
    prompts = load_prompts(data.train, data, tokenizer, positions=positions, sampler=sampler, **common)
    eval_prompts = Prompts()
    if held_out is not None:
        eval_prompts = load_prompts(held_out, data, tokenizer, **common)
    if talks is not None:  # raises DataError for a template that cannot continue a conversation
        Template(tokenizer, ends, chat, tools, talks.history == "template")
    dropped = prompts.dropped + eval_prompts.dropped
    task = Task(tokenizer, ends, prompts, eval_prompts, longest, chat, tools, images, dropped)
    _check_vocabulary(task, vocabulary, config.model.path)
    if any(prompt.demonstration_chat is not None for prompt in prompts):
        _check_turns(data.train, talks, config.train)
    _check_fields(config.algorithm, data.train.path, prompts)
    judged = [*(prompts if config.algorithm.samples_from_policy else ()), *eval_prompts]
    _check_templates(config.rewards, judged)
    _check_answers(config.rewards, judged)
    _check_differences(config.algorithm, data.train, prompts)
    return task


def _check_end_token(tokenizer: PreTrainedTokenizerBase, vocabulary: float, path: str) -> None:
    """Raises DataError for an end token that the model does not know, or a tokenizer without one."""
    end = end_token_id(tokenizer)
    if end >= vocabulary:
        raise DataError(
            f"model.path={path}: the tokenizer's end token {tokenizer.eos_token!r} has id "
            f"{end}, and the model knows only {vocabulary} tokens; name its own as eos_token in "
            "tokenizer_config.json"
        )


def _check_parser(name: str) -> None:
    """Raises ConfigError for a parser of tool calls that cannot be loaded."""
    try:
        parser_of(name)
    except ValueError as error:
        raise ConfigError(f"rollout.conversation.parser={name}: {error}") from None


def _check_stop_strings(key: str, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises DataError for a stop string that no response can have."""
    if never := StopStrings(tokenizer).unwritable(stop):
        raise DataError(
            f"{key}: the tokenizer in {tokenizer.name_or_path} cannot write {never[0]!r}, so no response "
            "would end there: leave it out"
        )


def _check_turns(dataset: DatasetConfig, talks: ConversationConfig | None, train: TrainConfig) -> None:
    """Raises DataError if settings cannot go with demonstrations of several turns, which `dataset` has."""
    reason = None
    if train.requires_shared_prompts:
        reason = "train.share_prompts=true is for single responses: leave it out"
    elif talks is not None and talks.history == "template":
        reason = (
            "they are written turn after turn, not again for every turn as the policy would see them with "
            "rollout.conversation.history=template: use append, or a prompt for every turn"
        )
    if reason is not None:
        raise DataError(
            f"{dataset.path}: the demonstrations (field "
            f"{dataset.demonstration_key or SOLUTION!r}) have several turns, and {reason}"
        )


def _check_fields(algorithm: AlgorithmConfig, path: str, prompts: list[Prompt]) -> None:
    """Raises DataError for a field that a block reads and no record has: the block would have no effect."""
    for part in algorithm.blocks_inside():
        for option, field in part.block.record_fields.items():
            if all(prompt.record.get(field) is None for prompt in prompts):
                raise DataError(
                    f"algorithm.{part.key}.{option}={field}: no record of {path} has this "
                    f"field; fields of the first: {', '.join(prompts[0].record)}"
                )


def _check_templates(rewards: RewardsConfig, prompts: list[Prompt]) -> None:
    """Raises DataError for a prompt without a field, or the answer, that a judge's template names.

    The judge would read the field's name in braces, or `None`, and grade by it.
    """
    for i, component in enumerate(rewards.components):
        if component.judge is None:
            continue
        key = f"rewards.components.{i}.judge.template"
        if unanswered := [
            p.id for p in prompts if "{answer}" in component.judge.template and p.answer is None
        ]:
            raise DataError(
                f"{key} names {{answer}}, and {unanswered[0]} has none: give data.train.answer_key and "
                "data.eval.answer_key, or leave {answer} out"
            )
        for name in component.judge.fields_of_data:
            without = [prompt.id for prompt in prompts if prompt.record.get(name) is None]
            if without and len(without) == len(prompts):
                raise DataError(
                    f"{key}: no record of the data has a field {name!r} for {{{name}}}; fields of the first: "
                    f"{', '.join(prompts[0].record)}. Braces that are text: {{ {name} }}"
                )
            if without:
                raise DataError(
                    f"{key}: {without[0]} has no field {name!r} for {{{name}}} ({len(without)} of "
                    f"{len(prompts)} records): fill it in, or leave them out (data.train.convert, "
                    "data.eval.convert)"
                )


def _check_answers(rewards: RewardsConfig, prompts: list[Prompt]) -> None:
    """Raises DataError for an empty answer where a reward compares with it: every response would be wrong."""
    compares = next((c.name for c in rewards.components if c.needs_answer), None)
    empty = [prompt.id for prompt in prompts if prompt.answer is not None and not prompt.answer.strip()]
    if compares is not None and empty:
        raise DataError(
            f"{empty[0]}: its answer is empty, and the reward {compares} compares with it: no response would "
            f"be right ({len(empty)} of {len(prompts)} prompts): correct them, or leave them out "
            "(data.train.convert)"
        )


def _check_differences(algorithm: AlgorithmConfig, dataset: DatasetConfig, prompts: list[Prompt]) -> None:
    """Raises DataError if a method compares the given responses of each prompt, and none differ."""
    compares = algorithm.trains_on_scored_responses and algorithm.needs_group and not algorithm.shapers
    if compares and not any(len({r.reward for r in prompt.responses}) > 1 for prompt in prompts):
        raise DataError(
            f"{dataset.path}: no record has responses with different rewards (field "
            f"{dataset.responses_key or RESPONSES!r}), and the loss {algorithm.loss.name} compares "
            "them: nothing would be learned"
        )
    contradictory = [prompt.id for prompt in prompts if _is_contradictory(prompt)] if compares else []
    if len(contradictory) == len(prompts) > 0:
        raise DataError(
            f"{contradictory[0]}: the same response has two rewards, as in every record: nothing would be "
            "learned"
        )
    if compares:
        _warn_of_empty(prompts)
    if contradictory and is_first_process():
        log.warning(
            "%s: the same response has two rewards (%d of %d records): leave such records out "
            "(data.train.convert)",
            contradictory[0],
            len(contradictory),
            len(prompts),
        )


def _warn_of_empty(prompts: list[Prompt]) -> None:
    """Warn if an empty text is the best response to a prompt: the policy would learn to answer nothing."""
    compared = [p for p in prompts if len({response.reward for response in p.responses}) > 1]
    best = {p.id: max(p.responses, key=lambda response: response.reward).text for p in compared}
    empty = [name for name, text in best.items() if not text.strip()]
    if empty and is_first_process():
        log.warning(
            "%s: the best response is empty (%d of %d records): the policy learns to say nothing there; if "
            "that is not meant, leave such records out (data.train.convert)",
            empty[0],
            len(empty),
            len(prompts),
        )


def _is_contradictory(prompt: Prompt) -> bool:
    """True if two of the prompt's responses have the same tokens and different rewards."""
    scored = {(response.token_ids, response.reward) for response in prompt.responses}
    return len(scored) > len({token_ids for token_ids, _ in scored})


def _check_vocabulary(task: Task, vocabulary: float, path: str) -> None:
    """Raises DataError for a token beyond the embedding: a tensor-parallel one would give zeros for it."""
    for prompt in (*task.prompts, *task.eval_prompts):
        chat = prompt.demonstration_chat
        token_ids = [prompt.demonstration or (), chat.observation_tokens if chat is not None else ()]
        token_ids += [response.token_ids for response in prompt.responses]
        highest = max(max(ids, default=0) for ids in (prompt.token_ids, *token_ids))
        if highest >= vocabulary:
            raise DataError(
                f"{prompt.id}: it has {task.tokenizer.decode([highest])!r}, token {highest}, and the model "
                f"knows only {vocabulary}: the tokenizer in model.path={path} is another model's, or has "
                "tokens for which the embeddings were not resized"
            )

"""Inspects the prompts as the model gets them: template, special tokens, lengths."""

from __future__ import annotations

import re
from statistics import median

from megatron_gvpo.data.task import Task
from megatron_gvpo.groups import Prompt
from megatron_gvpo.huggingface.tokenizer import rendered
from megatron_gvpo.inspection.verdict import RunVerdict, failure, ok, warning
from megatron_gvpo.settings.config import Config

SHOWN = 3  # the number of prompts
_CROWDED = 0.9  # share of the limit from which a prompt's length is mentioned
_EXAMPLE = [{"role": "user", "content": "What is 1 + 1?"}]
_ANSWER = "Two."
_MANY = 0.1  # share of repeated prompts that is mentioned


def shown_prompts(task: Task) -> list[str]:
    """The first prompts as texts in which special tokens are visible."""
    return [str(task.tokenizer.decode(prompt.token_ids)) for prompt in task.prompts[:SHOWN]]


def shown_solutions(task: Task) -> list[str]:
    """The first texts in the data that are trained: prompts' solutions, or scored responses."""
    texts = list[str]()
    for prompt in task.prompts[:SHOWN]:
        if prompt.demonstration is not None:
            texts.append(str(task.tokenizer.decode(prompt.demonstration)))
        texts += [
            f"reward {response.reward:g}: {task.tokenizer.decode(response.token_ids)}"
            for response in prompt.responses[:SHOWN]
        ]
    return texts


def inspect_prompts(config: Config, task: Task) -> list[RunVerdict]:
    return [_lengths(config, task), *_template(task), *_end(task), *_enough(config, task)]


def _lengths(config: Config, task: Task) -> RunVerdict:
    lengths = sorted(len(prompt.token_ids) for prompt in (*task.prompts, *task.eval_prompts))
    sizes = f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens, median {median(lengths):.0f}"
    limit = task.longest_prompt
    if task.dropped:
        return warning(
            "lengths",
            f"{task.dropped} of {task.dropped + len(lengths)} records are dropped: their prompts are longer "
            f"than the limit of {limit}; {sizes} remain",
            "raise data.max_prompt_tokens if their tokens fit beside a response",
        )
    if limit and lengths[-1] >= _CROWDED * limit:
        return warning(
            "lengths",
            f"{sizes}; the longest fills {lengths[-1] / limit:.0%} of the limit of {limit}",
            "raise data.max_prompt_tokens if the data has longer prompts to come",
        )
    response = f", and {config.rollout.max_tokens} for a response"
    is_sampled = config.algorithm.sampler == "engine"
    return ok("lengths", f"{sizes}; the limit is {limit}{response if is_sampled else ''}")


def _template(task: Task) -> list[RunVerdict]:
    """Judge the template: if it does not open the model's turn, the model would continue the user's text."""
    if not task.chat:
        return [ok("template", "prompts are texts that the model continues: no chat template is used")]
    plain = rendered(task.tokenizer, _EXAMPLE)
    opened = rendered(task.tokenizer, _EXAMPLE, add_generation_prompt=True)
    opening = opened.removeprefix(plain)
    if plain == opened:
        # Mistral's and Llama 2's templates close the user's text, and a response follows it at once.
        if not _answered(task).removeprefix(plain).partition(_ANSWER)[0].strip():
            return [ok("template", f"the model's turn follows {plain[-20:]!r} at once")]
        return [
            failure(
                "template",
                "the chat template ignores add_generation_prompt: it does not open the model's turn",
                "end the template with {% if add_generation_prompt %} and what begins the model's turn",
            )
        ]
    missing = _marks_in_pieces(task, opened)
    if missing:
        return [
            failure(
                "template",
                f"the tokenizer has no token for {', '.join(missing)}: the template is another model's",
                "take the model's own chat_template, or add the marks to the tokenizer and train them",
            )
        ]
    if opening.strip() and opening in plain:
        return [
            warning(
                "template",
                f"add_generation_prompt opens the model's turn with {opening!r}, as the user's turn begins",
                "name the model's role there, such as assistant",
            )
        ]
    return [ok("template", f"it opens the model's turn with {opening!r}")]


def _answered(task: Task) -> str:
    """A chat in which the model has answered."""
    return rendered(task.tokenizer, [*_EXAMPLE, {"role": "assistant", "content": _ANSWER}])


def _marks_in_pieces(task: Task, text: str) -> list[str]:
    """Marks such as <|im_start|> in a rendered chat that the tokenizer splits into several tokens."""
    known = {str(token) for token in task.tokenizer.get_added_vocab()}
    known |= set(task.tokenizer.all_special_tokens)
    marks = dict.fromkeys(re.findall(r"<\|[^|<>\s]+\|>|<(?:start|end)_of_turn>", text))
    vocabulary = task.tokenizer.get_vocab()
    return [mark for mark in marks if mark not in known and mark not in vocabulary]


def _end(task: Task) -> list[RunVerdict]:
    ends = [repr(task.tokenizer.decode([token])) for token in task.end_token_ids]
    if not task.chat:
        return [ok("end", f"a response ends with {' or '.join(ends)}")]
    after = _answered(task).rpartition(_ANSWER)[2]  # the user's turn may have an end, and the model's none
    token_ids = task.tokenizer(after, add_special_tokens=False)["input_ids"]
    if not set(task.end_token_ids) & set(token_ids):
        return [
            warning(
                "end",
                f"the chat template ends a turn without any of the end tokens {', '.join(ends)}: a model "
                "that was trained with it never writes them",
                "name the template's own end as rollout.stop_token_ids",
            )
        ]
    return [ok("end", f"a response ends with {' or '.join(ends)}, as the chat template ends a turn")]


def _enough(config: Config, task: Task) -> list[RunVerdict]:
    wanted, count = config.train.prompts_per_step, len(task.prompts)
    if wanted > count:
        return [
            warning(
                "data",
                f"train.prompts_per_step={wanted}, and the data has {count}: a step repeats prompts",
                "lower train.prompts_per_step, or give more data",
            )
        ]
    known = {_key(prompt) for prompt in task.prompts}
    if repeated := _repeated(config, task, len(known)):
        return [repeated]
    shared = sum(_key(prompt) in known for prompt in task.eval_prompts)
    if shared and config.rollout.conversation is None:
        return [
            warning(
                "data",
                f"{shared} of {len(task.eval_prompts)} held-out prompts are among those to train on",
                "leave them out of data.train: held-out figures would be too good",
            )
        ]
    return [ok("data", f"{count} prompts to train on, {len(task.eval_prompts)} held out")]


def _repeated(config: Config, task: Task, different: int) -> RunVerdict | None:
    """A warning if sampled prompts are there again, with another answer or often; `different`: prompts.

    Two conversations with the same prompt may differ in their environment.
    """
    if not config.algorithm.samples_from_policy or config.rollout.conversation is not None:
        return None
    count = len(task.prompts)
    if several := len({(_key(prompt), prompt.answer) for prompt in task.prompts}) - different:
        return warning(
            "data",
            f"{several} of {count} records have the prompt of another record, and another answer",
            "see that the prompt has all that the answer depends on, or leave such records out",
        )
    if count - different > _MANY * count:
        return warning(
            "data",
            f"{count - different} of {count} records repeat the prompt of another",
            "leave them out unless these prompts are to count more",
        )
    return None


def _key(prompt: Prompt) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The tokens with the images that they stand for, which equal tokens do not tell."""
    return prompt.token_ids, tuple(image.digest for image in prompt.images)

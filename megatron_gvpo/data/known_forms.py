"""The commonest forms of records, recognised by their fields: chats, preference pairs, completions.

Records are recognised if the keys `prompt_key`, `demonstration_key`, `responses_key` and `convert` name
nothing. Everything else needs a key, or a function of the user (`convert`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.data.converters import after_system, preference_pair
from megatron_gvpo.data.messages import shown_value, unequal_weight
from megatron_gvpo.data.sources import Record
from megatron_gvpo.data.tool_calls import thoughts
from megatron_gvpo.settings.sections import DatasetConfig

Fields = Mapping[str, Any]
Message = dict[str, Any]

SOLUTION, RESPONSES = "solution", "responses"  # the fields that a recognised record gets
FORMS = (
    '{"messages": [{"role": ..., "content": ...}, ...]}, '
    '{"conversations": [{"from": ..., "value": ...}, ...]}, '
    '{"prompt": ..., "completion": ...} and {"instruction": ..., "output": ...} for SFT; '
    '{"prompt": ..., "chosen": ..., "rejected": ...} for DPO'
)
_CONVERT = "data.train.convert names a function that makes another form of it"
# ShareGPT's names of roles. `function_call` is missing, because a call is a part of the assistant's message
# here.
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}


def as_dataset(dataset: DatasetConfig, sampler: str) -> DatasetConfig:
    """The data set; keys that it leaves out name the fields that recognised records get.

    `sampler`: `algorithm.sampler`, which says what is trained: `dataset` needs a solution, `file` scored
    responses. An answer that no key names is not needed for these.
    """
    if (field := _needed(dataset, sampler)) is None:
        return dataset
    key = "demonstration_key" if field == SOLUTION else "responses_key"
    named = {"answer_key": dataset.answer_key if "answer_key" in dataset.model_fields_set else None}
    return dataset.model_copy(update={key: field, **named})


def recogniser(dataset: DatasetConfig, sampler: str) -> Callable[[Record], Record]:
    """A function that adds the fields which `as_dataset` names, or the prompt alone, to a record.

    It raises DataError, which names the record, if the record's form is unknown or lacks such a field.
    """
    needed = _needed(dataset, sampler)

    def recognise(record: Record) -> Record:
        try:
            if needed == SOLUTION:
                fields = _with_solution(record.fields, dataset.prompt_key)
            elif needed == RESPONSES:
                fields = _with_responses(record.fields, dataset.prompt_key)
            else:
                fields = _with_prompt(record.fields, dataset.prompt_key)
        except ValueError as error:
            raise DataError(f"{record.where}: {error}; {_CONVERT}") from None
        return record._replace(fields=fields)

    return recognise


def unread_system(record: Record, prompt: str) -> str | None:
    """A warning about the text of a record's field `system` that its prompt lacks; None without one."""
    system = record.fields.get("system")
    if not isinstance(system, str) or system.strip() in prompt:
        return None
    return (
        f"{record.where}: the record has a field system ({shown_value(system)}), and the prompt does not "
        "have its text: if it is a system message, a function of yours puts it into the prompt (convert, "
        "beside the file's path)"
    )


def solution_field(key: str, fields: Fields) -> str:
    """The field of the user's record with the solution that `key` has, for messages."""
    origins = ("completion", "output", "messages", "conversations") if key == SOLUTION else ()
    return next((name for name in origins if _has(fields, name)), key)


def _needed(dataset: DatasetConfig, sampler: str) -> str | None:
    """The field that the method trains on, if the data set has no key for it."""
    if dataset.convert is not None:
        return None
    if sampler == "dataset" and dataset.demonstration_key is None:
        return SOLUTION
    return RESPONSES if sampler == "file" and dataset.responses_key is None else None


def _check_single(fields: Fields, prompt_key: str, needed: str) -> None:
    """Raises ValueError for a record of two forms, of which one would be ignored without a message."""
    forms = [names for names in _names_of_forms(prompt_key, needed) if all(_has(fields, n) for n in names)]
    if len(forms) > 1:
        first, second, *_ = (" and ".join(name for name in names if name != prompt_key) for names in forms)
        key = "demonstration_key" if needed == SOLUTION else "responses_key"
        raise ValueError(
            f"the record has {first}, and {second}, and only one of them can be trained: "
            f"data.train.{key} names a field"
        )


def _names_of_forms(prompt_key: str, needed: str) -> list[tuple[str, ...]]:
    """The fields by which each form with the needed field is recognised."""
    if needed == RESPONSES:
        return [(prompt_key, RESPONSES), ("chosen", "rejected")]
    texts = [(prompt_key, "completion"), ("instruction", "output"), (prompt_key, SOLUTION)]
    return [("messages",), ("conversations",), *texts]


def _has(fields: Fields, name: str) -> bool:
    """False for the null that a Parquet file has in the columns of other records."""
    return fields.get(name) is not None


def _with_solution(fields: Fields, prompt_key: str) -> Fields:
    _check_single(fields, prompt_key, SOLUTION)
    if (chat := _chat(fields)) is not None:
        own = fields["messages" if isinstance(fields.get("messages"), list) else "conversations"]
        if (problem := unequal_weight(own)) is not None:
            raise ValueError(problem)
        prompt, solution = _divided(chat)
    elif _has(fields, "completion") and prompt_key in fields:
        if (label := fields.get("label")) in (False, 0):
            shown = str(label).lower()
            raise ValueError(f"label is {shown}: SFT would teach a completion that was judged to be bad")
        prompt, solution = after_system(fields, fields[prompt_key]), fields["completion"]
    elif _has(fields, "instruction") and "output" in fields:
        prompt, solution = _instruction(fields), fields["output"]
    elif SOLUTION in fields and prompt_key in fields:
        prompt, solution = after_system(fields, fields[prompt_key]), fields[SOLUTION]
    else:
        raise ValueError(
            "data.train.demonstration_key is not set, and no worked solution is recognised by the fields "
            f"{', '.join(fields)}; recognised are {FORMS}"
        )
    return {**fields, prompt_key: prompt, SOLUTION: solution}


def _with_responses(fields: Fields, prompt_key: str) -> Fields:
    _check_single(fields, prompt_key, RESPONSES)
    if RESPONSES in fields and prompt_key in fields:
        return {**fields, prompt_key: after_system(fields, fields[prompt_key])}
    if not {"chosen", "rejected"} <= fields.keys():
        raise ValueError(
            "data.train.responses_key is not set, and no pair of responses is recognised by the fields "
            f"{', '.join(fields)}; recognised are {FORMS}"
        )
    pair = preference_pair({**fields, "prompt": fields.get(prompt_key)})
    return {**fields, prompt_key: pair["prompt"], RESPONSES: pair["responses"]}


def _with_prompt(fields: Fields, prompt_key: str) -> Fields:
    """A chat in a record without a prompt's field becomes the prompt if the policy answers next."""
    if prompt_key in fields or (chat := _chat(fields)) is None:
        return fields
    if chat and chat[-1]["role"] == "assistant":
        raise ValueError(
            f"there is no field {prompt_key!r}, and the chat ends with the assistant's message: the policy "
            "answers a prompt that ends before it"
        )
    return {**fields, prompt_key: chat}


def _chat(fields: Fields) -> list[Message] | None:
    """The messages of a chat in OpenAI's or ShareGPT's form; None for a record of neither."""
    for name in ("messages", "conversations"):
        if isinstance(text := fields.get(name), str) and text.lstrip().startswith("[{"):
            raise ValueError(
                f"the field {name!r} is a text with JSON in it, and should be a list of messages"
            )
    if isinstance(messages := fields.get("messages"), list):
        return after_system(fields, [_message(message, "messages", i) for i, message in enumerate(messages)])
    if isinstance(turns := fields.get("conversations"), list):
        chat = [_message(turn, "conversations", i) for i, turn in enumerate(turns)]
        return after_system(fields, chat)
    return None


def _message(value: Any, field: str, number: int) -> Message:
    """A message as transformers has it, with the role of ShareGPT's `from` mapped. Raises ValueError."""
    if isinstance(value, Mapping) and isinstance(value.get("from"), str):
        if (role := _ROLES.get(value["from"].lower())) is None:
            known = ", ".join(_ROLES)
            raise ValueError(f"{field}, message {number} is from {value['from'][:40]!r}; known are {known}")
        message = {"role": role, "content": value.get("value")}
    elif not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise ValueError(f"{field}, message {number}: neither role and content nor from and value")
    else:
        message = dict(value)
        if message.get("content") is None and message.get("tool_calls"):
            message["content"] = ""
    if message.get("content") is None and not thoughts(message):
        raise ValueError(f"{field}, message {number} has no content")
    return message


def _divided(chat: Sequence[Message]) -> tuple[Any, Any]:
    """Return the messages before the assistant's first message, and the others. A single answer is a text."""
    first = next((i for i, message in enumerate(chat) if message["role"] == "assistant"), None)
    if first is None:
        raise ValueError("the chat has no message of the assistant: nothing would be learned from it")
    if first == 0:
        raise ValueError("the chat begins with the assistant's message: there is no prompt")
    if chat[-1]["role"] != "assistant":
        raise ValueError(
            f"the chat ends with a message of role {chat[-1]['role']!r}, which nobody answers: leave it out"
        )
    prompt, solution = list(chat[:first]), list(chat[first:])
    single = len(solution) == 1 and not solution[0].get("tool_calls") and not thoughts(solution[0])
    return prompt, solution[0]["content"] if single else solution


def _instruction(fields: Fields) -> str | list[Message]:
    """Alpaca's instruction, with its input below; after its system message and earlier turns, where given.

    LLaMA-Factory's form has the latter two: `system`, and `history`, a list of pairs. Raises ValueError.
    """
    text = fields["instruction"]
    if not isinstance(text, str):
        raise ValueError(f"instruction is {shown_value(text)}, and should be a text")
    extra, history = fields.get("input"), fields.get("history") or []
    text = f"{text}\n\n{extra}" if isinstance(extra, str) and extra.strip() else text
    if not isinstance(history, list) or not all(map(_is_pair, history)):
        raise ValueError(f"history is {shown_value(history)}, and should be a list of pairs of texts")
    before: list[Message] = []
    for question, answer in history:
        before += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return after_system(fields, [*before, {"role": "user", "content": text}] if before else text)


def _is_pair(turn: Any) -> bool:
    return isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)

"""Turns records of well-known data sets into prompts and answers: `data.train.convert`.

Each function takes a record as the data set has it, and returns it with `prompt` and `answer` (or
`responses`) added; None leaves it out. The names of fields are those of the data sets' cards on the hub; the
wording of prompts is that of the recipes which made a data set known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_gvpo.data.tool_calls import thoughts

if TYPE_CHECKING:
    from megatron_gvpo.groups import Rollout

Record = Mapping[str, Any]

HASHES = 'Let\'s think step by step and output the final answer after "####".'
BOX = "Let's think step by step and output the final answer within \\boxed{}."
ANSWER_LINE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{problem}\n\nRemember "
    'to put your answer on its own line after "Answer:".'
)


def gsm8k(record: Record) -> dict[str, Any]:
    """openai/gsm8k: `question`, and `answer`, a solution that ends with `#### 1,234`.

    The prompt requests the same form, as verl's example does: the reward is `math` with `marker: "####"`.
    """
    _, hashes, answer = str(record["answer"]).rpartition("####")
    if not hashes:
        raise ValueError("the answer has no ####")
    prompt = f"{record['question']} {HASHES}"
    return {**record, "prompt": prompt, "answer": answer.strip().replace(",", "")}


def boxed_problem(record: Record) -> dict[str, Any] | None:
    r"""MATH, DeepScaleR, AIME, OpenMathReasoning: `problem`, and an answer under one of three names.

    The answer is `answer` or `expected_answer`, or the last `\boxed{}` of `solution`. A record without any is
    left out, such as OpenMathReasoning's proofs. The prompt requests the same form, as DeepScaleR's and
    verl's examples do.
    """
    answer = _answer(record)
    return None if answer is None else {**record, "prompt": f"{record['problem']} {BOX}", "answer": answer}


def answer_line_problem(record: Record) -> dict[str, Any] | None:
    """As `boxed_problem`, with DAPO's wording, which requests a last line `Answer: ...`."""
    answer = _answer(record)
    prompt = ANSWER_LINE.replace("{problem}", str(record["problem"]))
    return None if answer is None else {**record, "prompt": prompt, "answer": answer}


def dapo(record: Record) -> dict[str, Any]:
    """DAPO-Math-17k: `prompt`, and the answer in `reward_model.ground_truth`.

    In BytedTsinghua-SIA/DAPO-Math-17k the prompt is a chat with DAPO's wording; in
    open-r1/DAPO-Math-17k-Processed it is the problem alone, which gets that wording here. The reward is
    `math` with `marker: "Answer:"`.
    """
    prompt = record["prompt"]
    if isinstance(prompt, str):
        prompt = ANSWER_LINE.replace("{problem}", prompt)
    return {**record, "prompt": prompt, "answer": str(record["reward_model"]["ground_truth"])}


def preference_pair(record: Record) -> dict[str, Any]:
    """The pair `chosen` and `rejected`: texts after `prompt`, or chats that differ in the last turn.

    HuggingFaceH4/ultrafeedback_binarized has chats that begin with the prompt; others have the answers alone,
    as texts or messages, beside a `prompt` and perhaps a `system` message. The chosen response has the reward
    1, the rejected one 0. Raises ValueError for chats that differ before the last message, and where there is
    no prompt.
    """
    chosen, rejected, prompt = record["chosen"], record["rejected"], record.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str):
        texts = chosen, rejected
    else:
        before, texts = _last_turns(chosen, rejected)
        prompt = before or prompt
    if prompt is None:
        raise ValueError("chosen and rejected have no prompt before them, and there is no field 'prompt'")
    responses = [{"response": text, "reward": reward} for text, reward in zip(texts, (1.0, 0.0), strict=True)]
    return {**record, "prompt": after_system(record, prompt), "responses": responses}


def after_system(record: Record, prompt: Any) -> Any:
    """The prompt, a text or chat messages, after the text of the record's field `system`.

    It is unchanged if there is no such text, and if the chat has a system message of its own.
    """
    system = record.get("system")
    if not isinstance(system, str) or not system.strip():
        return prompt
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(chat, list) or (chat and _role(chat[0]) == "system"):
        return prompt
    return [{"role": "system", "content": system}, *chat]


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _last_turns(chosen: Any, rejected: Any) -> tuple[list[dict[str, Any]], tuple[str, str]]:
    """(the messages that two chats share, the last message of each). Raises ValueError."""
    for chat in (chosen, rejected):
        if not isinstance(chat, list) or not all(isinstance(message, Mapping) for message in chat):
            raise ValueError("chosen and rejected are neither two texts nor two chats")
        if not chat or chat[-1].get("role") != "assistant" or not isinstance(chat[-1].get("content"), str):
            raise ValueError("chosen and rejected must end with a message of the assistant")
        if chat[-1].get("tool_calls") or thoughts(chat[-1]):
            raise ValueError(
                "the last message of chosen or rejected has tool_calls or thoughts (reasoning_content), and "
                "its content alone would be trained: write them into the content"
            )
    (*before, last), (*other, other_last) = chosen, rejected
    if other != before:
        raise ValueError(
            "chosen and rejected differ before the last message: no prompt has both as responses"
        )
    if before and before[0].get("role") == "assistant":
        raise ValueError("chosen and rejected begin with the assistant's message: a pair is of one turn")
    return [dict(message) for message in before], (last["content"], other_last["content"])


def _answer(record: Record) -> str | None:
    answers = [record.get(name) for name in ("answer", "expected_answer")]
    answers.append(boxed(str(record.get("solution") or "")))
    return next((str(value).strip() for value in answers if value is not None and str(value).strip()), None)


# --- conversations whose next turn is trained (Cobalt) -----------------------------------------------------


def beginnings(
    record: Mapping[str, Any], rollout: Rollout, prompt_key: str = "prompt", earlier_key: str = "earlier"
) -> list[dict[str, Any]]:
    """A record for every turn of the policy: the chat before it, and the policy's earlier turns.

    The fields of `record` stay; `prompt_key` is the prompt there, a text or chat messages, and becomes chat
    messages. `earlier_key` is for `rollout.conversation.earlier_key`. Partial trajectories as contextual
    prompts (OSU-NLP-Group/cobalt).
    """
    prompt = record[prompt_key]
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    records, earlier = list[dict[str, Any]](), list[str]()
    for message in rollout.messages:
        if message["role"] == "assistant":
            records.append({**record, prompt_key: list(chat), earlier_key: list(earlier)})
            earlier.append(message["content"])
        chat.append(dict(message))
    return records


_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text


def boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{}`, stripped; None if there is none or its braces do not close."""
    return _last_box(text)[0]


def _last_box(text: str) -> tuple[str | None, str]:
    """Return the content of the last box, and the text after it."""
    _, opening, rest = text.rpartition(r"\boxed{")
    depth = 1 if opening else 0
    for brace in _BRACE.finditer(rest):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and opening:
            return rest[: brace.start()].strip(), rest[brace.end() :]
    return None, ""

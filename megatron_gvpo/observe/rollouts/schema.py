"""The columns of the rollout files, one row a response; `docs/howto/read_rollouts.md` explains them to users.

New columns may be added: readers find columns by name, and give null for those that a file lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import pyarrow as pa

Kind = Literal["train", "eval"]

_TOKENS, _NUMBERS = pa.list_(pa.int32()), pa.list_(pa.float32())
TURN = pa.struct(
    [
        ("agent", pa.string()),
        ("text", pa.string()),
        ("tokens", pa.int32()),
        ("reward", pa.float64()),
        ("after", pa.int32()),
        ("given", pa.string()),
        ("given_ids", _TOKENS),
        ("tools", pa.list_(pa.string())),
    ]
)
MESSAGE = pa.struct([(name, pa.string()) for name in ("role", "name", "content", "tool_calls")])


class Column(NamedTuple):
    name: str
    type: Any  # None: a struct with a field for each component of the reward
    meaning: str


COLUMNS = (
    Column("step", pa.int32(), "The training step; for an evaluation, the step before it."),
    Column("kind", pa.string(), "`train` or `eval`."),
    Column("group", pa.int32(), "Number of the response's group in the step, from 0."),
    Column("member", pa.int32(), "Number of the response in its group, from 0."),
    Column("prompt_id", pa.string(), "The prompt's id in the data."),
    Column("prompt", pa.string(), "The prompt as the model gets it, chat template included."),
    Column("prompt_ids", _TOKENS, "Its token ids; null in a row in whose texts a secret was hidden."),
    Column("response", pa.string(), "The response's text, without special tokens."),
    Column("response_ids", _TOKENS, "Its token ids, end token included; null like `prompt_ids`."),
    Column("reward", pa.float64(), "The reward that trains: the weighted components, after shapers."),
    Column("rewards", None, "Each component of the reward, without its weight; null where not scored."),
    Column("reward_errors", None, "Why a component could not be scored (it counts as 0); null where it was."),
    Column("explanations", None, "A judge's explanation, by component; null without one."),
    Column("advantage", pa.float64(), "The advantage; the mean over tokens if these have their own."),
    Column("advantages", _NUMBERS, "The advantage of each token; null if the response has one for all."),
    Column("weight", pa.float64(), "Mean of `weights`; null for a response that is not trained."),
    Column(
        "weights", _NUMBERS, "dL/dlogp of each token in its first update; null if all are equal to `weight`."
    ),
    Column("source", pa.string(), "`policy`, `replay`, `exit`, `demonstration` or `file`."),
    Column("version_first", pa.int32(), "Weight version (a step) that sampled the first token."),
    Column("version_last", pa.int32(), "Weight version that sampled the last token."),
    Column("rollout_logprobs", _NUMBERS, "Log-probs by the engine that sampled; null where none did."),
    Column("trainer_logprobs", _NUMBERS, "Log-probs by the trainer; null in evaluations."),
    Column("finish_reason", pa.string(), "`stop`, or `length` if the response was cut off."),
    Column("images", pa.list_(pa.string()), "The prompt's images: paths, or the beginning of a data: URL."),
    Column("prompt_tokens", pa.int32(), "Length of `prompt_ids`."),
    Column("response_tokens", pa.int32(), "Length of `response_ids`."),
    Column("seconds", pa.float64(), "Seconds of sampling; null if nothing was sampled."),
    Column("server", pa.string(), "URL of the server that sampled the response's end; null without servers."),
    Column(
        "turns",
        pa.list_(TURN),
        "The policy's turns in a conversation, whose tokens follow each other in `response_ids`; null for a "
        "single response. [Conversations](../howto/conversations.md#look-at-conversations) has the fields.",
    ),
    Column(
        "messages",
        pa.list_(MESSAGE),
        "A conversation after its prompt, as a chat, with its calls of tools as JSON; null for a single "
        "response.",
    ),
)


def schema(components: Sequence[str]) -> pa.Schema:
    """The schema of a file of a run whose reward has these components.

    Parquet has no empty structs: without components, the structs have the null type.
    """
    structs = {"rewards": pa.float64(), "reward_errors": pa.string(), "explanations": pa.string()}
    return pa.schema(
        [
            (
                column.name,
                column.type or _struct(components, structs[column.name]),
            )
            for column in COLUMNS
        ]
    )


def file_name(kind: Kind, step: int) -> str:
    """The name of the file of a step, such as step_000012.parquet or eval_000012.parquet."""
    return f"{'step' if kind == 'train' else 'eval'}_{step:06d}.parquet"


def step_of(name: str) -> int | None:
    """The step in the name of a rollout file; None for the name of another file."""
    prefix, _, number = name.removesuffix(".parquet").partition("_")
    known = name.endswith(".parquet") and prefix in ("step", "eval") and number.isdecimal()
    return int(number) if known else None


def _struct(components: Sequence[str], type_: Any) -> Any:
    return pa.struct([(name, type_) for name in components]) if components else pa.null()

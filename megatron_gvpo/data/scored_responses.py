"""Scored responses of records, from which DPO and offline methods learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.core.plain_values import LARGEST, finite_number
from megatron_gvpo.data.messages import shown_value
from megatron_gvpo.data.sources import Record, field_of
from megatron_gvpo.data.turn_writer import TurnWriter
from megatron_gvpo.groups import Scored
from megatron_gvpo.huggingface.end_tokens import ended

_EXAMPLE = '[{"response": "...", "reward": 1.0}, ...]'


def scored_responses(
    record: Record, key: str, writer: TurnWriter, end_token_ids: Sequence[int]
) -> tuple[list[str], tuple[Scored, ...]]:
    """The responses in field `key` of a record as the policy writes them, and with tokens and rewards.

    Raises DataError, which names the record and the response.
    """
    responses = field_of(record, key, "responses_key")
    if not isinstance(responses, list) or not responses:
        raise DataError(f"{record.where}: field {key!r}: expected {_EXAMPLE}, found {shown_value(responses)}")
    texts, scored = list[str](), list[Scored]()
    for i, item in enumerate(responses):
        where = f"{record.where}: field {key!r}, response {i}"
        _check(item, where)
        try:
            texts.append(writer.text(item["response"]))
            ids = ended(writer.tokens(texts[-1]), end_token_ids)
        except DataError as error:
            raise DataError(f"{where} {error}") from None
        scored.append(Scored(ids, item["response"], float(item["reward"])))
    return texts, tuple(scored)


def _check(item: Any, where: str) -> None:
    """Raises DataError, which begins with `where`, for a response without a text or a reward."""
    if not isinstance(item, dict) or not isinstance(item.get("response"), str):
        raise DataError(f"{where}: expected one of {_EXAMPLE}")
    if "reward" not in item:
        raise DataError(f"{where} has no 'reward'; it has {', '.join(item)}")
    if finite_number(item["reward"], LARGEST) is None:
        shown = shown_value(item["reward"])
        raise DataError(f"{where}: expected a number up to {LARGEST:.2g} as its reward, found {shown}")

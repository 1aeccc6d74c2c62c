"""Responses in the tokens of a teacher that has another tokenizer than the policy.

The teacher reads its own chat template of the prompt's messages, then the response's text, then its own end
token where the response ended by itself. The response is never rendered by a template, which might strip
white space or leave thinking out. A response without an exact equivalent is refused with one of `REASONS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.data.prompts import PromptWriter
from megatron_gvpo.groups import Group, Prompt, Rollout
from megatron_gvpo.turns import segments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The reasons for which a teacher cannot score a response, by the end of the metric that counts it.
REASONS = {
    "empty": "have no tokens, the policy's or the teacher's",
    "turns": "are conversations whose turns are not their messages, as those of programs and several agents",
    "special": "have a special token, the policy's or the teacher's, inside their text",
    "bytes": "are not valid UTF-8, such as where a character was cut",
    "tokens": "have other tokens than the policy's tokenizer gives their text",
    "prompt": "answer a prompt that a member has changed, or that the teacher's template refuses",
    "text": "have a text that the teacher's tokenizer does not give back",
    "long": "have more tokens than the teacher's context",
}
_CONTEXT = 8  # tokens before a response, on which the text of its first token depends
# The start of a thinking part, or an empty one, with which a template may open the model's turn.
_OPENER = re.compile(r"(?:<think>\s*(?:</think>\s*)?)?\Z")


class TeacherTokens(NamedTuple):
    """A prompt and a response in the teacher's tokens; the teacher's log-probs of `response` count.

    The first `joint` tokens of `response` also hold the prompt's last characters, because the teacher's
    tokenizer joins these with the response's first characters.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    joint: int


@dataclass(frozen=True)
class Writing:
    """The template, the tokenizer and the end tokens of one model."""

    writer: PromptWriter
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: Sequence[int]  # the first ends a text that is given as a response

    def special_ids(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        own = {number for number, token in added if token.special}
        return own | {*self.tokenizer.all_special_ids, *self.end_token_ids}

    def text(self, context: Sequence[int], ids: Sequence[int]) -> str | None:
        """The text of `ids` after `context`; None if the boundary is inside a character."""
        before = list(context[-_CONTEXT:])
        start, both = self._decoded(before), self._decoded([*before, *ids])
        return both[len(start) :] if both.startswith(start) else None

    def tokens(self, texts: Sequence[str]) -> list[list[int] | None]:
        """The tokens of prompts, or of prompts and responses; None for a text that cannot be written."""
        try:
            return list(self.writer.tokens(texts))
        except DataError:
            return [None] if len(texts) == 1 else [self.tokens([text])[0] for text in texts]

    def _decoded(self, ids: list[int]) -> str:
        how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(ids, **how))


@dataclass
class _Draft:
    """A response, or a turn of a conversation, while it is converted to the teacher's tokens."""

    prompt: Prompt
    messages: Sequence[Mapping[str, Any]]  # the conversation between the prompt and this turn
    own: list[int]  # the policy's tokens without its end token
    ended: bool  # true if the response was not cut off
    text: str = ""
    reason: str | None = None  # the reason in REASONS for which the teacher cannot score it, if any


class TeacherText:
    """Writes groups for the teacher. It has no state: equal groups give equal tokens on every rank."""

    def __init__(self, policy: Writing, teacher: Writing, longest: int | None = None) -> None:
        """`longest`: the most tokens of prompt and response that the teacher takes; None: any number.

        Both models have the same data section, so the same messages reach both templates.
        """
        self._policy, self._teacher, self._longest = policy, teacher, longest
        self._policy_special, self._teacher_special = policy.special_ids(), teacher.special_ids()

    def check(self, prompt: Prompt) -> None:
        """Raises ConfigError, which says why, if the teacher's template refuses a prompt of the data."""
        try:
            self._teacher.writer.text(prompt)
        except DataError as error:
            raise ConfigError(f"teacher.path: the teacher cannot read the data's prompts: {error}") from None

    def write(self, groups: Sequence[Group]) -> list[tuple[TeacherTokens, ...] | str]:
        """Every response of the groups, in their order, in the teacher's tokens, or one of REASONS.

        A conversation has an entry for each of its turns, after the messages before it.
        """
        turns = [self._turns(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        drafts = [draft for own in turns for draft in own]
        self._check_round_trip([draft for draft in drafts if draft.reason is None])
        openings = self._openings(drafts)
        texts = [
            opening[0] + draft.text
            for draft, opening in zip(drafts, openings, strict=True)
            if draft.reason is None and opening is not None
        ]
        encoded = iter(self._teacher.tokens(texts) if texts else ())
        pieces: list[TeacherTokens | str] = []
        for draft, opening in zip(drafts, openings, strict=True):
            if draft.reason is not None or opening is None:
                pieces.append(draft.reason or "prompt")
            else:
                pieces.append(self._joined(draft, *opening, next(encoded)))
        remaining = iter(pieces)
        return [_together(list(islice(remaining, len(own)))) for own in turns]

    def _turns(self, prompt: Prompt, rollout: Rollout) -> list[_Draft]:
        """Return a draft of the response, or one of each turn of a conversation."""
        spans = segments(prompt.token_ids, rollout.token_ids, rollout.turns)
        pairs = [
            (sequence.ids[:begin], sequence.ids[begin : begin + count])
            for sequence in spans
            for begin, _, count in sequence.own
        ]
        drafts = [self._draft(prompt, *pair) for pair in pairs]
        if rollout.turns and not self._know_messages(drafts, rollout):
            return [replace(self._draft(prompt, prompt.token_ids, ()), reason="turns")]
        return drafts

    def _know_messages(self, drafts: Sequence[_Draft], rollout: Rollout) -> bool:
        """Give turns the messages before them. Return False if messages and turns differ."""
        numbers = [i for i, message in enumerate(rollout.messages) if message["role"] == "assistant"]
        has_one_agent = all(not turn.agent for turn in rollout.turns)
        if not has_one_agent or not len(numbers) == len(drafts) == len(rollout.turns):
            return False
        for number, draft in zip(numbers, drafts, strict=True):
            draft.messages = rollout.messages[:number]
        return all(
            draft.reason is not None
            or draft.text.strip() == str(rollout.messages[number].get("content")).strip()
            for number, draft in zip(numbers, drafts, strict=True)
        )

    def _draft(self, prompt: Prompt, context: Sequence[int], tokens: Sequence[int]) -> _Draft:
        ids = list(tokens)
        ended = bool(ids) and ids[-1] in self._policy.end_token_ids
        draft = _Draft(prompt, (), ids[:-1] if ended else ids, ended)
        text = self._policy.text(context, draft.own)
        if not ids:
            draft.reason = "empty"
        elif not self._policy_special.isdisjoint(draft.own):
            draft.reason = "special"
        elif text is None:
            draft.reason = "bytes"
        else:
            draft.text = text
        return draft

    def _check_round_trip(self, drafts: Sequence[_Draft]) -> None:
        """Mark drafts whose tokens differ from the tokens of their text.

        Every tokenisation of a text would get the teacher's probability of the text, so that the sum would
        exceed 1: only one tokenisation of each text may be trained.
        """
        other = self._spelled_otherwise(drafts)
        for draft in other:  # a tokenizer may write a space after a special token where the text has none
            draft.text = draft.text.removeprefix(" ")
        for draft in self._spelled_otherwise(other):
            draft.reason = "bytes" if "\ufffd" in draft.text else "tokens"

    def _spelled_otherwise(self, drafts: Sequence[_Draft]) -> list[_Draft]:
        """The drafts whose text has other tokens in the policy's tokenizer."""
        if not drafts:
            return []
        otherwise = []
        after_prompt = self._policy.tokens([draft.prompt.text + draft.text for draft in drafts])
        for draft, ids in zip(drafts, after_prompt, strict=True):
            count = len(draft.prompt.token_ids)
            is_first = not draft.messages
            if is_first and ids is not None and tuple(ids[:count]) == draft.prompt.token_ids:
                own: list[int] | None = ids[count:]
            else:  # a later turn, or the tokenizer joins the prompt's end with the text, as no response can
                own = self._alone(draft.text)
            if own != draft.own:
                otherwise.append(draft)
        return otherwise

    def _alone(self, text: str) -> list[int] | None:
        try:
            return self._policy.writer.encode(text)
        except Exception:  # the library raises bare Exceptions
            return None

    def _openings(self, drafts: Sequence[_Draft]) -> list[tuple[str, list[int]] | None]:
        """The text before each draft's response, as the teacher reads it, and its tokens.

        None where the teacher cannot read what comes before.
        """
        by_context = {(id(draft.prompt), id(draft.messages)): draft for draft in drafts}
        texts = {key: self._opening(draft.prompt, draft.messages) for key, draft in by_context.items()}
        different = list(dict.fromkeys(text for text in texts.values() if text is not None))
        tokens = dict(zip(different, self._teacher.tokens(different) if different else (), strict=True))
        openings: list[tuple[str, list[int]] | None] = []
        for draft in drafts:
            text = texts[id(draft.prompt), id(draft.messages)]
            ids = None if text is None else tokens[text]
            openings.append(None if text is None or ids is None else (text, ids))
        return openings

    def _opening(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The teacher's text before a turn; None if the data has another prompt, or its template refuses.

        Where a template opens the turn with the start of a thinking part, the response's text begins inside
        it. So the teacher's turn begins as the policy's does, whatever the teacher's template opens.
        """
        try:
            own, text = self._policy.writer.text(prompt), self._teacher.writer.text(prompt, messages)
        except DataError:
            return None
        if own != prompt.text:  # a member added a hint, or examples
            return None
        if not (self._policy.writer.is_chat and self._teacher.writer.is_chat):
            return text
        opener = _OPENER.search(own)
        assert opener is not None, "it matches the empty string at the end"
        return _OPENER.sub("", text, count=1) + opener[0]

    def _joined(
        self, draft: _Draft, prompt: str, prompt_ids: list[int], ids: list[int] | None
    ) -> TeacherTokens | str:
        """The response from the first token on that is not a token of the prompt, or one of REASONS.

        `prompt`, `prompt_ids`: the teacher's; `ids`: its tokens of prompt and response.
        """
        ids = ids or []
        common = _common(prompt_ids, ids)
        scored, joint = ids[common:], len(prompt_ids) - common
        if not self._teacher_special.isdisjoint(scored):
            return "special"
        if not common or not self._gives_back(draft.text, prompt, ids, common, joint > 0):
            return "text"
        if draft.ended:
            scored = [*scored, self._teacher.end_token_ids[0]]
        if not scored:
            return "empty"
        if self._longest is not None and common + len(scored) > self._longest:
            return "long"
        return TeacherTokens(tuple(ids[:common]), tuple(scored), joint)

    def _gives_back(self, text: str, prompt: str, ids: list[int], common: int, is_joined: bool) -> bool:
        """True if the teacher's tokens after the first `common` stand for `text`, and for nothing else."""
        decoded = self._teacher.text(ids[:common], ids[common:])
        if decoded is None or is_joined:
            return decoded is not None and decoded.endswith(text)
        # A tokenizer may write a space after a special token where the text has none.
        return decoded == text or (
            decoded == f" {text}" and self._teacher.tokens([f"{prompt} {text}"]) != [ids]
        )


def _together(pieces: Sequence[TeacherTokens | str]) -> tuple[TeacherTokens, ...] | str:
    """The pieces of a response, or the first reason for which one of them cannot be scored."""
    reasons = [piece for piece in pieces if isinstance(piece, str)]
    return reasons[0] if reasons else tuple(piece for piece in pieces if not isinstance(piece, str))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens in the common beginning of two sequences."""
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)

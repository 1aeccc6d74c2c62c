"""Responses in the tokens of a teacher that has another tokenizer than the policy.

The teacher reads its own chat template of the prompt's messages, then the response's text, then its own end
token where the response ended by itself. The response is never rendered by a template, which might strip
white space or leave thinking out. A response without an exact equivalent is refused with one of `REASONS`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.data.prompts import PromptWriter
from megatron_gvpo.groups import Group, Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The reasons for which a teacher cannot score a response, by the end of the metric that counts it.
REASONS = {
    "empty": "have no tokens, the policy's or the teacher's",
    "turns": "have several turns",
    "special": "have a special token, the policy's or the teacher's, inside their text",
    "bytes": "are not valid UTF-8, such as where a character was cut",
    "tokens": "have other tokens than the policy's tokenizer gives their text",
    "prompt": "answer a prompt that the data does not have so, or that the teacher's template refuses",
    "text": "have a text that the teacher's tokenizer does not give back",
    "long": "have more tokens than the teacher's context",
}
_CONTEXT = 8  # tokens before a response that tell how its first token is written
# The start of a thinking part, or an empty one, with which a template may open the model's turn.
_OPENER = re.compile(r"(?:<think>\s*(?:</think>\s*)?)?\Z")


class TeacherTokens(NamedTuple):
    """A prompt and a response in the teacher's tokens; the teacher's log-probs of `response` count.

    `joint` of the latter are not the response's alone: they hold the prompt's last characters, too, because
    the teacher's tokenizer joins these with the response's first.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    joint: int


@dataclass(frozen=True)
class Dialect:
    """How one model writes: its prompts, its tokens, and the tokens that end its responses."""

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
    """A response on its way into the teacher's tokens."""

    prompt: Prompt
    own: list[int]  # the policy's tokens without its end token
    ended: bool  # the response ended by itself
    text: str
    reason: str | None = None  # one of REASONS, once it is known that the teacher cannot score it


class TeacherText:
    """Writes groups for the teacher. It has no state: equal groups give equal tokens on every rank."""

    def __init__(self, policy: Dialect, teacher: Dialect, longest: int | None = None) -> None:
        """`longest`: the most tokens of prompt and response that the teacher takes; None: any number.

        Both dialects have the same data section, so the same messages reach both templates.
        """
        self._policy, self._teacher, self._longest = policy, teacher, longest
        self._policy_special, self._teacher_special = policy.special_ids(), teacher.special_ids()

    def check(self, prompt: Prompt) -> None:
        """Raises ConfigError, which says why, if the teacher's template refuses a prompt of the data."""
        try:
            self._teacher.writer.text(prompt)
        except DataError as error:
            raise ConfigError(f"teacher.path: the teacher cannot read the data's prompts: {error}") from None

    def write(self, groups: Sequence[Group]) -> list[TeacherTokens | str]:
        """Every response of the groups, in their order, in the teacher's tokens, or one of REASONS."""
        drafts = [self._draft(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        self._check_round_trip([draft for draft in drafts if draft.reason is None])
        prompts = self._prompts([group.prompt for group in groups])
        numbers = [i for i, group in enumerate(groups) for _ in group.rollouts]
        openings = [prompts[i] for i in numbers]
        texts = [
            opening[0] + draft.text
            for draft, opening in zip(drafts, openings, strict=True)
            if draft.reason is None and opening is not None
        ]
        encoded = iter(self._teacher.tokens(texts) if texts else ())
        written: list[TeacherTokens | str] = []
        for draft, opening in zip(drafts, openings, strict=True):
            if draft.reason is not None:
                written.append(draft.reason)
            elif opening is None:
                written.append("prompt")
            else:
                written.append(self._joined(draft, *opening, next(encoded)))
        return written

    def _draft(self, prompt: Prompt, rollout: Rollout) -> _Draft:
        ids = list(rollout.token_ids)
        ended = bool(ids) and ids[-1] in self._policy.end_token_ids
        draft = _Draft(prompt, ids[:-1] if ended else ids, ended, "")
        text = self._policy.text(prompt.token_ids, draft.own)
        if rollout.turns:
            draft.reason = "turns"
        elif not ids:
            draft.reason = "empty"
        elif not self._policy_special.isdisjoint(draft.own):
            draft.reason = "special"
        elif text is None:
            draft.reason = "bytes"
        else:
            draft.text = text
        return draft

    def _check_round_trip(self, drafts: Sequence[_Draft]) -> None:
        """Give drafts a reason whose tokens are not those of their text.

        Every spelling of a text would have the teacher's probability of the text, so that together they would
        have more than 1: only one spelling of each may be trained.
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
            if ids is not None and tuple(ids[:count]) == draft.prompt.token_ids:
                own: list[int] | None = ids[count:]
            else:  # the tokenizer joins the prompt's end with the text, as no response can
                own = self._alone(draft.text)
            if own != draft.own:
                otherwise.append(draft)
        return otherwise

    def _alone(self, text: str) -> list[int] | None:
        try:
            return self._policy.writer.encode(text)
        except Exception:  # tokenizers raises no narrower one
            return None

    def _prompts(self, prompts: Sequence[Prompt]) -> list[tuple[str, list[int]] | None]:
        """The teacher's text and tokens of each prompt; None where it has none."""
        texts = [self._prompt_text(prompt) for prompt in prompts]
        known = {text: None for text in texts if text is not None}
        tokens = dict(zip(known, self._teacher.tokens(list(known)), strict=True)) if known else {}
        return [None if text is None or (ids := tokens[text]) is None else (text, ids) for text in texts]

    def _prompt_text(self, prompt: Prompt) -> str | None:
        """The teacher's rendering of the prompt; None if the data has another prompt, or it refuses.

        Where a template opens the turn with the start of a thinking part, the response's text begins inside
        it. So the teacher's turn begins as the policy's does, whatever its own template opens.
        """
        try:
            own, text = self._policy.writer.text(prompt), self._teacher.writer.text(prompt)
        except DataError:
            return None
        if own != prompt.text:  # a member added a hint, or examples
            return None
        opener = _OPENER.search(own)
        assert opener is not None, "it matches the empty string at the end"
        if not (self._policy.writer.is_chat and self._teacher.writer.is_chat):
            return text
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
        """True if the teacher's tokens after the first `common` are those of this text alone."""
        decoded = self._teacher.text(ids[:common], ids[common:])
        if decoded is None or is_joined:
            return decoded is not None and decoded.endswith(text)
        # A tokenizer may write a space after a special token where the text has none.
        return decoded == text or (
            decoded == f" {text}" and self._teacher.tokens([f"{prompt} {text}"]) != [ids]
        )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)

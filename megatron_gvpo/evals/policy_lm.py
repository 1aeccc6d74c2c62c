"""Adapts the policy to lm-eval's interface for models that take and return text.

This module imports lm-eval, an optional package.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Any, Never

from lm_eval.api.model import LM

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.evals.answers import Answers, scored_part
from megatron_gvpo.huggingface.tokenizer import opened, rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PolicyLM(LM):
    """Answers lm-eval's requests with the policy's samples, several to each prompt.

    `generate_until` samples when it is first called, and returns the first answer to each prompt; `turn` is
    the index of the answers that it returns. In a chat, the policy's thinking is not scored: an answer is the
    text after `</think>`, as in lm-eval's own models with `think_end_token`. lm-eval's own generation
    settings are not used: sampling is that of the configuration's section `eval`. Only the strings that end
    an answer are lm-eval's.
    """

    def __init__(
        self, name: str, answers: Answers, tokenizer: PreTrainedTokenizerBase, chat: bool, longest: int | None
    ) -> None:
        """`longest`: tokens of the longest prompt that leaves room for an answer; None without a limit."""
        super().__init__()
        self.turn = 0
        self.sampled: list[list[tuple[str, str]]] = []
        self._name, self._answers, self._tokenizer = name, answers, tokenizer
        self._chat, self._longest = chat, longest
        self._stderr = sys.stderr

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answers of the present `turn`. Raises DataError for a prompt that is too long; RolloutError."""
        if not self.sampled:
            texts = [request.args[0] for request in requests]
            until = requests[0].args[1].get("until") or []
            strings = [until] if isinstance(until, str) else list(until)
            # shows this program's progress, unlike lm-eval's progress bars
            with redirect_stderr(self._stderr):
                self.sampled = self._answers.sample(self._name, self._tokens(texts), strings)
        return [self._scored(answers[self.turn][0]) for answers in self.sampled]

    def _scored(self, text: str) -> str:
        answer = scored_part(text) if self._chat else text
        return text if len(answer) == len(text) else answer.lstrip()

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt as the run's chat template writes it.

        A last message of the assistant is left open, so that the policy continues it. The template writes
        what precedes it, as for lm-eval's own models: a template that opens a turn with `<think>` opens none
        before a begun answer, which would be among the thoughts there and would not be scored.

        Raises DataError if the template refuses the messages.
        """
        messages = [{"role": message["role"], "content": message["content"]} for message in chat_history]
        try:
            return rendered(
                self._tokenizer,
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except Exception as error:  # a template is a program, and may fail in any way
            raise DataError(f"{self._name}: the chat template refuses the prompt: {error}") from None

    @property
    def tokenizer_name(self) -> str:
        return str(self._tokenizer.name_or_path)

    def loglikelihood(self, requests: Sequence[Any]) -> Never:
        raise NotImplementedError(
            f"{self._name}: the run's engine samples, and lm-eval asks for log-probs here"
        )

    loglikelihood_rolling = loglikelihood

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        if self._chat:  # the template writes the special tokens itself
            prompts = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        else:
            prompts = opened(self._tokenizer, texts)
        for number, ids in enumerate(prompts, start=1):
            if self._longest is not None and len(ids) > self._longest:
                raise DataError(
                    f"{self._name}: the prompt of problem {number} has {len(ids)} tokens, and at most "
                    f"{self._longest} leave room for an answer: lower eval.sampling.max_tokens"
                )
        return prompts

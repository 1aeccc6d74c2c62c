"""A teacher with another tokenizer: it scores the text of responses, and losses get sums over responses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_gvpo.checks.teacher import teacher_room
from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.data.prompts import PromptWriter
from megatron_gvpo.data.task import Task
from megatron_gvpo.data.teacher_text import REASONS, TeacherText, TeacherTokens, Writing
from megatron_gvpo.groups import Group
from megatron_gvpo.huggingface.card import ModelCard
from megatron_gvpo.huggingface.end_tokens import end_token_ids
from megatron_gvpo.huggingface.tokenizer import load_tokenizer, reads_variable, set_template_variables
from megatron_gvpo.settings.reward_servers import TeacherConfig
from megatron_gvpo.settings.sections import DataConfig
from megatron_gvpo.types import TrainBatch


class TextTeacher:
    """Translates a step's responses for the teacher, and the teacher's log-probs for the loss.

    `begin` comes first in a step; rows then refer to its responses by `place_n`. Every rank does the same.
    """

    def __init__(self, text: TeacherText) -> None:
        self._text = text
        self._written: list[tuple[TeacherTokens, ...] | str] = []  # by the response's place in the step
        self._warned: set[str] = set()
        self.metrics: dict[str, float] = {}  # metrics of the present step

    def begin(self, groups: Sequence[Group], step: int) -> tuple[list[Group], list[str]]:
        """Return the groups, in which responses that the teacher cannot score are not trained, and warnings.

        A warning names each reason when it first occurs; the metrics count it in every step.
        """
        self._written = self._text.write(groups)
        refused = Counter(written for written in self._written if isinstance(written, str))
        self.metrics = self._counted(groups, refused)
        warnings = [
            f"step {step}: {count} of {len(self._written)} responses {REASONS[reason]}: the teacher, which "
            f"has another tokenizer, cannot score them, and they are not trained. Later steps only count "
            f"them: teacher/excluded, for the reason {reason!r}"
            for reason, count in refused.items()
            if reason not in self._warned
        ]
        self._warned |= refused.keys()
        return self._trainable(groups), warnings

    def rows(self, rows: TrainBatch) -> TrainBatch:
        """The same responses in the teacher's tokens; a conversation is a row for each of its turns."""
        owner_n, pieces = self._pieces(rows)
        return TrainBatch(
            prompt_ids=[piece.prompt for piece in pieces],
            response_ids=[piece.response for piece in pieces],
            group_n=rows.group_n[owner_n],
            reward_n=rows.reward_n[owner_n],
            truncated_n=rows.truncated_n[owner_n],
        )

    def spread(self, rows: TrainBatch, logp_r: Tensor) -> Tensor:
        """The teacher's log-probs of its own tokens as a column of the policy's tokens, fp32 [r].

        A response's sum is divided evenly over the policy's tokens, so that their sum is the teacher's. The
        parts mean nothing, and a loss that takes them for log-probs of tokens is refused (`Loss.reads_text`).
        """
        owner_n, _ = self._pieces(rows)
        of_pieces = self.rows(rows).sequence_sum(logp_r.double())
        sum_n = of_pieces.new_zeros(len(rows)).index_add(0, owner_n, of_pieces)
        return (sum_n / rows.length_n)[rows.seq_r].float()

    def _pieces(self, rows: TrainBatch) -> tuple[Tensor, list[TeacherTokens]]:
        """The row of each piece, and the pieces."""
        assert rows.place_n is not None, "the trainer numbers the responses of a step"
        owners: list[int] = []
        pieces: list[TeacherTokens] = []
        for row, number in enumerate(rows.place_n.tolist()):
            written = self._written[number]
            assert not isinstance(written, str), "rows that the teacher cannot score are not trained"
            owners += [row] * len(written)
            pieces += written
        return torch.tensor(owners, dtype=torch.int64), pieces

    def _trainable(self, groups: Sequence[Group]) -> list[Group]:
        remaining = iter(self._written)
        changed = []
        for group in groups:
            pairs = list(zip(group.rollouts, remaining, strict=False))
            rollouts = [replace(r, trained=r.trained and not isinstance(w, str)) for r, w in pairs]
            changed.append(replace(group, rollouts=rollouts))
        return changed

    def _counted(self, groups: Sequence[Group], refused: Counter[str]) -> dict[str, float]:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        pairs = [
            (rollout, written)
            for rollout, written in zip(rollouts, self._written, strict=True)
            if not isinstance(written, str)
        ]
        own = sum(len(rollout.token_ids) for rollout, _ in pairs)
        of_teacher = sum(len(piece.response) for _, written in pairs for piece in written)
        joined = sum(any(piece.joint for piece in written) for _, written in pairs)
        total = max(1, len(rollouts))
        excluded = "teacher/excluded"
        metrics = {excluded: refused.total() / total}
        metrics |= {f"{excluded}_{reason}": count / total for reason, count in refused.items()}
        metrics["teacher/joint"] = joined / max(1, len(pairs))
        metrics["teacher/length_ratio"] = of_teacher / max(1, own)
        return metrics


def text_teacher(teacher: TeacherConfig, data: DataConfig, task: Task, card: ModelCard) -> TextTeacher:
    """The translation for a teacher whose model card is `card`.

    Raises ConfigError for a tokenizer that cannot be read, or that cannot write the prompts of the data.
    """
    try:
        tokenizer = load_tokenizer(teacher.path, teacher.trust_remote_code, "teacher.path")
        variables = data.chat_template_kwargs
        set_template_variables(
            tokenizer, {n: v for n, v in variables.items() if reads_variable(tokenizer, n)}
        )
        chat = data.chat_template and bool(tokenizer.chat_template)
        ends = end_token_ids(teacher.path, card, tokenizer, chat=chat)

        def writing(own: PreTrainedTokenizerBase, end_ids: Sequence[int]) -> Writing:
            return Writing(PromptWriter(data.train, data, own, task.longest_prompt, task.tools), own, end_ids)

        _, room, reserved = teacher_room(teacher, card)
        text = TeacherText(
            writing(task.tokenizer, task.end_token_ids),
            writing(tokenizer, ends),
            None if room is None else room - reserved,
        )
        text.check(task.prompts[0])
    except DataError as error:
        raise ConfigError(f"teacher.path={teacher.path}: {error}") from None
    return TextTeacher(text)

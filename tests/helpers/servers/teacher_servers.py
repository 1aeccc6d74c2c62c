"""A stand-in for a teacher's SGLang server, whose log-probs are those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.servers.real_servers import logprobs, reference
from helpers.servers.reward_models import QUIET, Answer, standing_in


@dataclass
class Teacher:
    """A teacher's model, and the requests that it has answered."""

    model: Path
    requests: list[dict[str, Any]] = field(default_factory=list)
    loaded: Any = None
    status: int = 200  # the status of answers; another one is an outage or a refusal
    last: int | None = None  # the number of requests after which an outage begins

    def answer(self, path: str, body: Any) -> Any:
        if path in QUIET:
            return {}
        assert path == "/generate"
        if self.status != 200:
            return self.status
        if self.last is not None and len(self.requests) >= self.last:
            return 503
        self.requests.append(body)
        return generated(body, self.logps(body["input_ids"], body["logprob_start_len"]))

    def logps(self, ids: list[int], start: int) -> list[float]:
        """Log-probs of the tokens after index `start` except the last one."""
        first, rest = ids[: start + 1], ids[start + 1 : -1]
        logps: list[float] = logprobs(self.model, first, rest, loaded=self.loaded).tolist()
        return logps


def generated(body: dict[str, Any], logps: list[float]) -> dict[str, Any]:
    """SGLang's answer: the first token's entry has no log-prob, and the last entry is one too many."""
    ids = body["input_ids"][body["logprob_start_len"] :]
    entries = [[logp, token, None] for logp, token in zip([None, *logps, 0.0], ids, strict=True)]
    return {"meta_info": {"input_token_logprobs": entries}}


@contextmanager
def teaching(model: Path) -> Iterator[tuple[str, Teacher]]:
    """Yield (address, teacher) of a server that has the model."""
    teacher = Teacher(model, loaded=reference(model))
    answer: Answer = teacher.answer
    with standing_in(answer) as url:
        yield url, teacher

"""A calculator of two operands, and the judge of the result."""

from __future__ import annotations

import operator
import re

from megatron_gvpo.conversations import Reply
from megatron_gvpo.groups import Prompt

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
CALL = re.compile(r"\(([0-9]{1,7})([-+*])([0-9]{1,7})\)$")


class Calculator:
    """Answers (47*86) with [4042], and any other call with [E]. {4150} ends the conversation."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.answer = prompt.answer

    def step(self, response: str) -> Reply:
        if not response.endswith(")"):
            return Reply(None, reward=float(response == f"{{{self.answer}}}"))
        call = CALL.search(response)
        if call is None:
            return Reply("[E]", counts={"calls": 1, "bad_calls": 1})
        left, sign, right = call.groups()
        return Reply(f"[{OPERATIONS[sign](int(left), int(right))}]", counts={"calls": 1})

"""The final answer in a response's text, where the reward that judges it looks for it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from megatron_gvpo.data.converters import boxed

if TYPE_CHECKING:
    from megatron_gvpo.settings.rewards import RewardConfig

# Between a marker and its answer: white space with line ends, bold type, and the beginnings of formulas.
_OPENING = re.compile(r"(?:[\s*$]|\\[\[(])*")


def final_answer(text: str, reward: RewardConfig | None = None) -> str:
    r"""The answer that the built-in reward `math` or `reasoning_gym` reads, as a stripped text.

    With another reward, and without one: the content of the last `\boxed{}`. A response without an answer in
    its form is itself the answer, whole.
    """
    options = {} if reward is None or not reward.built_in else reward.options
    if "marker" in options:
        answer = marked(text, options["marker"])
    elif reward is not None and reward.built_in and reward.name == "reasoning_gym":
        tag = re.escape(options.get("tag", "answer"))
        answer = next(reversed(re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)), None)
    else:
        answer = boxed(text)
    return (text if answer is None else answer).strip()


def marked(text: str, marker: str) -> str | None:
    """The answer after the last `marker`, without markup and box; None without a marker."""
    *_, last = [None, *re.finditer(re.escape(marker), text, re.IGNORECASE)]
    if last is None:
        return None
    opening = _OPENING.match(text, last.end())
    assert opening is not None, "it matches the empty text"
    line = text[opening.end() :].partition("\n")[0].rstrip("*$. ")
    line = line.removesuffix(r"\)").removesuffix(r"\]").rstrip("*$. ")
    return boxed(line) or line

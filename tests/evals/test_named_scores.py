"""The scores of made-up answers to each named evaluation: by hand, and by lm-eval's own command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.inputs.chat_tokenizer import tokenizer
from helpers.inputs.named_data import EXAMPLES, GSM8K, SUMS, Bytes, MadeUpAnswers, write_data
from helpers.inputs.text_teachers import OPENING, TEMPLATE, byte_level
from helpers.suite.real_parts import used

from megatron_gvpo.core.errors import DataError
from megatron_gvpo.evals.answers import Answers, _before, scored_part
from megatron_gvpo.evals.catalog import EVALUATIONS
from megatron_gvpo.evals.documents import load_documents
from megatron_gvpo.evals.measure import Measured, measure
from megatron_gvpo.evals.policy_lm import PolicyLM
from megatron_gvpo.groups import Group, Rollout
from megatron_gvpo.settings.sections import EvalConfig

Answer = Callable[[str], str]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("named"))


def scored(data: Path, name: str, *turns: Answer, chat: bool = False) -> tuple[Measured, MadeUpAnswers]:
    used("lm-eval")
    answers = MadeUpAnswers(*turns)
    lm = PolicyLM(name, answers, Bytes(), chat, None)
    documents = load_documents(EVALUATIONS[name], data, None)
    result, records = measure(
        EVALUATIONS[name], documents, lm, chat=chat, n=len(turns), system_prompt="Be exact."
    )
    assert len(records) == result.problems and all(len(r["answers"]) == len(turns) for r in records)
    return result, answers


def number_of(text: str, records: list[dict], field: str) -> int:
    """The problem that the prompt ends with: its place among the records."""
    return max(range(len(records)), key=lambda i: text.rfind(records[i][field]))


def gsm8k_answer(text: str) -> str:
    """Right in the asked form; right elsewhere; wrong; right with a comma; empty."""
    i = number_of(text, GSM8K, "question")
    total = sum(SUMS[i])
    return [f" It is.\n#### {total}", f"So {total} pens.", "#### 3", f"#### {total:,}", ""][i]


def test_gsm8k(data):
    result, answers = scored(data, "gsm8k", gsm8k_answer)
    assert result.metrics == {
        "exact_match,strict-match": pytest.approx(2 / 5),
        "exact_match,flexible-extract": pytest.approx(3 / 5),
    }
    assert result.stderrs["exact_match,flexible-extract"] == pytest.approx((0.6 * 0.4 / 4) ** 0.5)
    assert (result.problems, result.task, result.dataset) == (5, "gsm8k", "openai/gsm8k")
    shown = [prompt.count("Question: ") for prompt in answers.prompts]
    assert shown == [6] * 5, "five solved problems, and the one that is asked"
    assert sum(e["question"] in answers.prompts[0] for e in EXAMPLES) == 5
    assert "Question:" in answers.until


LM_EVALS_OWN = """
import json, sys
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

TEXTS = json.load(open(sys.argv.pop(1)))

@register_model("made-up")
class MadeUp(LM):
    def __init__(self, **options):
        super().__init__()

    def generate_until(self, requests, disable_tqdm=False):
        return [TEXTS[request.args[0]] for request in requests]

    def loglikelihood(self, requests):
        raise AssertionError("gsm8k needs no log-probs")

    loglikelihood_rolling = loglikelihood

cli_evaluate()
"""


def test_gsm8k_is_scored_as_lm_evals_own_command_scores_it(data, tmp_path):
    """The same texts, through lm-eval's command line, its data loader and its definition of gsm8k."""
    result, answers = scored(data, "gsm8k", gsm8k_answer)
    (tmp_path / "texts.json").write_text(json.dumps({p: gsm8k_answer(p) for p in answers.prompts}))
    import lm_eval.tasks

    definition = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml"
    files = {split: str(data / "gsm8k" / f"{split}.jsonl") for split in ("train", "test")}
    (tmp_path / "task.yaml").write_text(
        f"include: {definition}\ntask: gsm8k_here\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs: {{data_files: {json.dumps(files)}}}\n"
    )
    (tmp_path / "own.py").write_text(LM_EVALS_OWN)
    words = ["--model", "made-up", "--tasks", "gsm8k_here", "--include_path", str(tmp_path)]
    words += ["--output_path", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "own.py"), str(tmp_path / "texts.json"), *words],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [file] = tmp_path.glob("out*.json")
    reference = json.loads(file.read_text())["results"]["gsm8k_here"]
    for name, value in result.metrics.items():
        assert reference[name] == pytest.approx(value)
        assert reference[name.replace(",", "_stderr,")] == pytest.approx(result.stderrs[name])


def test_several_answers_to_a_problem_count_as_their_mean(data):
    result, _ = scored(data, "gsm8k", gsm8k_answer, lambda text: "#### 5")
    # By problem, right by the last number: (1, 1), (1, 0), (0, 0), (1, 0), (0, 0).
    name = "exact_match,flexible-extract"
    assert result.metrics[name] == pytest.approx((1 + 0.5 + 0.5) / 5)
    means = [1, 0.5, 0, 0.5, 0]
    variance = sum((m - 0.4) ** 2 for m in means) / 4
    assert result.stderrs[name] == pytest.approx((variance / 5) ** 0.5)
    assert "2 answers each" in result.line()


def test_gsm8k_in_a_chat(data):
    _, answers = scored(data, "gsm8k", gsm8k_answer, chat=True)
    prompt = answers.prompts[0]
    assert prompt.startswith("<system>Be exact.</system><user>")
    assert prompt.count("<user>") == 6 and prompt.endswith("</user><assistant>")


def test_math500_reads_boxes_and_dollars(data):
    right = [r"So \boxed{\frac{1}{2}}.", r"It is $\frac{3}{4}$", r"$\frac{6}{5}$"]
    texts = iter(right)
    result, _ = scored(data, "math500", lambda text: next(texts))
    assert result.metrics == {"exact_match,none": pytest.approx(2 / 3)}
    assert result.task == "hendrycks_math500"


def test_aime24(data):
    texts = iter([r"\boxed{101}", "102", "101"])
    result, _ = scored(data, "aime24", lambda text: next(texts))
    assert result.metrics == {"exact_match,none": pytest.approx(2 / 3)}


def test_gpqa_knows_where_it_put_the_right_choice(data):
    """The choices are shuffled: an answer by the prompt's own letters is right for every problem, or none."""

    def letter(text: str, kind: str) -> str:
        return re.search(rf"\(([A-D])\) {kind} metal", text).group(1)

    result, answers = scored(data, "gpqa", lambda text: f"The answer is ({letter(text, 'right')}).")
    assert set(result.metrics.values()) == {1.0}
    assert len({letter(text, "right") for text in answers.prompts}) > 1, "otherwise nothing is shuffled"
    result, _ = scored(data, "gpqa", lambda text: f"The answer is ({letter(text, 'wrong')}).")
    assert set(result.metrics.values()) == {0.0}


def test_ifeval(data):
    texts = iter(["rain falls", "A b c d e f"])
    result, _ = scored(data, "ifeval", lambda text: next(texts))
    assert result.metrics["prompt_level_strict_acc,none"] == pytest.approx(1 / 2)
    assert result.metrics["inst_level_strict_acc,none"] == pytest.approx(2 / 3)
    assert result.stderrs["inst_level_strict_acc,none"] is None


def test_thoughts_of_a_chat_are_not_scored(data):
    """They have a comma, capitals and another number; lm-eval leaves them out with think_end_token."""
    thought = "<think>\nNo Commas, or 7.\n#### 7\n</think>\n\n"
    texts = iter([f"{thought}rain falls", f"{thought}it is raining on all of the houses in this town today"])
    result, _ = scored(data, "ifeval", lambda text: next(texts), chat=True)
    assert result.metrics["prompt_level_strict_acc,none"] == 1
    result, _ = scored(data, "gsm8k", lambda text: thought + gsm8k_answer(text), chat=True)
    assert result.metrics["exact_match,strict-match"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        (OPENING, "<|model|>"),
        (OPENING.replace("{{ m.content | trim }}", "<think>\n\n</think>\n\n{{ m.content }}"), "</think>\n\n"),
        (TEMPLATE, "<|model|>"),
    ],
)
def test_a_begun_answer_is_not_among_the_thoughts(template: str, opening: str):
    """HumanEval begins the answer; R1's template writes no thoughts before one, Qwen3's empty ones."""
    lm = PolicyLM("humaneval", MadeUpAnswers(str), byte_level(template), True, None)
    user = {"role": "user", "content": "One?"}
    text = lm.apply_chat_template([user, {"role": "assistant", "content": "It is:\n```\ndef one():"}], False)
    assert text.endswith(f"{opening}It is:\n```\ndef one():")
    assert text.count("<think>") == text.count("</think>")
    assert ("<think>" in lm.apply_chat_template([user])) == (template != TEMPLATE)


def test_an_answer_ends_at_a_string_behind_its_thoughts():
    assert _before("Is it a Question: no?</think>5 Question: 6", ["Question:"]) == (
        "Is it a Question: no?</think>5 "
    )
    assert _before("5 Question: 6", ["Question:", "5"]) == ""
    twice = "5?</think>Hm.<think> A Question: 6?</think> 7"
    assert _before(twice, ["Question:"]) == twice
    assert scored_part(twice) == " 7" and scored_part("7") == "7"


class MadeUpEngine:
    """Answers every prompt with one text, and stops as an engine does."""

    shares_gpus = False

    def __init__(self, text: str) -> None:
        self._text = text

    def submit(self, prompts, n, sampling, seed):
        return prompts, n, sampling

    def collect(self, tickets):
        [(prompts, n, sampling)] = tickets
        ends = [self._text.find(text) + len(text) for text in sampling.stop if text in self._text]
        text, reason = self._text[: min(ends, default=None)], "stop" if ends else "length"
        return [Group(prompt, [Rollout([1], [-1.0], text, reason)] * n) for prompt in prompts]


def test_a_string_among_the_thoughts_of_a_chat_ends_no_answer():
    """A model that thinks restates the question; lm-eval's vLLM has no strings for the engine then."""
    text = "<think>Question: 2+3? So 5.</think>It is 5. Question: 6"
    settings = EvalConfig(n=1)

    def answer(chat: bool) -> list[list[tuple[str, str]]]:
        return Answers(MadeUpEngine(text), settings, tokenizer(), chat).sample("gsm8k", [[1]], ["Question:"])

    assert answer(chat=True) == [[("<think>Question: 2+3? So 5.</think>It is 5. ", "stop")]]
    assert answer(chat=False) == [[("<think>", "stop")]]


def test_a_prompt_that_leaves_no_room_is_named(data):
    lm = PolicyLM("gsm8k", MadeUpAnswers(gsm8k_answer), Bytes(), False, 20)
    documents = load_documents(EVALUATIONS["gsm8k"], data, None)
    with pytest.raises(DataError, match=r"gsm8k: the prompt of problem 1 has \d+ tokens, and at most 20"):
        measure(EVALUATIONS["gsm8k"], documents, lm, chat=False, n=1)


def test_log_probs_are_refused_by_name():
    lm = PolicyLM("gsm8k", MadeUpAnswers(gsm8k_answer), Bytes(), False, None)
    for refused in (lm.loglikelihood, lm.loglikelihood_rolling):
        with pytest.raises(NotImplementedError, match="gsm8k: the run's engine samples"):
            refused([])

"""The recipes for public data sets: ten records in each schema, the real loading code, and the rewards.

The records are made by hand. Their fields, files and subsets are those of the data sets' cards on the hub.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.paths import HELPERS, IMPORTS, ROOT
from helpers.servers.dataset_hub import hub_of

from megatron_gvpo.data.converters import preference_pair
from megatron_gvpo.groups import Prompt, Rollout
from megatron_gvpo.rewards.math_answer import verify_math
from megatron_gvpo.settings.config import load_config

RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(file.stem for file in RECIPES.glob("*.yaml"))

# (the answer as the data set writes it, a right response, a wrong one)
GSM8K = [
    ("42", "6 * 7 = 42\n#### 42", "#### 43"),
    ("1,234", "#### 1234", "#### 1.234"),
    ("1,234", "#### 1,234", "#### 1,243"),
    ("18", "#### $18", "#### $81"),
    ("5", "#### 5.", "5"),
    ("70,000", "#### 70,000", "#### 7,000"),
    ("-3", "#### -3", "#### 3"),
    ("7", "#### 3\nNo, wait.\n#### 7", "#### 7\nNo, wait.\n#### 8"),
    ("12", "#### 12", "#### 12 + 1"),
    ("25", "#### 25.00", "#### 2.5"),
]
MATH = [
    (r"\frac{3}{4}", r"\boxed{\frac{3}{4}}", r"\boxed{\frac{4}{3}}"),
    (r"\frac{3}{4}", r"so \boxed{0.75}.", r"so 0.75."),
    (r"\left\{1, 2\right\}", r"\boxed{\{2, 1\}}", r"\boxed{\{1, 3\}}"),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", r"\boxed{\sqrt{3}}"),
    (r"12\text{ cm}", r"\boxed{12}", r"\boxed{13}"),
    ("42", r"\boxed{\text{42}}", r"\boxed{6 \cdot 7}"),
    (r"\left(3, \frac{\pi}{2}\right)", r"\boxed{(3, \frac{\pi}{2})}", r"\boxed{(\frac{\pi}{2}, 3)}"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", r"\boxed{(x-1)^2}"),
    (r"[0,\infty)", r"\boxed{[0, \infty)}", r"\boxed{(0, \infty)}"),
    ("90^\\circ", r"\boxed{90}", r"\boxed{45^\circ}"),
]
AIME = [
    ("025", r"\boxed{25}", r"\boxed{52}"),
    ("25", r"\boxed{025}", r"\boxed{250}"),
    ("204", r"\boxed{204}", r"204"),
    ("0", r"\boxed{000}", r"\boxed{1}"),
    ("7", r"\boxed{ 007 }", r"\boxed{0.07}"),
    ("999", r"\boxed{1} or \boxed{999}", r"\boxed{999} or \boxed{1}"),
    ("113", r"\boxed{113.0}", r"\boxed{113.5}"),
    ("80", r"$\boxed{80}$", r"\boxed{80, 81}"),
    ("385", r"\[\boxed{385}\]", r"\boxed{}"),
    ("110", r"m+n=\boxed{110}", r"\boxed{109+1}"),
]
DAPO = [
    ("34", "Answer: 34", "34"),
    ("34", "Answer: $34$", "Answer: $43$"),
    ("34", "**Answer:** 34", "**Answer:** 3"),
    ("34", r"Answer: \boxed{34}", r"\boxed{34}"),
    ("-7", "answer: -7", "Answer: 7"),
    ("1000", "Answer: 1,000", "Answer: 100"),
    ("2", "Answer: 1\nAnswer: 2", "Answer: 2\nAnswer: 1"),
    ("0", "ANSWER: 0", "Answer:"),
    ("56", "Answer: 56.", "Answer: 5.6"),
    ("113", "Answer: $113$.", "Answer: $100 + 13$"),
]
OPEN_MATH = [
    (r"\frac{1}{2}", r"\boxed{\frac12}", r"\boxed{2}"),
    ("2^{10}", r"\boxed{1024}", r"\boxed{1023}"),
    (r"\sqrt{2}", r"\boxed{\sqrt2}", r"\boxed{2}"),
    ("12", r"\boxed{12}", r"\boxed{21}"),
    (r"(-\infty, 3]", r"\boxed{(-\infty,3]}", r"\boxed{(-\infty,3)}"),
    ("n+1", r"\boxed{1+n}", r"\boxed{n}"),
    ("x = 3", r"\boxed{3}", r"\boxed{-3}"),
    ("1:2", r"\boxed{1:2}", r"\boxed{2:1}"),
    (r"\pi", r"\boxed{\pi}", r"\boxed{3}"),
    ("0.125", r"\boxed{\frac{1}{8}}", r"\boxed{\frac{1}{4}}"),
]
DAPO_SAMPLE = "Solve the following math problem step by step."


def rows(form: str) -> list[dict[str, Any]]:
    """Ten records in a data set's schema."""
    records: list[dict[str, Any]] = []
    for i in range(10):
        text = f"Problem {i}?"
        match form:
            case "gsm8k":
                records.append({"question": text, "answer": f"One step.\n#### {GSM8K[i][0]}"})
            case "math":
                solution = rf"It is $\boxed{{{MATH[i][0]}}}$."
                records.append({"problem": text, "level": "Level 5", "solution": solution, "type": "Algebra"})
            case "math500":
                solution = rf"It is $\boxed{{{MATH[i][0]}}}$."
                own = {"answer": MATH[i][0], "subject": "Algebra", "level": 5, "unique_id": f"test/{i}.json"}
                records.append({"problem": text, "solution": solution, **own})
            case "deepscaler":
                records.append({"problem": text, "answer": MATH[i][0], "solution": "" if i % 2 else "Thus."})
            case "aime24":
                own = {"solution": "Long.", "answer": AIME[i][0], "url": "https://a.b", "year": "2024"}
                records.append({"id": 60 + i, "problem": text, **own})
            case "aime25":
                records.append({"problem": text, "answer": AIME[i][0], "id": str(i)})
            case "dapo":
                reward = {"ground_truth": DAPO[i][0], "style": "rule-lighteval/MATH_v2"}
                own = {"data_source": "math_dapo", "ability": "MATH", "reward_model": reward}
                records.append(
                    {"prompt": text, "solution": DAPO[i][0], **own, "extra_info": {"index": str(i)}}
                )
            case "openmath":
                own = {
                    "problem_type": "has_answer_extracted",
                    "problem_source": "aops_c4",
                    "generation_model": "R",
                }
                own |= {"pass_rate_72b_tir": "0.5", "problem": text, "generated_solution": "<think>"}
                own |= {"inference_mode": "cot", "used_in_kaggle": "no"}
                records.append({"expected_answer": OPEN_MATH[i][0], **own})
            case "ultrafeedback":
                question = {"content": text, "role": "user"}
                chats = [
                    [question, {"content": answer, "role": "assistant"}] for answer in (f"Good {i}.", "Bad.")
                ]
                own = {"score_chosen": 8.5, "score_rejected": 6.0, "messages": chats[0]}
                pair = {"chosen": chats[0], "rejected": chats[1]}
                records.append({"prompt": text, "prompt_id": f"{i:064x}", **pair, **own})
    return records


def parquet(form: str) -> bytes:
    out = BytesIO()
    pq.write_table(pa.Table.from_pylist(rows(form)), out)
    return out.getvalue()


def card(*configs: tuple[str, dict[str, str]]) -> bytes:
    """A README.md that names the files of each subset's splits."""
    listed = [
        {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in files.items()]}
        for name, files in configs
    ]
    return f"---\n{json.dumps({'configs': listed})}\n---\n# Card\n".encode()


HUB = {
    "openai/gsm8k": {
        "README.md": card(
            ("main", {"train": "main/train-*", "test": "main/test-*"}),
            ("socratic", {"train": "socratic/train-*"}),
        ),
        "main/train-00000-of-00001.parquet": parquet("gsm8k"),
        "main/test-00000-of-00001.parquet": parquet("gsm8k"),
        "socratic/train-00000-of-00001.parquet": parquet("aime25"),
    },
    "DigitalLearningGmbH/MATH-lighteval": {
        "README.md": card(("default", {"train": "data/train-*"})),
        "data/train-00000-of-00001.parquet": parquet("math"),
    },
    "HuggingFaceH4/MATH-500": {
        "test.jsonl": "".join(json.dumps(row) + "\n" for row in rows("math500")).encode(),
    },
    "open-r1/DAPO-Math-17k-Processed": {
        "README.md": card(("all", {"train": "all/train-*"}), ("en", {"train": "en/train-*"})),
        "all/train-00000-of-00001.parquet": parquet("aime25"),
        "en/train-00000-of-00001.parquet": parquet("dapo"),
    },
    "agentica-org/DeepScaleR-Preview-Dataset": {"deepscaler.json": json.dumps(rows("deepscaler")).encode()},
    "HuggingFaceH4/aime_2024": {
        "README.md": card(("default", {"train": "data/train-*"})),
        "data/train-00000-of-00001.parquet": parquet("aime24"),
    },
    "math-ai/aime25": {"test.jsonl": "".join(json.dumps(row) + "\n" for row in rows("aime25")).encode()},
    "nvidia/OpenMathReasoning": {
        "README.md": card(("default", {"cot": "data/cot-*", "tir": "data/tir-*"})),
        "data/cot-00000-of-00002.parquet": parquet("openmath"),
        "data/cot-00001-of-00002.parquet": parquet("openmath"),
        "data/tir-00000-of-00001.parquet": parquet("openmath"),
    },
    "HuggingFaceH4/ultrafeedback_binarized": {
        "README.md": card(
            ("default", {"train_prefs": "data/train_prefs-*", "train_sft": "data/train_sft-*"})
        ),
        "data/train_prefs-00000-of-00001.parquet": parquet("ultrafeedback"),
        "data/train_sft-00000-of-00001.parquet": parquet("ultrafeedback"),
    },
}
LOADED = ["openmathreasoning=10", *(n for n in NAMES if n not in ("reasoning_gym", "openmathreasoning"))]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The prompts of every recipe, by its name and the part of the data."""
    home = tmp_path_factory.mktemp("hub")
    with hub_of(HUB) as (url, read):
        hub = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        environment = {**os.environ, **hub, "PYTHONPATH": IMPORTS}
        command = [sys.executable, str(HELPERS / "programs" / "read_recipes.py"), *LOADED]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    fetched = " ".join(read)
    assert "main/train" in fetched and "socratic" not in fetched, "other subsets stay there"
    assert "cot-00000" in fetched and "cot-00001" not in fetched, "a limit reads only the first files"
    prompts: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return prompts


CASES = {
    "gsm8k/train": GSM8K,
    "gsm8k/eval": GSM8K,
    "math/train": MATH,
    "math/eval": MATH,
    "dapo_math_17k/train": DAPO,
    "deepscaler/train": MATH,
    "deepscaler/eval": AIME,
    "aime_2024/eval": AIME,
    "aime_2025/eval": AIME,
    "openmathreasoning/eval": OPEN_MATH,
}


@pytest.mark.parametrize("part", CASES)
def test_records_become_prompts_whose_answers_are_judged_rightly(part: str, loaded: Any):
    prompts = [Prompt(p["id"], (5,), p["text"], p["answer"]) for p in loaded[part][:10]]
    assert len(prompts) == 10
    [reward] = load_config([RECIPES / f"{part.partition('/')[0]}.yaml"]).rewards.components
    verdicts = {
        (gold, response): verify_math(prompt, Rollout([5], [-0.5], response, "stop"), **reward.options)
        for prompt, (gold, right, wrong) in zip(prompts, CASES[part], strict=True)
        for response in (right, wrong)
    }
    expected = {
        (gold, response): float(response == right)
        for gold, right, wrong in CASES[part]
        for response in (right, wrong)
    }
    assert verdicts == expected


@pytest.mark.parametrize(
    ("part", "beginning", "end"),
    [
        ("gsm8k/train", "Problem 3?", 'output the final answer after "####".'),
        ("math/eval", "Problem 3?", r"output the final answer within \boxed{}."),
        ("dapo_math_17k/train", f"{DAPO_SAMPLE} The last line", 'on its own line after "Answer:".'),
        ("dapo_math_17k/eval", f"{DAPO_SAMPLE} The last line", 'on its own line after "Answer:".'),
        ("aime_2025/eval", "Problem 3?", r"output the final answer within \boxed{}."),
    ],
)
def test_prompts_have_the_wording_of_the_published_recipes(part: str, beginning: str, end: str, loaded: Any):
    text = loaded[part][3]["text"].replace("<|im_end|>\n<|im_start|>assistant\n", "")
    assert text.startswith(f"<|im_start|>user\n{beginning}") and text.endswith(end)
    assert "Problem 3?" in text


def test_pairs_of_preferences_become_scored_responses(loaded: Any):
    for i, prompt in enumerate(loaded["ultrafeedback_dpo/train"]):
        chosen, rejected = prompt["responses"]
        assert (chosen[1:], rejected[1:]) == ([f"Good {i}.", 1.0], ["Bad.", 0.0])
        assert f"Problem {i}?" in prompt["text"] and "Good" not in prompt["text"]
    assert len(loaded["ultrafeedback_reward_model/train"]) == 10


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads_names_its_source_and_is_in_the_guide(name: str):
    config = load_config([RECIPES / f"{name}.yaml"])
    text = (RECIPES / f"{name}.yaml").read_text()
    assert "# Published" in text and (
        config.data.train.path in text.partition("output_dir")[0] or "gym" in name
    )
    guide = (ROOT / "docs" / "howto" / "data_recipes.md").read_text()
    assert f"examples/recipes/{name}.yaml" in guide


def test_chats_that_part_before_the_last_message_are_no_pair() -> None:
    """The rejected response would be trained as one to the chosen one's chat."""
    one, other = ([{"role": "user", "content": c}, {"role": "assistant", "content": "x"}] for c in "ab")
    assert preference_pair({"chosen": one, "rejected": one})["prompt"] == one[:1]
    with pytest.raises(ValueError, match="differ before the last message"):
        preference_pair({"chosen": one, "rejected": other})
    thinking = [one[0], {**one[-1], "reasoning_content": "so"}]
    with pytest.raises(ValueError, match="has tool_calls or thoughts"):
        preference_pair({"chosen": thinking, "rejected": one})

